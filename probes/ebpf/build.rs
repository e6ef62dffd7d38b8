//! Tells the programs, as `bpf_target_arch`, whose processes they probe: see `AYA_BPF_TARGET_ARCH` in xtask/src/ebpf.rs.

fn main() -> aya_build::Result<()> {
    aya_build::emit_bpf_target_arch_cfg()
}
