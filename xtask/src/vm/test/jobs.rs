//! What is run in guests.

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
    /// A sample of `cargo xtask vm failover`: so many cases, by this seed.
    Failures { seed: u64, cases: usize },
    /// [`ringsight_testbed::demo::vm`]: a job with a collector attached, one of whose links fails; its traces are looked at here.
    Demo,
}

/// The library's ranks on two nodes: tests whose names contain one of these.
const fn between_nodes(filters: &'static [&'static str]) -> Program {
    Program::Cargo {
        package: "ringsight-comm",
        test: "rdma",
        filters,
    }
}

/// A test in a guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) name: &'static str,
    pub(super) program: Program,
    /// Kernels it runs with.
    pub(super) kernels: &'static [Series],
    /// Soft-RoCE links.
    pub(super) rdma: usize,
    /// mlx5 devices.
    pub(super) mlx5: usize,
    /// Ports of each.
    pub(super) ports: usize,
}

/// All of them; a boot costs three seconds.
pub(super) const JOBS: &[Job] = &[
    Job {
        name: "soft-RoCE",
        program: Program::Script("soft-roce.sh"),
        kernels: &Series::ALL,
        rdma: 2,
        mlx5: 0,
        ports: 1,
    },
    Job {
        name: "mlx5",
        program: Program::Script("mlx5.sh"),
        kernels: &Series::ALL,
        rdma: 0,
        mlx5: 2,
        ports: 1,
    },
    Job {
        name: "steps between processes",
        program: Program::Cargo {
            package: "ringsight-verbs",
            test: "two_processes",
            filters: &[],
        },
        kernels: &Series::ALL,
        rdma: 1,
        mlx5: 0,
        ports: 1,
    },
    Job {
        name: "steps between processes, mlx5",
        program: Program::Cargo {
            package: "ringsight-verbs",
            test: "two_processes",
            filters: &[],
        },
        kernels: &Series::ALL,
        rdma: 0,
        mlx5: 4,
        ports: 1,
    },
    Job {
        name: "connections whose ports fail",
        program: Program::Cargo {
            package: "ringsight-verbs",
            test: "failover",
            filters: &["links_fail", "a_message_that_waits"],
        },
        kernels: &Series::ALL,
        rdma: 2,
        mlx5: 0,
        ports: 1,
    },
    Job {
        name: "ports that fail after any request",
        program: Program::Failures {
            seed: 20_261_122,
            cases: 16,
        },
        kernels: &[Series::V6_1],
        rdma: 2,
        mlx5: 0,
        ports: 1,
    },
    Job {
        name: "connections whose ports and queues fail, mlx5",
        program: Program::Cargo {
            package: "ringsight-verbs",
            test: "failover",
            filters: &[],
        },
        kernels: &Series::ALL,
        rdma: 0,
        mlx5: 4,
        ports: 1,
    },
    Job {
        name: "connections whose ports and queues fail, mlx5 with two ports",
        program: Program::Cargo {
            package: "ringsight-verbs",
            test: "failover",
            filters: &[],
        },
        kernels: &[Series::V6_1],
        rdma: 0,
        mlx5: 2,
        ports: 2,
    },
    Job {
        name: "rdma between nodes",
        program: between_nodes(&[
            "rdma::begin",
            "rdma::data",
            "rdma::failover",
            "rdma::fallback",
            "rdma::stalls",
            "rdma::verdicts",
        ]),
        kernels: &[Series::V6_1],
        rdma: 2,
        mlx5: 0,
        ports: 1,
    },
    Job {
        name: "rdma between nodes, whose offers are changed",
        program: Program::Cargo {
            package: "ringsight-comm",
            test: "transport",
            filters: &["offers"],
        },
        kernels: &[Series::V6_1],
        rdma: 1,
        mlx5: 0,
        ports: 1,
    },
    Job {
        name: "rdma between nodes, soft-RoCE and mlx5",
        program: between_nodes(&["rdma::layers"]),
        kernels: &[Series::V6_1],
        rdma: 1,
        mlx5: 1,
        ports: 1,
    },
    Job {
        name: "rdma between nodes, whose communicators end",
        program: between_nodes(&["rdma::ends"]),
        kernels: &[Series::V6_1],
        rdma: 2,
        mlx5: 0,
        ports: 1,
    },
    Job {
        name: "rdma between nodes, whose receivers leave",
        program: between_nodes(&["rdma::parting"]),
        kernels: &[Series::V6_1],
        rdma: 2,
        mlx5: 0,
        ports: 1,
    },
    Job {
        name: "rdma between nodes, without failover",
        program: between_nodes(&["rdma::single"]),
        kernels: &[Series::V6_1],
        rdma: 2,
        mlx5: 0,
        ports: 1,
    },
    Job {
        name: "rdma between nodes, without failover, mlx5",
        program: between_nodes(&["rdma::broken"]),
        kernels: &[Series::V6_1],
        rdma: 0,
        mlx5: 4,
        ports: 1,
    },
    Job {
        name: "rdma between nodes, under replays and the bootstrap",
        program: between_nodes(&["rdma::replays", "rdma::interface"]),
        kernels: &[Series::V6_1],
        rdma: 2,
        mlx5: 0,
        ports: 1,
    },
    Job {
        name: "rdma between nodes, mlx5",
        program: between_nodes(&[
            "data_goes_over_rdma",
            "operations_go_on_over_the_backup",
            "rdma::queues",
            "rdma::held",
            "rdma::setup",
        ]),
        kernels: &Series::ALL,
        rdma: 0,
        mlx5: 4,
        ports: 1,
    },
    Job {
        name: "rdma between nodes, mlx5 with two ports",
        program: between_nodes(&[
            "rdma::failover::operations",
            "rdma::queues",
            "a_connection_whose_port_is_down",
        ]),
        kernels: &[Series::V6_12],
        rdma: 0,
        mlx5: 2,
        ports: 2,
    },
    Job {
        name: "rdma between nodes, mlx5, while connections are made",
        program: between_nodes(&["operations_go_on_while", "a_connection_whose_port_is_down"]),
        kernels: &[Series::V6_1],
        rdma: 0,
        mlx5: 4,
        ports: 1,
    },
    Job {
        name: "a trace of a failover",
        program: Program::Demo,
        kernels: &[Series::V6_1],
        rdma: 2,
        mlx5: 0,
        ports: 1,
    },
    Job {
        name: "network probes, soft-RoCE",
        program: Program::Cargo {
            package: "ringsight-probes",
            test: "network",
            filters: &["soft_roce", "overhead"],
        },
        kernels: &Series::ALL,
        rdma: 1,
        mlx5: 0,
        ports: 1,
    },
    Job {
        name: "network probes, mlx5",
        program: Program::Cargo {
            package: "ringsight-probes",
            test: "network",
            filters: &["mlx5"],
        },
        kernels: &Series::ALL,
        rdma: 0,
        mlx5: 2,
        ports: 1,
    },
];
