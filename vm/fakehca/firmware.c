// SPDX-License-Identifier: GPL-2.0
/* What the firmware answers to commands, and the thread that plays it. */
#include "fakehca.h"

#include <linux/delay.h>
#include <linux/kthread.h>

static int trace;
module_param(trace, int, 0644);
static bool dataplane = true;
module_param(dataplane, bool, 0644);

static void caps(struct hca *h, int type, void *c)
{
#define G(f, v) MLX5_SET(cmd_hca_cap, c, f, v)
	if (type == MLX5_CAP_GENERAL) {
		G(log_max_srq_sz, 15);
		G(log_max_qp_sz, 15);
		G(log_max_qp, 18);
		G(log_max_srq, 18);
		G(log_max_cq_sz, 22);
		G(log_max_cq, 18);
		G(log_max_eq_sz, 22);
		G(log_max_mkey, 24);
		G(log_max_eq, 6);
		G(max_num_eqs, 32);
		G(max_indirection, 4);
		G(fixed_buffer_size, 1);
		G(log_max_mrw_sz, 40);
		G(log_max_bsf_list_size, 4);
		G(log_max_klm_list_size, 16);
		G(log_max_ra_req_qp, 4);
		G(log_max_ra_res_qp, 4);
		G(log_max_ra_req_dc, 4);
		G(log_max_ra_res_dc, 4);
		G(gid_table_size, 0);
		G(pkey_table_size, 0);
		G(max_qp_cnt, 100);
		G(ib_virt, 1);
		G(vport_group_manager, 0);
		G(vhca_group_manager, 0);
		G(local_ca_ack_delay, 15);
		G(port_type, 0 /* InfiniBand */);
		G(num_ports, nports);
		G(log_max_msg, 30);
		G(stat_rate_support, 0x1ff);
		G(cqe_version, 1);
		G(compact_address_vector, 1);
		G(umr_modify_entity_size_disabled, 1);
		G(umr_ptr_rlky, 1);
		G(imaicl, 1);
		G(cq_oi, 1);
		G(cq_resize, 1);
		G(cq_moderation, 1);
		G(block_lb_mc, 1);
		G(apm, 1);
		G(sctr_data_cqe, 1);
		G(qkv, 1);
		G(pkv, 1);
		G(xrc, 1);
		G(ud, 1);
		G(uc, 1);
		G(rc, 1);
		G(uar_4k, 1);
		G(uar_sz, 6);
		G(log_pg_sz, 12);
		G(bf, 0);
		G(log_bf_reg_size, 9);
		G(max_wqe_sz_sq, 512);
		G(max_wqe_sz_rq, 512);
		G(max_wqe_sz_sq_dc, 512);
		G(max_qp_mcg, 240);
		G(log_max_mcg, 16);
		G(log_max_transport_domain, 16);
		G(log_max_pd, 16);
		G(log_max_xrcd, 16);
		G(device_frequency_mhz, 156);
		G(device_frequency_khz, 156250);
		G(num_of_uars_per_page, 1);
		G(log_max_uctx, 5);
		G(log_max_umem, 16);
		G(general_notification_event, 1);
		G(port_module_event, 1);
		G(null_mkey, 1);
		G(log_max_uctx, 8);
		G(log_max_umem, 16);
	}
#undef G
}

static u32 alloc_id(struct hca *h)
{
	return h->next_id++;
}

/* the port that a command names, from 0: one of a device with a single port names none */
static int port_index(u8 number)
{
	return number && number <= nports ? number - 1 : 0;
}

static void fill_vport(struct hca *h, int port, void *c)
{
	const struct fport *p = &h->port[port];
	MLX5_SET(hca_vport_context, c, port_physical_state, p->up ? 5 : 2);
	MLX5_SET(hca_vport_context, c, vport_state, p->up ? 4 : 1);
	MLX5_SET(hca_vport_context, c, port_state, p->up ? 4 : 1);
	MLX5_SET(hca_vport_context, c, vport_state_policy, 2);
	MLX5_SET64(hca_vport_context, c, system_image_guid, h->guid);
	MLX5_SET64(hca_vport_context, c, port_guid, h->guid + 1 + port);
	MLX5_SET64(hca_vport_context, c, node_guid, h->guid);
	MLX5_SET(hca_vport_context, c, cap_mask1, 0x2650e848);
	MLX5_SET(hca_vport_context, c, lid, p->lid);
	MLX5_SET(hca_vport_context, c, sm_lid, 1);
	MLX5_SET(hca_vport_context, c, subnet_timeout, 18);
}

static u8 command(struct hca *h, u8 *in, u32 inlen, u8 *out, u32 outlen)
{
	u16 op = be16_to_cpup((__be16 *)in), mod = be16_to_cpup((__be16 *)(in + 6));
	__be32 *o32 = (__be32 *)out;
	struct fqp *q;
	int i;
	h->ncmd++;
	if (trace)
		pr_info("fakehca%d: op 0x%03x mod 0x%x in %u out %u\n", h->idx, op, mod, inlen, outlen);
	if (h->fail_op && op == h->fail_op) {
		out[0] = h->fail_status;
		o32[1] = cpu_to_be32(h->fail_synd);
		return 0;
	}
	switch (op) {
	case MLX5_CMD_OP_QUERY_ISSI:
		o32[(outlen - 4) / 4] = cpu_to_be32(3);
		MLX5_SET(query_issi_out, out, current_issi, 0);
		break;
	case MLX5_CMD_OP_QUERY_HCA_CAP:
		if (outlen > 16)
			caps(h, mod >> 1, out + 16);
		break;
	case MLX5_CMD_OP_QUERY_ADAPTER:
		if (outlen > 16) {
			void *a = MLX5_ADDR_OF(query_adapter_out, out, query_adapter_struct);
			MLX5_SET(query_adapter_param_block, a, ieee_vendor_id, 0x2c9);
			memcpy(MLX5_ADDR_OF(query_adapter_param_block, a, vsd_contd_psid), "FAKE000000000001",
			       16);
		}
		break;
	case MLX5_CMD_OP_CREATE_EQ: {
		void *c = MLX5_ADDR_OF(create_eq_in, in, eq_context_entry);
		struct feq *e = NULL;
		__be64 *p = (__be64 *)MLX5_ADDR_OF(create_eq_in, in, pas);
		unsigned long f;
		int k;
		for (i = 1; i < NEQ; i++)
			if (!h->eq[i].on) {
				e = &h->eq[i];
				break;
			}
		if (!e) {
			out[0] = 8;
			break;
		}
		e->eqn = i;
		e->log = MLX5_GET(eqc, c, log_eq_size);
		e->intr = MLX5_GET(eqc, c, intr) & 31;
		h->vec[e->intr].irq = pci_irq_vector(h->pdev, e->intr);
		e->pi = 0;
		e->page_shift = MLX5_GET(eqc, c, log_page_size) + 12;
		e->npas = max_t(int, 1, (64ull << e->log) >> e->page_shift);
		e->pas = kcalloc(e->npas, 8, GFP_KERNEL);
		for (k = 0; k < e->npas; k++)
			e->pas[k] = be64_to_cpu(p[k]);
		for (k = 0; k < 4; k++)
			e->mask[k] =
			    be64_to_cpup((__be64 *)(MLX5_ADDR_OF(create_eq_in, in, event_bitmask)) + k);
		if (trace)
			pr_info("fakehca%d: eqn %d size %d vector %d mask %llx\n", h->idx, i, 1 << e->log,
				e->intr, e->mask[0]);
		spin_lock_irqsave(&h->lk, f);
		e->on = true;
		spin_unlock_irqrestore(&h->lk, f);
		o32[2] = cpu_to_be32(i);
		break;
	}
	case MLX5_CMD_OP_DESTROY_EQ: {
		unsigned long f;
		i = in[11] % NEQ;
		spin_lock_irqsave(&h->lk, f);
		h->eq[i].on = false;
		spin_unlock_irqrestore(&h->lk, f);
		kfree(h->eq[i].pas);
		h->eq[i].pas = NULL;
		break;
	}
	case MLX5_CMD_OP_ALLOC_UAR:
		o32[2] = cpu_to_be32(h->next_uar++ % 1900 + 16);
		break;
	case MLX5_CMD_OP_CREATE_CQ: {
		void *c = MLX5_ADDR_OF(create_cq_in, in, cq_context);
		struct fcq *k = kzalloc(sizeof(*k), GFP_KERNEL);
		k->cqn = alloc_id(h);
		k->log = MLX5_GET(cqc, c, log_cq_size);
		k->big = MLX5_GET(cqc, c, cqe_sz) == 1;
		k->eqn = MLX5_GET(cqc, c, c_eqn_or_apu_element);
		k->last_arm = ~0u;
		{
			u32 sh = MLX5_GET(cqc, c, log_page_size) + 12;
			buf_set(&k->b, (__be64 *)MLX5_ADDR_OF(create_cq_in, in, pas),
				(k->big ? 128ull : 64ull) << k->log, sh,
				MLX5_GET(cqc, c, page_offset) << (sh - 6));
		}
		k->dbr = phys_to_virt(MLX5_GET64(cqc, c, dbr_addr));
		xa_store(&h->cqs, k->cqn, k, GFP_KERNEL);
		o32[2] = cpu_to_be32(k->cqn);
		break;
	}
	case MLX5_CMD_OP_DESTROY_CQ: {
		struct fcq *k = xa_erase(&h->cqs, be32_to_cpup((__be32 *)(in + 8)) & 0xffffff);
		if (k) {
			kvfree(k->b.pas);
			kfree(k);
		}
		break;
	}
	case MLX5_CMD_OP_CREATE_MKEY: {
		void *c = MLX5_ADDR_OF(create_mkey_in, in, memory_key_mkey_entry);
		struct fmk *k = kzalloc(sizeof(*k), GFP_KERNEL);
		int nn = MLX5_GET(create_mkey_in, in, translations_octword_actual_size) * 2;
		__be64 *p = (__be64 *)MLX5_ADDR_OF(create_mkey_in, in, klm_pas_mtt);
		k->idx = alloc_id(h);
		k->mode = MLX5_GET(mkc, c, access_mode_1_0) | MLX5_GET(mkc, c, access_mode_4_2) << 2;
		k->start = MLX5_GET64(mkc, c, start_addr);
		k->len = MLX5_GET(mkc, c, length64) ? ~0ull >> 1 : MLX5_GET64(mkc, c, len);
		k->shift = MLX5_GET(mkc, c, log_page_size);
		nn = min_t(int, nn, ((int)inlen - (int)((u8 *)p - in)) / 8);
		if (k->mode == 1 && nn > 0) {
			k->pas = kvcalloc(nn, 8, GFP_KERNEL);
			for (i = 0; i < nn; i++)
				k->pas[i] = be64_to_cpu(p[i]) & ~0xfffull;
			k->npas = nn;
		}
		xa_store(&h->mks, k->idx, k, GFP_KERNEL);
		o32[2] = cpu_to_be32(k->idx);
		break;
	}
	case MLX5_CMD_OP_DESTROY_MKEY: {
		struct fmk *k = xa_erase(&h->mks, be32_to_cpup((__be32 *)(in + 8)) & 0xffffff);
		if (k) {
			kvfree(k->pas);
			kfree(k);
		}
		break;
	}
	case MLX5_CMD_OP_CREATE_QP: {
		void *c = MLX5_ADDR_OF(create_qp_in, in, qpc);
		u32 sh = MLX5_GET(qpc, c, log_page_size) + 12;
		u64 d = MLX5_GET64(qpc, c, dbr_addr), bytes;
		q = kzalloc(sizeof(*q), GFP_KERNEL);
		q->qpn = MLX5_GET(create_qp_in, in, input_qpn) ?: alloc_id(h);
		q->st = MLX5_GET(qpc, c, st);
		q->cqn_snd = MLX5_GET(qpc, c, cqn_snd);
		q->cqn_rcv = MLX5_GET(qpc, c, cqn_rcv);
		q->uidx = MLX5_GET(qpc, c, user_index);
		q->sq = !MLX5_GET(qpc, c, no_sq);
		q->log_sq = MLX5_GET(qpc, c, log_sq_size);
		q->rq = MLX5_GET(qpc, c, rq_type) == 0;
		q->log_rq = MLX5_GET(qpc, c, log_rq_size);
		q->rq_shift = MLX5_GET(qpc, c, log_rq_stride) + 4;
		q->sq_off = q->rq ? 1u << (q->log_rq + q->rq_shift) : 0;
		bytes = q->sq_off + (q->sq ? 64ull << q->log_sq : 0);
		if (buf_set(&q->b, (__be64 *)MLX5_ADDR_OF(create_qp_in, in, pas), bytes, sh,
			    MLX5_GET(qpc, c, page_offset) << (sh - 6)))
			q->sq = q->rq = false;
		if ((u8 *)MLX5_ADDR_OF(create_qp_in, in, pas) - in + q->b.npas * 8 > inlen)
			q->sq = q->rq = false;
		q->dbr = d ? phys_to_virt(d) : NULL;
		xa_store(&h->qps, q->qpn, q, GFP_KERNEL);
		o32[2] = cpu_to_be32(q->qpn);
		if (trace)
			pr_info("fakehca%d: qpn 0x%x st %d sq %d/%d rq %d/%d stride %d pages %d shift %d off "
				"%d uidx 0x%x\n",
				h->idx, q->qpn, q->st, q->sq, q->log_sq, q->rq, q->log_rq, rq_stride(q),
				q->b.npas, sh, q->b.off, q->uidx);
		break;
	}
	case MLX5_CMD_OP_DESTROY_QP:
		q = xa_erase(&h->qps, be32_to_cpup((__be32 *)(in + 8)) & 0xffffff);
		if (q) {
			kvfree(q->b.pas);
			kfree(q);
		}
		break;
	case MLX5_CMD_OP_RST2INIT_QP:
	case MLX5_CMD_OP_INIT2RTR_QP:
	case MLX5_CMD_OP_RTR2RTS_QP:
	case MLX5_CMD_OP_2ERR_QP:
	case MLX5_CMD_OP_2RST_QP:
		q = xa_load(&h->qps, be32_to_cpup((__be32 *)(in + 8)) & 0xffffff);
		if (!q) {
			out[0] = 5;
			o32[1] = cpu_to_be32(0xbad9b);
			break;
		}
		q->state = op == MLX5_CMD_OP_RST2INIT_QP   ? 1
			   : op == MLX5_CMD_OP_INIT2RTR_QP ? 2
			   : op == MLX5_CMD_OP_RTR2RTS_QP  ? 3
			   : op == MLX5_CMD_OP_2ERR_QP	   ? 6
							   : 0;
		if (op == MLX5_CMD_OP_RST2INIT_QP) {
			void *c = MLX5_ADDR_OF(rst2init_qp_in, in, qpc);
			q->port = port_index(MLX5_GET(qpc, c, primary_address_path.vhca_port_num));
		}
		if (op == MLX5_CMD_OP_INIT2RTR_QP) {
			void *c = MLX5_ADDR_OF(init2rtr_qp_in, in, qpc);
			q->rqpn = MLX5_GET(qpc, c, remote_qpn);
			q->rlid = MLX5_GET(qpc, c, primary_address_path.rlid);
		}
		if (op == MLX5_CMD_OP_RTR2RTS_QP) {
			void *c = MLX5_ADDR_OF(rtr2rts_qp_in, in, qpc);
			q->ack_timeout = MLX5_GET(qpc, c, primary_address_path.ack_timeout);
			q->retry = MLX5_GET(qpc, c, retry_count);
			q->rnr_retry = MLX5_GET(qpc, c, rnr_retry);
		}
		if (q->state == 0) {
			q->sq_head = q->rq_head = 0;
			q->stall = 0;
			q->mute = false;
		}
		break;
	case MLX5_CMD_OP_QUERY_QP: {
		void *c = MLX5_ADDR_OF(query_qp_out, out, qpc);
		static const u8 m[] = {0, 1, 2, 3, 7, 4, 6};
		q = xa_load(&h->qps, be32_to_cpup((__be32 *)(in + 8)) & 0xffffff);
		if (!q || outlen < 256) {
			out[0] = 5;
			break;
		}
		MLX5_SET(qpc, c, state, m[q->state]);
		MLX5_SET(qpc, c, mtu, 5);
		break;
	}
	case MLX5_CMD_OP_QUERY_HCA_VPORT_CONTEXT:
		fill_vport(h, port_index(MLX5_GET(query_hca_vport_context_in, in, port_num)),
			   MLX5_ADDR_OF(query_hca_vport_context_out, out, hca_vport_context));
		break;
	case MLX5_CMD_OP_QUERY_HCA_VPORT_GID:
		MLX5_SET(query_hca_vport_gid_out, out, gids_num, 1);
		{
			u8 *g = MLX5_ADDR_OF(query_hca_vport_gid_out, out, gid);
			if (outlen >= (g - out) + 16) {
				*(__be64 *)g = cpu_to_be64(0xfe80000000000000ull);
				i = port_index(MLX5_GET(query_hca_vport_gid_in, in, port_num));
				*(__be64 *)(g + 8) = cpu_to_be64(h->guid + 1 + i);
			}
		}
		break;
	case MLX5_CMD_OP_QUERY_HCA_VPORT_PKEY: {
		u8 *p = MLX5_ADDR_OF(query_hca_vport_pkey_out, out, pkey);
		for (i = p - out; i + 4 <= outlen; i += 4)
			o32[i / 4] = cpu_to_be32(i == p - out ? 0xffff : 0);
		break;
	}
	case MLX5_CMD_OP_QUERY_VPORT_STATE:
		MLX5_SET(query_vport_state_out, out, state, h->port[0].up);
		MLX5_SET(query_vport_state_out, out, admin_state, 1);
		break;
	case MLX5_CMD_OP_QUERY_SPECIAL_CONTEXTS:
		if (outlen >= 20) {
			MLX5_SET(query_special_contexts_out, out, resd_lkey, 0x100);
			MLX5_SET(query_special_contexts_out, out, null_mkey, 0x200);
		}
		break;
	case MLX5_CMD_OP_ACCESS_REG: {
		u16 reg = MLX5_GET(access_register_in, in, register_id);
		u8 *d = out + 16;
		if (outlen > 16)
			memcpy(d, in + 16, min(inlen, outlen) - 16);
		if (outlen <= 16)
			break;
		if (reg == MLX5_REG_PTYS) {
			MLX5_SET(ptys_reg, d, ib_link_width_capability, 7);
			MLX5_SET(ptys_reg, d, ib_link_width_oper, 2);
			MLX5_SET(ptys_reg, d, ib_proto_capability, 0x3f);
			MLX5_SET(ptys_reg, d, ib_proto_oper, 0x20);
		} else if (reg == MLX5_REG_PMTU) {
			MLX5_SET(pmtu_reg, d, max_mtu, 4096);
			MLX5_SET(pmtu_reg, d, admin_mtu, 4096);
			MLX5_SET(pmtu_reg, d, oper_mtu, 4096);
		} else if (reg == MLX5_REG_PVLC) {
			MLX5_SET(pvlc_reg, d, vl_hw_cap, 4);
			MLX5_SET(pvlc_reg, d, vl_admin, 4);
			MLX5_SET(pvlc_reg, d, vl_operational, 4);
		}
		break;
	}
	default:
		/* the commands that allocate something answer its number in the third word; an answer of
		 * zeroes is "success" for the rest */
		if (outlen >= 12)
			o32[2] = cpu_to_be32(alloc_id(h));
		if (op == MLX5_CMD_OP_QUERY_PAGES || outlen > 16)
			o32[2] = 0;
		if (op == MLX5_CMD_OP_CREATE_FLOW_TABLE || op == MLX5_CMD_OP_CREATE_FLOW_GROUP)
			o32[2] = cpu_to_be32(alloc_id(h));
	}
	return 0;
}

static void run_cmd(struct hca *h, int ix)
{
	phys_addr_t q =
	    ((u64)ioread32be(&h->iseg->cmdq_addr_h) << 32) | (ioread32be(&h->iseg->cmdq_addr_l_sz) & ~0xfffu);
	struct mlx5_cmd_layout *l = phys_to_virt(q + ix * 64ull);
	u32 inlen = be32_to_cpu(l->inlen), outlen = be32_to_cpu(l->outlen), o;
	u8 *in = kvzalloc(max(inlen, 16u), GFP_KERNEL), *out = kvzalloc(max(outlen, 16u) + 64, GFP_KERNEL);
	u64 p;
	u8 st;
	u16 op;
	struct mlx5_cmd_prot_block *b;
	bool had = false;
	int i;
	if (!in || !out)
		return;
	memcpy(in, l->in, min(inlen, 16u));
	for (o = 16, p = be64_to_cpu(l->in_ptr); o < inlen && p; o += 512) {
		b = phys_to_virt(p);
		memcpy(in + o, b->data, min(inlen - o, 512u));
		p = be64_to_cpu(b->next);
	}
	op = be16_to_cpup((__be16 *)in);
	if (h->hang_op && op == h->hang_op) {
		h->held |= 1u << ix;
		goto out;
	}
	if (h->down_op && op == h->down_op && !--h->down_in) {
		h->down_op = 0;
		set_port(h, &h->port[0], false);
	}
	for (i = 0; i < NEQ; i++)
		if (h->eq[i].on && (h->eq[i].mask[0] & (1ull << MLX5_EVENT_TYPE_CMD)))
			had = true;
	st = command(h, in, inlen, out, outlen);
	memcpy(l->out, out, min(outlen, 16u));
	for (o = 16, p = be64_to_cpu(l->out_ptr); o < outlen && p; o += 512) {
		b = phys_to_virt(p);
		memcpy(b->data, out + o, min(outlen - o, 512u));
		p = be64_to_cpu(b->next);
	}
	wmb();
	WRITE_ONCE(l->status_own, st << 1);
	wmb();
	/* the command that creates the command EQ is polled for: an entry for it would complete it twice */
	if (had) {
		struct mlx5_eqe_cmd ec = {.vector = cpu_to_be32(1u << ix)};
		event(h, MLX5_EVENT_TYPE_CMD, 0, &ec, sizeof(ec));
	}
out:
	kvfree(in);
	kvfree(out);
}

DEFINE_MUTEX(world);
static struct task_struct *thread;

static int fw(void *a)
{
	unsigned long next = jiffies;
	u32 db;
	int i, k, idle = 0;
	while (!kthread_should_stop()) {
		bool tick = time_after_eq(jiffies, next);
		if (tick)
			next = jiffies + HZ / 10;
		mutex_lock(&world);
		for (k = 0; k < nhcas; k++) {
			struct hca *h = hcas[k];
			u64 t = ktime_get_ns() * 10 / 64;
			if (h->dead)
				continue;
			db = be32_to_cpu((__force __be32)xchg((u32 __force *)&h->iseg->cmd_dbell, 0));
			if (!h->hang_op) {
				db |= h->held;
				h->held = 0;
			}
			for (i = 0; db && i < 32; i++)
				if (db & (1u << i))
					run_cmd(h, i);
			if (db || (dataplane && run_data(h)))
				idle = 0;
			if (tick)
				iowrite32be(++h->hc, &h->iseg->health_counter);
			iowrite32be(t >> 32, &h->iseg->internal_timer_h);
			iowrite32be(t, &h->iseg->internal_timer_l);
		}
		mutex_unlock(&world);
		/* seldom where nothing has happened for a while: an emulated machine has better things to do */
		if (idle < 64) {
			idle++;
			usleep_range(20, 50);
		} else {
			usleep_range(200, 400);
		}
	}
	return 0;
}

int firmware_begin(void)
{
	thread = kthread_run(fw, NULL, "fakehca");
	if (IS_ERR(thread))
		return PTR_ERR(thread);
	sched_set_fifo_low(thread); /* or two busy pollers on two vCPUs starve it */
	return 0;
}

void firmware_end(void)
{
	kthread_stop(thread);
}
