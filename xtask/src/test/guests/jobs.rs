//! The jobs: what runs in guests, with which devices and kernels, and what the fast tier has of it.

use ringsight_testbed::vm::Series;

/// What a guest runs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Program {
    /// A script in `vm/tests`. It passes if it ends with 0.
    Script(&'static str),
    /// A test of a package: its ignored tests, which are for guests. They are counted by what libtest says.
    Cargo {
        package: &'static str,
        test: &'static str,
        /// Only tests whose name contains one of these; all of them if there is none.
        filters: &'static [&'static str],
    },
    /// A sample of `cargo xtask vm failover`: so many cases, by this seed. It boots its own guests.
    Failures { seed: u64, cases: usize },
    /// [`ringsight_testbed::demo::vm`]: a job with a collector attached, one of whose links fails; its traces are looked at
    /// here. It boots its own guest.
    Demo,
}

/// Tests of the library's ranks on two nodes whose names contain one of these.
const fn between_nodes(filters: &'static [&'static str]) -> Program {
    Program::Cargo {
        package: "ringsight-comm",
        test: "rdma",
        filters,
    }
}

/// Tests of connections whose ports fail whose names contain one of these.
const fn connections(filters: &'static [&'static str]) -> Program {
    Program::Cargo {
        package: "ringsight-verbs",
        test: "failover",
        filters,
    }
}

const STEPS: Program = Program::Cargo {
    package: "ringsight-verbs",
    test: "two_processes",
    filters: &[],
};

/// Tests of the network's probes whose names contain one of these.
const fn probes(filters: &'static [&'static str]) -> Program {
    Program::Cargo {
        package: "ringsight-probes",
        test: "network",
        filters,
    }
}

/// Devices of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Devices {
    /// Soft-RoCE links.
    pub(super) rdma: usize,
    /// mlx5 devices.
    pub(super) mlx5: usize,
    /// Ports of each of them.
    pub(super) ports: usize,
}

const fn soft_roce(links: usize) -> Devices {
    Devices {
        rdma: links,
        mlx5: 0,
        ports: 1,
    }
}

const fn mlx5(devices: usize) -> Devices {
    Devices {
        rdma: 0,
        mlx5: devices,
        ports: 1,
    }
}

const TWO_PORTS: Devices = Devices {
    rdma: 0,
    mlx5: 2,
    ports: 2,
};

const BOTH: Devices = Devices {
    rdma: 1,
    mlx5: 1,
    ports: 1,
};

/// Whether the fast tier runs a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tier {
    /// With this kernel.
    Fast(Series),
    /// Not: why.
    Full(&'static str),
}

/// Why the fast tier leaves out a job that it runs with another kernel.
const OTHER_KERNEL: &str = "the fast tier runs them with the other kernel";

/// A test in a guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) name: &'static str,
    /// Jobs that CI runs together when it is their turn.
    pub(super) group: &'static str,
    pub(super) program: Program,
    /// Kernels it runs with.
    pub(super) kernels: &'static [Series],
    pub(super) devices: Devices,
    pub(super) tier: Tier,
}

impl Job {
    /// Whether it runs in a guest with others.
    pub(super) fn shares(&self) -> bool {
        matches!(self.program, Program::Script(_) | Program::Cargo { .. })
    }

    pub(super) fn is_fast(&self, kernel: Series) -> bool {
        self.tier == Tier::Fast(kernel)
    }

    /// Why the fast tier does not run it with this kernel, if it does not.
    pub(super) fn left_out(&self, kernel: Series) -> Option<&'static str> {
        match self.tier {
            Tier::Fast(fast) => (fast != kernel).then_some(OTHER_KERNEL),
            Tier::Full(why) => Some(why),
        }
    }
}

/// Why the fast tier leaves out jobs; those that say the same are named together.
const SET_UP: &str = "the fast tier makes connections in the usual order";
const ENDS: &str = "the fast tier ends communicators that work";
const LONG: &str = "a thousand replays";
const TRACE: &str = "the fast tier's demo traces a job on this machine";
const CONNECTIONS: &str =
    "the fast tier has ports that fail under the library, which is built on these connections";
const STEP_BY_STEP: &str = "the fast tier sends the same steps by the library";
const SECOND_PORT: &str = "the fast tier's devices have a port each";
const REFUSED: &str = "the fast tier's devices refuse nothing";
const STAND_IN: &str = "the fast tier uses the stand-in by the library";
const PROBES: &str = "the fast tier attaches the probes to soft-RoCE";

/// All of them.
pub(super) const JOBS: &[Job] = &[
    Job {
        name: "soft-RoCE",
        group: "ports that fail",
        program: Program::Script("soft-roce.sh"),
        kernels: &Series::ALL,
        devices: soft_roce(2),
        tier: Tier::Fast(Series::V6_1),
    },
    Job {
        name: "rdma between nodes: data and failover",
        group: "nodes",
        program: between_nodes(&["rdma::data", "rdma::failover"]),
        kernels: &[Series::V6_1],
        devices: soft_roce(2),
        tier: Tier::Fast(Series::V6_1),
    },
    Job {
        name: "rdma between nodes, from the beginning on",
        group: "nodes, from the beginning on",
        program: between_nodes(&["rdma::begin", "rdma::fallback", "rdma::stalls", "rdma::verdicts"]),
        kernels: &[Series::V6_1],
        devices: soft_roce(2),
        tier: Tier::Full(SET_UP),
    },
    Job {
        name: "rdma between nodes, whose offers are changed",
        group: "nodes, from the beginning on",
        program: Program::Cargo {
            package: "ringsight-comm",
            test: "transport",
            filters: &["offers"],
        },
        kernels: &[Series::V6_1],
        devices: soft_roce(1),
        tier: Tier::Full(SET_UP),
    },
    Job {
        name: "rdma between nodes, whose communicators end",
        group: "nodes, to the end",
        program: between_nodes(&["rdma::ends"]),
        kernels: &[Series::V6_1],
        devices: soft_roce(2),
        tier: Tier::Full(ENDS),
    },
    Job {
        name: "rdma between nodes, whose receivers leave",
        group: "nodes, to the end",
        program: between_nodes(&["rdma::parting"]),
        kernels: &[Series::V6_1],
        devices: soft_roce(2),
        tier: Tier::Full(ENDS),
    },
    Job {
        name: "rdma between nodes, without failover",
        group: "nodes, to the end",
        program: between_nodes(&["rdma::single"]),
        kernels: &[Series::V6_1],
        devices: soft_roce(2),
        tier: Tier::Full(ENDS),
    },
    Job {
        name: "rdma between nodes, under replays and the bootstrap",
        group: "nodes, replays",
        program: between_nodes(&["rdma::replays", "rdma::interface"]),
        kernels: &[Series::V6_1],
        devices: soft_roce(2),
        tier: Tier::Full(LONG),
    },
    Job {
        name: "rdma between nodes, soft-RoCE and mlx5",
        group: "nodes, replays",
        program: between_nodes(&["rdma::layers"]),
        kernels: &[Series::V6_1],
        devices: BOTH,
        tier: Tier::Full(SET_UP),
    },
    Job {
        name: "a trace of a failover",
        group: "nodes, replays",
        program: Program::Demo,
        kernels: &[Series::V6_1],
        devices: soft_roce(2),
        tier: Tier::Full(TRACE),
    },
    Job {
        name: "connections whose ports fail",
        group: "ports that fail",
        program: connections(&["links_fail", "a_message_that_waits"]),
        kernels: &Series::ALL,
        devices: soft_roce(2),
        tier: Tier::Full(CONNECTIONS),
    },
    Job {
        name: "ports that fail after any request",
        group: "ports that fail",
        program: Program::Failures {
            seed: 20_261_122,
            cases: 16,
        },
        kernels: &[Series::V6_1],
        devices: soft_roce(2),
        tier: Tier::Full(CONNECTIONS),
    },
    Job {
        name: "steps between processes",
        group: "connections, mlx5",
        program: STEPS,
        kernels: &Series::ALL,
        devices: soft_roce(1),
        tier: Tier::Full(STEP_BY_STEP),
    },
    Job {
        name: "steps between processes, mlx5",
        group: "connections, mlx5",
        program: STEPS,
        kernels: &Series::ALL,
        devices: mlx5(4),
        tier: Tier::Full(STEP_BY_STEP),
    },
    Job {
        name: "connections whose ports and queues fail, mlx5",
        group: "connections, mlx5",
        program: connections(&[]),
        kernels: &Series::ALL,
        devices: mlx5(4),
        tier: Tier::Full(CONNECTIONS),
    },
    Job {
        name: "connections whose ports and queues fail, mlx5 with two ports",
        group: "two ports",
        program: connections(&[]),
        kernels: &[Series::V6_1],
        devices: TWO_PORTS,
        tier: Tier::Full(CONNECTIONS),
    },
    Job {
        name: "rdma between nodes, mlx5 with two ports",
        group: "two ports",
        program: between_nodes(&[
            "rdma::failover::operations",
            "rdma::queues",
            "a_connection_whose_port_is_down",
        ]),
        kernels: &[Series::V6_12],
        devices: TWO_PORTS,
        tier: Tier::Full(SECOND_PORT),
    },
    Job {
        name: "rdma between nodes, mlx5",
        group: "mlx5",
        program: between_nodes(&[
            "data_goes_over_rdma",
            "operations_go_on_over_the_backup",
            "rdma::queues",
        ]),
        kernels: &Series::ALL,
        devices: mlx5(4),
        tier: Tier::Fast(Series::V6_1),
    },
    Job {
        name: "rdma between nodes, mlx5, whose devices refuse",
        group: "nodes, mlx5",
        program: between_nodes(&["rdma::held", "rdma::setup"]),
        kernels: &Series::ALL,
        devices: mlx5(4),
        tier: Tier::Full(REFUSED),
    },
    Job {
        name: "rdma between nodes, without failover, mlx5",
        group: "nodes, mlx5",
        program: between_nodes(&["rdma::broken"]),
        kernels: &[Series::V6_1],
        devices: mlx5(4),
        tier: Tier::Full(ENDS),
    },
    Job {
        name: "rdma between nodes, mlx5, while connections are made",
        group: "mlx5",
        program: between_nodes(&["operations_go_on_while", "a_connection_whose_port_is_down"]),
        kernels: &[Series::V6_1],
        devices: mlx5(4),
        tier: Tier::Full(SET_UP),
    },
    Job {
        name: "mlx5",
        group: "mlx5",
        program: Program::Script("mlx5.sh"),
        kernels: &Series::ALL,
        devices: mlx5(2),
        tier: Tier::Full(STAND_IN),
    },
    Job {
        name: "network probes, soft-RoCE",
        group: "mlx5",
        program: probes(&["soft_roce", "overhead"]),
        kernels: &Series::ALL,
        devices: soft_roce(1),
        tier: Tier::Fast(Series::V6_12),
    },
    Job {
        name: "network probes, mlx5",
        group: "mlx5",
        program: probes(&["mlx5"]),
        kernels: &Series::ALL,
        devices: mlx5(2),
        tier: Tier::Full(PROBES),
    },
];
