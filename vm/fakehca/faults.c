// SPDX-License-Identifier: GPL-2.0
/* Faults by hand. */
#include "fakehca.h"

#include <linux/debugfs.h>
#include <linux/uaccess.h>

/* A queue pair fails of itself: it is in the error state, and says so. After a work queue catastrophic error
 * nothing can be read from its queue: its requests do not even end. */
static int fail_qp(struct hca *h, u32 qpn, u8 type)
{
	struct mlx5_eqe_qp_srq e = {.qp_srq_n = cpu_to_be32(qpn)};
	struct fqp *q = xa_load(&h->qps, qpn);
	if (!q)
		return -ENOENT;
	qp_error(q);
	q->mute = type == MLX5_EVENT_TYPE_WQ_CATAS_ERROR;
	return event(h, type, 0, &e, sizeof(e)) ? 0 : -ENXIO;
}

/* A completion queue fails: it takes nothing any more, and its queue pairs are in the error state. */
static int fail_cq(struct hca *h, u32 cqn, u8 syndrome)
{
	struct mlx5_eqe_cq_err e = {.cqn = cpu_to_be32(cqn), .syndrome = syndrome};
	struct fcq *c = xa_load(&h->cqs, cqn);
	struct fqp *q;
	unsigned long k;
	if (!c)
		return -ENOENT;
	c->failed = true;
	xa_for_each(&h->qps, k, q)
	{
		if (q->cqn_snd == cqn || q->cqn_rcv == cqn)
			qp_error(q);
	}
	return event(h, MLX5_EVENT_TYPE_CQ_ERROR, 0, &e, sizeof(e)) ? 0 : -ENXIO;
}

static void fail_firmware(struct hca *h, u8 syndrome, u8 severity)
{
	iowrite8(syndrome, &h->iseg->health.synd);
	iowrite8(severity, &h->iseg->health.rfr_severity);
	iowrite32be(0xdead, &h->iseg->health.assert_exit_ptr);
}

/* the port that an argument names; 0 is the first, too */
static struct fport *port_of(struct hca *h, u32 number)
{
	return number <= nports ? &h->port[number ? number - 1 : 0] : NULL;
}

/* whether anybody listens to its event */
bool set_port(struct hca *h, struct fport *port, bool up)
{
	struct mlx5_eqe_port_state e = {.port = (port - h->port + 1) << 4};
	port->up = up;
	return event(h, MLX5_EVENT_TYPE_PORT_CHANGE,
		     up ? MLX5_PORT_CHANGE_SUBTYPE_ACTIVE : MLX5_PORT_CHANGE_SUBTYPE_DOWN, &e, sizeof(e));
}

/* makes the fault that a line describes; what became of it */
static int make(const char *line)
{
	char what[24];
	int d, k;
	struct fport *port;
	u32 a1 = 0, a2 = 0, a3 = 0;
	struct hca *h;
	bool told = true;
	k = sscanf(line, "%d %23s %i %i %i", &d, what, &a1, &a2, &a3);
	if (k < 2 || d < 0 || d >= nhcas)
		return -EINVAL;
	h = hcas[d];
	if (!strcmp(what, "port_down") || !strcmp(what, "port_up")) {
		port = port_of(h, a1);
		if (!port)
			return -EINVAL;
		told = set_port(h, port, what[5] == 'u');
	} else if (!strcmp(what, "port_down_at")) {
		h->down_op = a1;
		h->down_in = a2;
	} else if (!strcmp(what, "lose") || !strcmp(what, "lose_imm")) {
		port = port_of(h, a2);
		if (!port)
			return -EINVAL;
		*(what[4] ? &port->lose_imm : &port->lossy) = a1;
	} else if (!strcmp(what, "qp_fatal")) {
		return fail_qp(h, a1, MLX5_EVENT_TYPE_WQ_CATAS_ERROR);
	} else if (!strcmp(what, "qp_access")) {
		return fail_qp(h, a1, MLX5_EVENT_TYPE_WQ_ACCESS_ERROR);
	} else if (!strcmp(what, "qp_refuse")) {
		struct fqp *q = xa_load(&h->qps, a1);
		if (!q)
			return -ENOENT;
		q->refuse = true;
	} else if (!strcmp(what, "cq_err")) {
		return fail_cq(h, a1, a2);
	} else if (!strcmp(what, "eqe")) {
		__be32 e[7] = {0};
		e[0] = cpu_to_be32(a3);
		told = event(h, a1, a2, e, sizeof(e));
	} else if (!strcmp(what, "health")) {
		fail_firmware(h, a1, a2);
	} else if (!strcmp(what, "die")) {
		h->dead = true;
		fail_firmware(h, 1, 0x80);
	} else if (!strcmp(what, "cmdfail")) {
		h->fail_op = a1;
		h->fail_status = a2;
		h->fail_synd = a3;
	} else if (!strcmp(what, "cmdhang"))
		h->hang_op = a1;
	else
		return -EINVAL;
	return told ? 0 : -ENXIO; /* nobody listens */
}

static ssize_t inject(struct file *f, const char __user *ub, size_t cnt, loff_t *pos)
{
	char b[80] = "";
	int e;
	if (cnt >= sizeof(b) || copy_from_user(b, ub, cnt))
		return -EINVAL;
	mutex_lock(&world);
	e = make(b);
	mutex_unlock(&world);
	return e ?: cnt;
}

static int show(struct seq_file *s, void *v)
{
	int i, p;
	unsigned long k;
	struct fqp *q;
	mutex_lock(&world);
	for (i = 0; i < nhcas; i++) {
		seq_printf(s, "hca %d: %lu commands", i, hcas[i]->ncmd);
		for (p = 0; p < nports; p++)
			seq_printf(s, ", port %d %s", p + 1, hcas[i]->port[p].up ? "up" : "down");
		seq_puts(s, "\n");
		xa_for_each(&hcas[i]->qps, k, q) seq_printf(s, "  qpn 0x%x st %d state %d cqn 0x%x\n", q->qpn,
							 q->st, q->state, q->cqn_snd);
	}
	mutex_unlock(&world);
	return 0;
}

static int op_(struct inode *i, struct file *f)
{
	return single_open(f, show, NULL);
}
static const struct file_operations fops = {.owner = THIS_MODULE,
					    .open = op_,
					    .read = seq_read,
					    .llseek = seq_lseek,
					    .release = single_release,
					    .write = inject};
static struct dentry *dbg;

void faults_begin(void)
{
	dbg = debugfs_create_file("fakehca", 0600, NULL, NULL, &fops);
}

void faults_end(void)
{
	debugfs_remove(dbg);
}
