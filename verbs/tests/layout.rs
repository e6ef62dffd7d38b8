//! The structs of `sys` against the header, where there is one (installed, or where `RINGSIGHT_VERBS_INCLUDE` says) and a C compiler.

use std::{
    fmt::Write as _,
    fs::OpenOptions,
    io::Write as _,
    mem::{offset_of, size_of},
    path::Path,
    process::Command,
};

use ringsight_verbs::sys;

fn skip(test: &str, reason: &str) {
    println!("skipped {test}: {reason}");
    if let Some(log) = std::env::var_os("RINGSIGHT_SKIP_LOG") {
        let mut file = OpenOptions::new().append(true).create(true).open(log).unwrap();
        writeln!(file, "{test}: {reason}").unwrap();
    }
}

/// Assertions in C about what Rust says of its structs.
fn assertions() -> String {
    let mut text = String::from("#include <stddef.h>\n#include <infiniband/verbs.h>\n");
    macro_rules! size {
        ($($rust:ident = $c:literal;)*) => {
            $(writeln!(text, "_Static_assert(sizeof(struct {}) == {}, \"{}\");", $c, size_of::<sys::$rust>(), $c).unwrap();)*
        };
    }
    macro_rules! fields {
        ($rust:ident = $c:literal: $($field:ident = $name:literal),*) => {
            $(writeln!(
                text,
                "_Static_assert(offsetof(struct {}, {}) == {}, \"{}.{}\");",
                $c, $name, offset_of!(sys::$rust, $field), $c, $name
            ).unwrap();)*
        };
    }
    size! {
        ContextOps = "ibv_context_ops";
        CompChannel = "ibv_comp_channel";
        DeviceAttr = "ibv_device_attr";
        QpCap = "ibv_qp_cap";
        QpInitAttr = "ibv_qp_init_attr";
        GlobalRoute = "ibv_global_route";
        AhAttr = "ibv_ah_attr";
        QpAttr = "ibv_qp_attr";
        Sge = "ibv_sge";
        SendWr = "ibv_send_wr";
        RecvWr = "ibv_recv_wr";
        Wc = "ibv_wc";
        AsyncEvent = "ibv_async_event";
    }
    fields!(Context = "ibv_context": device = "device", ops = "ops", cmd_fd = "cmd_fd", async_fd = "async_fd");
    fields!(ContextOps = "ibv_context_ops": poll_cq = "poll_cq", req_notify_cq = "req_notify_cq", post_send = "post_send", post_recv = "post_recv");
    fields!(CompChannel = "ibv_comp_channel": context = "context", fd = "fd");
    fields!(Cq = "ibv_cq": context = "context");
    fields!(Qp = "ibv_qp": context = "context", qp_num = "qp_num");
    fields!(Mr = "ibv_mr": lkey = "lkey", rkey = "rkey");
    fields!(DeviceAttr = "ibv_device_attr": vendor_id = "vendor_id", max_qp_wr = "max_qp_wr");
    fields!(PortAttr = "ibv_port_attr": state = "state", max_mtu = "max_mtu", active_mtu = "active_mtu", gid_tbl_len = "gid_tbl_len",
        pkey_tbl_len = "pkey_tbl_len", lid = "lid", link_layer = "link_layer");
    fields!(QpCap = "ibv_qp_cap": max_send_wr = "max_send_wr", max_recv_wr = "max_recv_wr", max_inline_data = "max_inline_data");
    fields!(QpInitAttr = "ibv_qp_init_attr": send_cq = "send_cq", recv_cq = "recv_cq", srq = "srq", cap = "cap", qp_type = "qp_type", sq_sig_all = "sq_sig_all");
    fields!(GlobalRoute = "ibv_global_route": dgid = "dgid", sgid_index = "sgid_index", hop_limit = "hop_limit", traffic_class = "traffic_class");
    fields!(AhAttr = "ibv_ah_attr": grh = "grh", dlid = "dlid", sl = "sl", is_global = "is_global", port_num = "port_num");
    fields!(QpAttr = "ibv_qp_attr": qp_state = "qp_state", path_mtu = "path_mtu", rq_psn = "rq_psn", sq_psn = "sq_psn", dest_qp_num = "dest_qp_num",
        qp_access_flags = "qp_access_flags", ah_attr = "ah_attr", pkey_index = "pkey_index", max_rd_atomic = "max_rd_atomic",
        max_dest_rd_atomic = "max_dest_rd_atomic", min_rnr_timer = "min_rnr_timer", port_num = "port_num", timeout = "timeout",
        retry_cnt = "retry_cnt", rnr_retry = "rnr_retry");
    fields!(Sge = "ibv_sge": addr = "addr", length = "length", lkey = "lkey");
    fields!(SendWr = "ibv_send_wr": wr_id = "wr_id", next = "next", sg_list = "sg_list", num_sge = "num_sge", opcode = "opcode", send_flags = "send_flags",
        imm_data = "imm_data", remote_addr = "wr.rdma.remote_addr", rkey = "wr.rdma.rkey");
    fields!(RecvWr = "ibv_recv_wr": wr_id = "wr_id", next = "next", sg_list = "sg_list", num_sge = "num_sge");
    fields!(Wc = "ibv_wc": wr_id = "wr_id", status = "status", opcode = "opcode", vendor_err = "vendor_err", byte_len = "byte_len", imm_data = "imm_data",
        qp_num = "qp_num");
    fields!(AsyncEvent = "ibv_async_event": element = "element", event_type = "event_type");
    for (name, value) in [
        ("IBV_PORT_ACTIVE", sys::PORT_ACTIVE),
        ("IBV_LINK_LAYER_ETHERNET", sys::LINK_LAYER_ETHERNET.into()),
        ("IBV_QPT_RC", sys::QPT_RC),
        ("IBV_QPS_INIT", sys::QPS_INIT),
        ("IBV_QPS_RTR", sys::QPS_RTR),
        ("IBV_QPS_RTS", sys::QPS_RTS),
        ("IBV_QPS_ERR", sys::QPS_ERR),
        ("IBV_QP_STATE", sys::qp_attr::STATE.cast_unsigned()),
        ("IBV_QP_ACCESS_FLAGS", sys::qp_attr::ACCESS_FLAGS.cast_unsigned()),
        ("IBV_QP_PKEY_INDEX", sys::qp_attr::PKEY_INDEX.cast_unsigned()),
        ("IBV_QP_PORT", sys::qp_attr::PORT.cast_unsigned()),
        ("IBV_QP_AV", sys::qp_attr::AV.cast_unsigned()),
        ("IBV_QP_PATH_MTU", sys::qp_attr::PATH_MTU.cast_unsigned()),
        ("IBV_QP_TIMEOUT", sys::qp_attr::TIMEOUT.cast_unsigned()),
        ("IBV_QP_RETRY_CNT", sys::qp_attr::RETRY_CNT.cast_unsigned()),
        ("IBV_QP_RNR_RETRY", sys::qp_attr::RNR_RETRY.cast_unsigned()),
        ("IBV_QP_RQ_PSN", sys::qp_attr::RQ_PSN.cast_unsigned()),
        (
            "IBV_QP_MAX_QP_RD_ATOMIC",
            sys::qp_attr::MAX_QP_RD_ATOMIC.cast_unsigned(),
        ),
        (
            "IBV_QP_MIN_RNR_TIMER",
            sys::qp_attr::MIN_RNR_TIMER.cast_unsigned(),
        ),
        ("IBV_QP_SQ_PSN", sys::qp_attr::SQ_PSN.cast_unsigned()),
        (
            "IBV_QP_MAX_DEST_RD_ATOMIC",
            sys::qp_attr::MAX_DEST_RD_ATOMIC.cast_unsigned(),
        ),
        ("IBV_QP_DEST_QPN", sys::qp_attr::DEST_QPN.cast_unsigned()),
        ("IBV_WR_RDMA_WRITE", sys::WR_RDMA_WRITE),
        ("IBV_WR_RDMA_WRITE_WITH_IMM", sys::WR_RDMA_WRITE_WITH_IMM),
        ("IBV_SEND_SIGNALED", sys::SEND_SIGNALED),
        ("IBV_SEND_INLINE", sys::SEND_INLINE),
        ("IBV_WC_RECV_RDMA_WITH_IMM", sys::WC_RECV_RDMA_WITH_IMM),
        ("IBV_ACCESS_LOCAL_WRITE", sys::ACCESS_LOCAL_WRITE),
        ("IBV_ACCESS_REMOTE_WRITE", sys::ACCESS_REMOTE_WRITE),
        ("IBV_ACCESS_RELAXED_ORDERING", sys::ACCESS_RELAXED_ORDERING),
        ("IBV_EVENT_CQ_ERR", 0),
        ("IBV_EVENT_QP_FATAL", 1),
        ("IBV_EVENT_QP_ACCESS_ERR", 3),
        ("IBV_EVENT_DEVICE_FATAL", 8),
        ("IBV_EVENT_PORT_ACTIVE", 9),
        ("IBV_EVENT_PORT_ERR", 10),
        ("IBV_EVENT_PKEY_CHANGE", 12),
        ("IBV_EVENT_CLIENT_REREGISTER", 17),
        ("IBV_EVENT_GID_CHANGE", 18),
    ] {
        writeln!(text, "_Static_assert({name} == {value}, \"{name}\");").unwrap();
    }
    text
}

#[test]
fn structs_are_those_of_the_header() {
    let name = "layout::structs_are_those_of_the_header";
    let headers = std::env::var_os("RINGSIGHT_VERBS_INCLUDE").unwrap_or_else(|| "/usr/include".into());
    if !Path::new(&headers).join("infiniband/verbs.h").exists() {
        return skip(
            name,
            "no infiniband/verbs.h: neither libibverbs-dev is installed nor RINGSIGHT_VERBS_INCLUDE set",
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("layout.c");
    std::fs::write(&source, assertions()).unwrap();
    let compiled = Command::new("cc")
        .args(["-fsyntax-only", "-idirafter"])
        .args([Path::new(&headers), &source])
        .output();
    match compiled {
        Err(error) => skip(name, &format!("no C compiler: {error}")),
        Ok(output) => assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        ),
    }
}
