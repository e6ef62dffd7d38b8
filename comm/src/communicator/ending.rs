//! How a communicator ends: finalized, destroyed, revoked, aborted.

use std::{sync::atomic::Ordering, time::Duration};

use ringsight_comm_base::{
    error::{Error, Result, ResultCode},
    fork,
    sync::lock,
};
use ringsight_records::{Kind, State};

use super::{Communicator, peer_memory, registry};
use crate::{device::device, observe};

/// How long plans on the device may take to notice the abort word.
const GIVE_UP: Duration = Duration::from_secs(10);

impl Communicator {
    /// Whether operations may be enqueued.
    ///
    /// # Errors
    /// After finalize, revoke, abort or an asynchronous error, and in a child of the process that made it.
    pub fn check_usable(&self) -> Result<()> {
        if let Some(call) = self.given_up.get() {
            return Err(Error::usage(format!(
                "comm has been revoked by {call}: ncclCommSplit, ncclCommShrink and ncclCommDestroy are left"
            )));
        }
        self.check_live()?;
        match self.async_error() {
            Some(error) => Err(error.within("comm has failed earlier")),
            None => Ok(()),
        }
    }

    /// What an operation that could not be planned failed with, in truth: a connection that cannot be made may be the
    /// consequence of something that this rank has not heard of yet.
    pub(crate) fn reason(&self, error: Error) -> Error {
        if error.code == ResultCode::RemoteError && self.check_usable().is_ok() {
            // The ranks' operations no longer fit together either way.
            self.launch.checks.connection_failed(error.text.clone());
            self.launch.checks.wait();
        }
        self.check_usable().err().unwrap_or(error)
    }

    /// Whether children may be made from it: a revoked communicator still can.
    ///
    /// # Errors
    /// As [`Communicator::check_usable`].
    pub fn check_parent(&self) -> Result<()> {
        self.check_fork()?;
        if self.given_up.get().is_some() {
            return Ok(());
        }
        self.check_live()?;
        match self.async_error() {
            Some(error) => Err(error.within(
                "comm has failed earlier (ncclCommShrink with NCCL_SHRINK_ABORT makes one of the ranks that are well)",
            )),
            None => Ok(()),
        }
    }

    fn check_live(&self) -> Result<()> {
        self.check_fork()?;
        if self.finalized.load(Ordering::Relaxed) {
            return Err(Error::usage(
                "comm has been finalized: only ncclCommDestroy and queries are left",
            ));
        }
        // After a failure it is set, too; then there is more to say.
        if self.launch.abort.is_set() && self.async_error().is_none() {
            return Err(Error::usage("comm has been aborted"));
        }
        Ok(())
    }

    pub(super) fn check_fork(&self) -> Result<()> {
        if self.fork == fork::generation() {
            return Ok(());
        }
        Err(registry::of_parent())
    }

    /// Nothing can be enqueued any more; [`Communicator::flush`] does the rest.
    ///
    /// # Errors
    /// That has been said before, it has been revoked, or it belongs to the parent of this forked process.
    pub fn close(&self) -> Result<()> {
        self.check_fork()?;
        if self.given_up.get().is_some() {
            return Err(Error::argument(
                "comm has been revoked: it cannot be finalized, only destroyed",
            ));
        }
        // Relaxed: a caller that enqueues meanwhile is on another thread without order to this one.
        if self.finalized.swap(true, Ordering::Relaxed) {
            return Err(Error::argument("comm has been finalized already"));
        }
        Ok(())
    }

    /// Waits until all work that was enqueued is done.
    ///
    /// # Errors
    /// What went wrong asynchronously meanwhile.
    pub fn flush(&self) -> Result<()> {
        let mut planner = self.planner();
        planner.queue.submitted.wait(|_| {
            if let Err(error) = device().and_then(|device| device.check_health(self.device)) {
                self.life.fail(Error::from(error));
            }
            self.launch.abort.is_set() || self.faults.get().is_some()
        });
        drop(planner);
        // All of it: a peer may still wait for a tag that this rank only shows, when all that it asked for is here.
        let failed = || self.launch.abort.is_set() || self.faults.get().is_some();
        self.launch.posting.flush(failed);
        self.async_error().map_or(Ok(()), Err)
    }

    /// Terminates its operations for good, on behalf of `call`: every wait is released. [`Communicator::quiesce`] waits
    /// until they have given up.
    ///
    /// # Errors
    /// It is finalized, or has been given up before.
    pub fn give_up(&self, call: &'static str) -> Result<()> {
        self.check_fork()?;
        if self.finalized.load(Ordering::Relaxed) {
            return Err(Error::argument(
                "comm has been finalized: it cannot be revoked any more",
            ));
        }
        if self.given_up.set(call).is_err() {
            return Err(Error::argument("comm has been revoked already"));
        }
        if let Some(watch) = self.watch() {
            watch.end(true);
        }
        self.life.release();
        Ok(())
    }

    /// Whether [`Communicator::give_up`] was called.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.given_up.get().is_some()
    }

    /// After [`Communicator::give_up`]: waits until nothing runs any more, and forgets what went wrong before.
    pub fn quiesce(&self) {
        let mut planner = self.planner();
        planner
            .queue
            .submitted
            .wait_aborted(GIVE_UP, || self.is_device_lost());
        planner.queue.submitted.clear_pool();
        drop(planner);
        self.membership.leave(&self.launch.connector);
        self.faults.silence();
    }

    fn is_device_lost(&self) -> bool {
        device().is_ok_and(|device| device.fault(self.device).is_some())
    }

    pub(super) fn stop_buffer_exchange(&self) {
        if let Some(exchange) = &self.launch.buffer_exchange {
            exchange.stop();
        }
    }

    /// Ends the communicator: its threads are joined when the last reference is gone.
    fn end(&self, state: State) {
        if let Some(watch) = self.watch().filter(|_| state == State::ABORTED) {
            watch.give_up();
        }
        // From here on replays of graphs that still hold plans of this communicator give up instead of waiting for
        // ranks and threads that are gone.
        self.launch.abort.set();
        if let Some(watch) = self.watch() {
            watch.end(state == State::ABORTED);
        }
        let mut planner = self.planner();
        planner
            .queue
            .submitted
            .wait_aborted(GIVE_UP, || self.is_device_lost());
        planner.queue.submitted.clear_pool();
        if let Ok(device) = device()
            && let Ok(before) = device.save_context()
        {
            // Nothing is left to be done about a device that is broken.
            let _ = device.set_current(self.device);
            planner.queue.order.clear(&**device);
            if let Some(watch) = self.watch() {
                watch.close();
            }
            let _ = device.restore(before);
        }
        drop(planner);
        self.stop_buffer_exchange();
        self.membership.leave(&self.launch.connector);
        self.launch.checks.stop();
        self.bootstrap.leave(state == State::ABORTED);
        lock(&self.table).take();
        if !self.ended.swap(true, Ordering::Relaxed) {
            tracing::info!(
                target: ringsight_comm_base::log::INIT,
                "comm {:#x} rank {} nranks {} cudaDev {} - {} COMPLETE",
                self.id,
                self.rank,
                self.ranks,
                self.device,
                if state == State::ABORTED { "Abort" } else { "Destroy" },
            );
            observe::emit(&self.lifecycle(Kind::CommDestroy, state, 0));
        }
    }

    /// Waits for its work and ends it.
    ///
    /// # Errors
    /// As [`Communicator::flush`]; the communicator is gone all the same.
    pub fn destroy(&self) -> Result<()> {
        self.check_fork()?;
        self.finalized.store(true, Ordering::Relaxed);
        let result = self.flush();
        let has_failed = || self.launch.abort.is_set() || self.faults.get().is_some();
        let failed = has_failed();
        if !failed {
            self.settle(has_failed);
        }
        self.end(if failed { State::ABORTED } else { State::STOP });
        result
    }

    /// Waits until other processes write nothing more to this rank's memory.
    fn settle(&self, failed: impl Fn() -> bool) {
        let peers_settled = self.on_device(|_| {
            let settled = self
                .launch
                .peers
                .as_ref()
                .is_none_or(|peers| peer_memory::is_settled(peers, &failed));
            if let Some(fifos) = &self.device_fifos {
                fifos.settle(&failed);
            }
            Ok(settled)
        });
        // Relaxed: read by whoever drops the last reference, which orders it.
        self.peers_ended_well
            .store(peers_settled.unwrap_or(false), Ordering::Relaxed);
    }

    /// Ends it at once: every wait is released, work that has begun gives up.
    pub fn abort(&self) {
        if self.check_fork().is_err() {
            return;
        }
        self.life.abort();
        self.end(State::ABORTED);
    }
}
