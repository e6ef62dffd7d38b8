//! How a session works.

use ringsight_records::Kind;

/// Whether to attach eBPF probes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UseEbpf {
    /// If this process may; otherwise the shared ring alone carries all events.
    #[default]
    Auto,
    /// Attaching fails without.
    Require,
    /// The shared ring alone.
    Never,
}

/// Whether to probe the kernel's RDMA stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NetworkScope {
    /// Where the kernel has one and eBPF is in use: calls of watched processes, and events of all devices.
    #[default]
    Watched,
    /// The same with the calls of every process.
    Everybody,
    /// No.
    Never,
}

/// How a session works.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether to attach eBPF probes.
    pub use_ebpf: UseEbpf,
    /// Dense kinds to arm the ring with, as a mask of [`Kind::bit`]. The job's threads write each record, so the default asks for what
    /// the collector reads: not for the kinds that descriptions replace ([`Kind::DESCRIBED`]), and not for
    /// [`Kind::ProxyCtrl`], which tells of a progress thread and of no operation.
    pub dense: u64,
    /// Whether to probe the kernel's RDMA stack.
    pub network: NetworkScope,
    /// A variable of each process's environment to tell of, for [`Attached::variable`](crate::Attached).
    pub variable: Option<String>,
    /// Use perf-event links even where the kernel has `uprobe_multi`. They take 105 ms each to detach; for comparison.
    pub force_perf_event: bool,
    /// Plan sites as on a kernel that does not optimise 5-byte nops (before 6.18); for comparison.
    pub force_nop1: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            use_ebpf: UseEbpf::Auto,
            dense: Kind::DENSE & !Kind::DESCRIBED & !Kind::ProxyCtrl.bit(),
            network: NetworkScope::default(),
            variable: None,
            force_perf_event: false,
            force_nop1: false,
        }
    }
}
