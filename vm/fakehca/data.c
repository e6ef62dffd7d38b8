// SPDX-License-Identifier: GPL-2.0
/*
 * The data path: the thread looks at the doorbell records in memory, so the doorbell pages themselves need no
 * watching.
 */
#include "fakehca.h"

int buf_set(struct fbuf *b, __be64 *pas, u64 bytes, u32 shift, u32 off)
{
	int i;
	b->shift = shift;
	b->off = off;
	b->npas = DIV_ROUND_UP_ULL(bytes + off, 1ull << shift);
	b->pas = kvcalloc(b->npas, 8, GFP_KERNEL);
	if (!b->pas)
		return -ENOMEM;
	for (i = 0; i < b->npas; i++)
		b->pas[i] = be64_to_cpu(pas[i]) & ~0xfffull;
	return 0;
}

static void *buf_at(struct fbuf *b, u64 off)
{
	off += b->off;
	return off >> b->shift < b->npas
		   ? phys_to_virt(b->pas[off >> b->shift] + (off & ((1ull << b->shift) - 1)))
		   : NULL;
}

static void post_cqe(struct hca *h, u32 cqn, struct mlx5_cqe64 *c, u8 opcode)
{
	struct fcq *q = xa_load(&h->cqs, cqn);
	struct mlx5_cqe64 *d;
	if (!q || q->failed)
		return;
	d = buf_at(&q->b, (u64)(q->pi & ((1 << q->log) - 1)) * (q->big ? 128 : 64) + (q->big ? 64 : 0));
	if (!d)
		return;
	c->op_own = d->op_own;
	memcpy(d, c, 63);
	wmb();
	WRITE_ONCE(d->op_own, (opcode << 4) | ((q->pi >> q->log) & 1));
	q->pi++;
}

static void poll_arm(struct hca *h, struct fcq *q)
{
	u32 arm = be32_to_cpu(READ_ONCE(q->dbr[1]));
	unsigned long f;
	struct mlx5_eqe_comp ec = {.cqn = cpu_to_be32(q->cqn)};
	if (q->failed || arm == q->last_arm || !((q->pi - arm) & 0xffffff))
		return;
	q->last_arm = arm;
	spin_lock_irqsave(&h->lk, f);
	if (q->eqn < NEQ && h->eq[q->eqn].on)
		post_eqe(h, &h->eq[q->eqn], MLX5_EVENT_TYPE_COMP, 0, &ec, sizeof(ec));
	spin_unlock_irqrestore(&h->lk, f);
}

static struct hca *by_lid(u16 lid, struct fport **port)
{
	int i, k;
	for (i = 0; i < nhcas; i++)
		for (k = 0; k < nports; k++)
			if (hcas[i]->port[k].lid == lid) {
				*port = &hcas[i]->port[k];
				return hcas[i];
			}
	return NULL;
}

static bool passes(const struct fport *p)
{
	return p->up && !p->lossy;
}

/* host address of VA under a key, and how many bytes are contiguous there; NULL: protection error */
static void *mk_at(struct hca *h, u32 key, u64 va, u32 *len)
{
	struct fmk *m = xa_load(&h->mks, key >> 8);
	u64 ps, i;
	if (!m)
		return NULL;
	if (m->mode == 0)
		return phys_to_virt(va);
	if (m->mode != 1 || va < m->start || va + *len > m->start + m->len)
		return NULL;
	ps = 1ull << m->shift;
	i = ((va & ~(ps - 1)) - (m->start & ~(ps - 1))) >> m->shift;
	if (i >= m->npas)
		return NULL;
	*len = min_t(u64, *len, ps - (va & (ps - 1)));
	return phys_to_virt(m->pas[i] + (va & (ps - 1)));
}

static int copy_rdma(struct hca *a, u32 lkey, u64 la, struct hca *b, u32 rkey, u64 ra, u32 len, bool read)
{
	u32 whole = len;
	void *x, *y;
	if (len && !mk_at(a, lkey, la, &whole))
		return 4;
	whole = len;
	if (len && !mk_at(b, rkey, ra, &whole))
		return 0x13;
	while (len) {
		u32 l = len;
		x = mk_at(a, lkey, la, &l);
		y = mk_at(b, rkey, ra, &l);
		if (!x || !y)
			return x ? 0x13 : 4;
		if (read)
			memcpy(x, y, l);
		else
			memcpy(y, x, l);
		la += l;
		ra += l;
		len -= l;
	}
	return 0;
}

static void cqe_err(struct hca *h, struct fqp *q, bool snd, u16 wqe, u8 op, u8 synd, u8 vend)
{
	struct mlx5_err_cqe e = {.srqn = cpu_to_be32(q->uidx),
				 .vendor_err_synd = vend,
				 .syndrome = synd,
				 .s_wqe_opcode_qpn = cpu_to_be32(op << 24 | q->qpn),
				 .wqe_counter = cpu_to_be16(wqe)};
	post_cqe(h, snd ? q->cqn_snd : q->cqn_rcv, (void *)&e, snd ? MLX5_CQE_REQ_ERR : MLX5_CQE_RESP_ERR);
}

int rq_stride(struct fqp *q)
{
	return 1 << q->rq_shift;
}

/* takes one receive: scatters LEN bytes at SRC into it (src NULL: nothing to scatter); -1: none posted */
static int take_recv(struct hca *h, struct fqp *q, u8 *src, u32 len, u8 cqop, __be32 imm)
{
	u16 tail = be32_to_cpu(READ_ONCE(q->dbr[0]));
	struct mlx5_wqe_data_seg *s;
	int i, ns;
	u32 left = len;
	struct mlx5_cqe64 c = {0};
	if (!q->rq || tail == q->rq_head)
		return -1;
	s = buf_at(&q->b, (u64)(q->rq_head & ((1 << q->log_rq) - 1)) << q->rq_shift);
	ns = rq_stride(q) / 16;
	for (i = 0; src && left && s && i < ns && be32_to_cpu(s[i].lkey) != 0x100; i++) {
		u32 l = min(left, be32_to_cpu(s[i].byte_count));
		u64 va = be64_to_cpu(s[i].addr);
		left -= l;
		while (l) {
			u32 k = l;
			void *d = mk_at(h, be32_to_cpu(s[i].lkey), va, &k);
			if (!d)
				return 4;
			memcpy(d, src, k);
			src += k;
			va += k;
			l -= k;
		}
	}
	c.srqn = cpu_to_be32(q->uidx);
	c.immediate = imm;
	c.byte_cnt = cpu_to_be32(len);
	c.sop_drop_qpn = cpu_to_be32(q->qpn);
	c.wqe_counter = cpu_to_be16(q->rq_head);
	c.flags_rqpn = cpu_to_be32(q->rqpn);
	q->rq_head++;
	post_cqe(h, q->cqn_rcv, &c, cqop);
	return 0;
}

void qp_error(struct fqp *q)
{
	q->state = 6;
	q->stall = 0;
}

static u8 bounce[1 << 20]; /* SENDs are gathered here; one thread, so one buffer */

static int send_one(struct hca *h, struct fqp *q, u8 *w, int ds, u8 *vend)
{
	struct mlx5_wqe_ctrl_seg *c = (void *)w;
	u8 op = be32_to_cpu(c->opmod_idx_opcode);
	struct hca *r;
	struct fport *there;
	struct fqp *rq;
	int off = 16, e = 0;
	u64 ra = 0;
	u32 rk = 0, len = 0;
	bool rd = op == MLX5_OPCODE_RDMA_READ,
	     wr = op == MLX5_OPCODE_RDMA_WRITE || op == MLX5_OPCODE_RDMA_WRITE_IMM,
	     sd = op == MLX5_OPCODE_SEND || op == MLX5_OPCODE_SEND_IMM;
	if (op == MLX5_OPCODE_NOP)
		return 0;
	if (q->st != 0 /* not RC: answered, carried nowhere */)
		return 0;
	r = by_lid(q->rlid, &there);
	rq = r ? xa_load(&r->qps, q->rqpn) : NULL;
	if (!passes(&h->port[q->port]) || !r || !passes(there) || r->dead || !rq || (rq->state != 2 && rq->state != 3))
		return -1; /* no acknowledge will come */
	if (op == MLX5_OPCODE_RDMA_WRITE_IMM && h->port[q->port].lose_imm)
		return -1;
	if (rq->refuse) {
		rq->refuse = false;
		qp_error(rq);
		*vend = 0x89;
		return MLX5_CQE_SYNDROME_REMOTE_OP_ERR;
	}
	if (rd || wr) {
		struct mlx5_wqe_raddr_seg *g = (void *)(w + off);
		ra = be64_to_cpu(g->raddr);
		rk = be32_to_cpu(g->rkey);
		off += 16;
	} else if (!sd) {
		*vend = 0x68;
		return 2;
	}
	if ((sd || op == MLX5_OPCODE_RDMA_WRITE_IMM) &&
	    (!rq->rq || (u16)be32_to_cpu(READ_ONCE(rq->dbr[0])) == rq->rq_head))
		return -2; /* receiver not ready */
	while (off < ds * 16 && !e) {
		struct mlx5_wqe_data_seg *s = (void *)(w + off);
		u32 bc = be32_to_cpu(s->byte_count);
		if (bc & MLX5_INLINE_SEG) {
			u32 l = bc & 0x3ff;
			u8 *src = w + off + 4;
			if (sd) {
				memcpy(bounce + len, src, l);
			} else {
				u32 done = 0;
				while (done < l) {
					u32 k = l - done;
					void *d = mk_at(r, rk, ra + len + done, &k);
					if (!d) {
						e = 0x13;
						break;
					}
					memcpy(d, src + done, k);
					done += k;
				}
			}
			len += l;
			off += ALIGN(l + 4, 16);
			continue;
		}
		if (!bc && sd)
			bc = 0;
		if (sd) {
			u32 done = 0;
			if (len + bc > sizeof(bounce)) {
				e = 1;
				break;
			}
			while (done < bc) {
				u32 k = bc - done;
				void *x = mk_at(h, be32_to_cpu(s->lkey), be64_to_cpu(s->addr) + done, &k);
				if (!x) {
					e = 4;
					break;
				}
				memcpy(bounce + len + done, x, k);
				done += k;
			}
		} else
			e = copy_rdma(h, be32_to_cpu(s->lkey), be64_to_cpu(s->addr), r, rk, ra + len, bc, rd);
		len += bc;
		off += 16;
	}
	if (!e && sd)
		e = take_recv(r, rq, bounce, len,
			      op == MLX5_OPCODE_SEND_IMM ? MLX5_CQE_RESP_SEND_IMM : MLX5_CQE_RESP_SEND,
			      c->imm)
			? 0x13
			: 0;
	else if (!e && op == MLX5_OPCODE_RDMA_WRITE_IMM)
		take_recv(r, rq, NULL, len, MLX5_CQE_RESP_WR_IMM, c->imm);
	if (e == 0x13) {
		struct mlx5_eqe_qp_srq ev = {.qp_srq_n = cpu_to_be32(rq->qpn)};
		*vend = 0x88;
		qp_error(rq);
		event(r, MLX5_EVENT_TYPE_WQ_ACCESS_ERROR, 0, &ev, sizeof(ev));
	}
	if (e == 4)
		*vend = 0x56;
	return e;
}

/* whether there was something to do */
static bool run_qp(struct hca *h, struct fqp *q)
{
	u16 tail;
	u32 m = (1 << q->log_sq) - 1;
	int budget = 64;
	bool moved = false;
	if (!q->dbr || q->mute || (q->state != 3 && q->state != 6))
		return false;
	tail = be32_to_cpu(READ_ONCE(q->dbr[1]));
	rmb();
	while (q->sq && q->sq_head != tail && budget--) {
		u8 w[1024], vend = 0, op;
		struct mlx5_wqe_ctrl_seg *c = (void *)w;
		int ds, bb, i, e;
		u8 *x = buf_at(&q->b, q->sq_off + (u64)(q->sq_head & m) * 64);
		u64 now = ktime_get_ns();
		if (!x)
			break;
		memcpy(w, x, 64);
		ds = be32_to_cpu(c->qpn_ds) & 0x3f;
		bb = DIV_ROUND_UP(max(ds, 1), 4);
		if (bb > 16)
			break;
		op = be32_to_cpu(c->opmod_idx_opcode);
		for (i = 1; i < bb; i++) {
			x = buf_at(&q->b, q->sq_off + (u64)((q->sq_head + i) & m) * 64);
			if (x)
				memcpy(w + i * 64, x, 64);
		}
		if (q->state == 6) {
			cqe_err(h, q, true, q->sq_head, op, 5, 0xf9);
			q->sq_head += bb;
			continue;
		}
		e = send_one(h, q, w, ds, &vend);
		if (e < 0) { /* keep trying, as the timeout and the retry counters say */
			u64 per = e == -1 ? 4096ull << q->ack_timeout : 655360;
			int cnt = e == -1 ? q->retry : q->rnr_retry;
			if (!q->stall)
				q->stall = now;
			if ((e == -1 && !q->ack_timeout) || (e == -2 && q->rnr_retry == 7) ||
			    now - q->stall < per * (cnt + 1))
				return moved;
			e = e == -1 ? 0x15 : 0x16;
			vend = e == 0x15 ? 0x81 : 0x87;
		}
		q->stall = 0;
		moved = true;
		if (e) {
			cqe_err(h, q, true, q->sq_head, op, e, vend);
			qp_error(q);
			q->sq_head += bb;
			continue;
		}
		if ((c->fm_ce_se & 0xc) == 0x8) {
			struct mlx5_cqe64 k = {.srqn = cpu_to_be32(q->uidx),
					       .sop_drop_qpn = cpu_to_be32(op << 24 | q->qpn),
					       .wqe_counter = cpu_to_be16(q->sq_head)};
			post_cqe(h, q->cqn_snd, &k, MLX5_CQE_REQ);
		}
		q->sq_head += bb;
	}
	if (q->state == 6 && q->rq) {
		u16 t = be32_to_cpu(READ_ONCE(q->dbr[0]));
		while (q->rq_head != t) {
			cqe_err(h, q, false, q->rq_head, 0, 5, 0xf9);
			q->rq_head++;
		}
	}
	return moved;
}

bool run_data(struct hca *h)
{
	unsigned long k;
	struct fqp *q;
	struct fcq *c;
	bool moved = false;
	xa_for_each(&h->qps, k, q) moved |= run_qp(h, q);
	xa_for_each(&h->cqs, k, c) poll_arm(h, c);
	return moved;
}
