//! The parts of a bundle, in the order in which they run.

mod calls;
mod collector;
mod cost;
mod driver;
mod environment;
mod nccl_tests;
mod sanitizer;
mod torch;
mod training;
mod tune;
mod watchdog;

use anyhow::Result;

use super::{gpu_host::GpuHost, step::Steps};

/// One part: what it is called, what it does, what it cannot do without, and how it runs.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    /// Why it cannot run on this machine; `None` if it can.
    pub(super) lacks: fn(&GpuHost) -> Option<String>,
    /// Runs its steps, each of which enters how it went.
    pub(super) run: fn(&mut Steps<'_>) -> Result<()>,
}

fn one_gpu(host: &GpuHost) -> Option<String> {
    host.lacks_gpus(1)
}

fn torch_and_gpu(host: &GpuHost) -> Option<String> {
    one_gpu(host).or_else(|| host.python_with_torch().err())
}

fn gpus_and_nccl_tests(host: &GpuHost, gpus: usize) -> Option<String> {
    host.lacks_gpus(gpus).or_else(|| host.nccl_tests().err())
}

fn gpus_and_both_libraries(host: &GpuHost, gpus: usize) -> Option<String> {
    gpus_and_nccl_tests(host, gpus).or_else(|| host.stock().err())
}

pub(super) const PARTS: &[Part] = &[
    Part {
        name: "env",
        about: "what this machine has, and whether the library has what PyTorch asks of it",
        lacks: |_| None,
        run: environment::run,
    },
    Part {
        name: "check",
        about: "every operation, type and reduction, and random groups, with threads and processes, on 1 to 8 ranks",
        lacks: one_gpu,
        run: driver::check,
    },
    Part {
        name: "buffers",
        about: "buffers that come and go, mapped by other processes, as whole allocations and in pieces",
        lacks: one_gpu,
        run: driver::buffers,
    },
    Part {
        name: "graph",
        about: "captured operations, replayed",
        lacks: one_gpu,
        run: driver::graph,
    },
    Part {
        name: "abort",
        about: "aborts, a rank that dies, ranks that call different operations, buffers that are refused",
        lacks: one_gpu,
        run: driver::abort,
    },
    Part {
        name: "nodes",
        about: "ranks on nodes of their own, over sockets: operations, random groups, graphs, aborts, a death",
        lacks: one_gpu,
        run: driver::nodes,
    },
    Part {
        name: "watch",
        about: "the collector attached to a job: every operation, each of 1,000 replays of captured ones, none lost",
        lacks: |host| one_gpu(host).or_else(collector::lacks),
        run: collector::run,
    },
    Part {
        name: "watchdog",
        about: "slow ranks, faults of all kinds, and what the watchdog says of them; 8 GiB left alone; a simulated time-out",
        lacks: one_gpu,
        run: watchdog::run,
    },
    Part {
        name: "events",
        about: "the same faults, seen through CUDA events",
        lacks: one_gpu,
        run: |steps| watchdog::faults(steps, "events"),
    },
    Part {
        name: "torch",
        about: "PyTorch's collectives, DDP, FSDP and a captured step, with 2 and 4 ranks, against NCCL",
        lacks: torch_and_gpu,
        run: torch::train,
    },
    Part {
        name: "training",
        about: "the collector attached to a training on all GPUs, by torchrun: every collective, on our library and on NCCL",
        lacks: |host| {
            let lacks = host.lacks_gpus(2).or_else(|| host.python_with_torch().err());
            lacks.or_else(collector::lacks)
        },
        run: training::run,
    },
    Part {
        name: "nccl-tests",
        about: "its nine programs on two GPUs, every result checked",
        lacks: |host| gpus_and_nccl_tests(host, 2),
        run: |steps| nccl_tests::check(steps, 2),
    },
    Part {
        name: "nccl-tests-4",
        about: "the same on four",
        lacks: |host| gpus_and_nccl_tests(host, 4),
        run: |steps| nccl_tests::check(steps, 4),
    },
    Part {
        name: "nccl-tests-long",
        about: "their longest, to 4 GiB, by threads, ordinary, registered, captured and as captured windows, on four GPUs and on two",
        lacks: |host| gpus_and_nccl_tests(host, 2),
        run: nccl_tests::check_long,
    },
    Part {
        name: "perf",
        about: "what a call costs, and nccl-tests' times on two GPUs, ours and NCCL's, with the goals",
        lacks: |host| gpus_and_both_libraries(host, 2),
        run: |steps| nccl_tests::call(steps).and_then(|()| nccl_tests::times(steps, 2)),
    },
    Part {
        name: "perf-4",
        about: "nccl-tests' times on four",
        lacks: |host| gpus_and_both_libraries(host, 4),
        run: |steps| nccl_tests::times(steps, 4),
    },
    Part {
        name: "cost",
        about: "what records, the watchdog, by either source, and the collector add to a call and to an operation",
        lacks: |host| host.lacks_gpus(2).or_else(collector::lacks),
        run: cost::run,
    },
    Part {
        name: "tune",
        about: "every way of every operation over sizes, and what the library's table takes, on two and on four GPUs",
        lacks: |host| host.lacks_gpus(2),
        run: tune::run,
    },
    Part {
        name: "engines",
        about: "what is long in windows, by kernels and by copy engines, with pieces of several lengths",
        lacks: |host| host.lacks_gpus(2),
        run: tune::engines,
    },
    Part {
        name: "symm",
        about: "all_reduce in graphs: ours, NCCL and PyTorch's symmetric memory",
        lacks: |host| host.lacks_gpus(2).or_else(|| host.python_with_torch().err()),
        run: torch::symmetric,
    },
    Part {
        name: "sanitizer",
        about: "compute-sanitizer's memcheck and racecheck on small sizes, of two ranks",
        // A GPU runs one kernel at a time under it, and those of ranks that share one wait for each other.
        lacks: |host| host.lacks_gpus(2).or_else(|| host.sanitizer().err()),
        run: |steps| sanitizer::run(steps, 2),
    },
    Part {
        name: "sanitizer-4",
        about: "the same of four",
        lacks: |host| host.lacks_gpus(4).or_else(|| host.sanitizer().err()),
        run: |steps| sanitizer::run(steps, 4),
    },
    Part {
        name: "pause",
        about: "a training in which one rank pauses for 30 s, as for a checkpoint",
        lacks: torch_and_gpu,
        run: torch::pause,
    },
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::PARTS;

    #[test]
    fn parts_have_names_of_their_own() {
        let names: HashSet<_> = PARTS.iter().map(|part| part.name).collect();
        assert_eq!(names.len(), PARTS.len());
    }
}
