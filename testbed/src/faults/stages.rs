//! The ranks of one process, each a thread: how they start, and how the job tells them how far the round is.

use std::{
    path::Path,
    sync::{Barrier, Condvar, Mutex, MutexGuard, PoisonError, atomic::AtomicI32},
    thread,
};

use anyhow::{Context as _, Result};

use crate::{
    nccl::{Communicator, DeviceKind, Nccl, UniqueId},
    process::on_threads,
    ranks::unique_id,
};

/// How far a round is, as told by whoever started us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// The fault is there, or to come.
    #[default]
    Lasts,
    /// The others stand where they were to: the rank that comes last may come.
    Turn,
    /// It is to end.
    End,
    /// Nobody needs anybody any more.
    Exit,
}

/// The stage, to be waited for; and where the ranks of the process wait for each other.
pub(super) struct Stages {
    told: Mutex<Stage>,
    changed: Condvar,
    ready: Barrier,
    /// The number of the victim's stream's thread, once that has got to the kernel that is to be stopped; else 0.
    pub(super) kernel_thread: AtomicI32,
}

impl Stages {
    fn new(members: usize) -> Self {
        Self {
            told: Mutex::default(),
            changed: Condvar::new(),
            ready: Barrier::new(members),
            kernel_thread: AtomicI32::new(0),
        }
    }

    /// Waits until all ranks of the process have made and uploaded their graphs, this one's with the streams of `on`: either waits for the kernels of ranks that share the
    /// GPU, and these would wait for this one's replay.
    pub(super) fn have_graphs(&self, on: &[&Communicator<'_>]) -> Result<()> {
        on.iter()
            .try_for_each(|communicator| communicator.synchronise())?;
        self.ready.wait();
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Stage> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, stage: Stage) {
        *self.lock() = stage;
        self.changed.notify_all();
    }

    pub(super) fn now(&self) -> Stage {
        *self.lock()
    }

    /// Waits for a stage, or a later one.
    pub(super) fn wait(&self, stage: Stage) {
        drop(
            self.changed
                .wait_while(self.lock(), |told| *told < stage)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}

/// Runs `body` for each of the ranks on a thread of its own, with the unique id that all processes of the job share.
pub(super) fn run_members(
    members: &[u32],
    device: DeviceKind,
    body: impl Fn(&Nccl, UniqueId, u32, &'static Stages) -> Result<()> + Sync,
) -> Result<()> {
    let nccl = Nccl::open(Path::new("libnccl.so.2"), device)?;
    let id = unique_id(&nccl, members.contains(&0))?;
    // Streams may refer to it until the process ends.
    let stages: &'static Stages = Box::leak(Box::new(Stages::new(members.len())));
    thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            match line.as_str() {
                "turn" => stages.tell(Stage::Turn),
                "end" => stages.tell(Stage::End),
                "exit" => stages.tell(Stage::Exit),
                _ => {}
            }
        }
        // Whoever started us is gone.
        stages.tell(Stage::Exit);
    });
    on_threads(members, |rank| {
        body(&nccl, id, *rank, stages).with_context(|| format!("rank {rank}"))
    })
    .map(drop)
}
