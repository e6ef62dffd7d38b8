//! Launches of kernels.

use std::{any::Any, sync::Arc};

use ringsight_kernels::Launch;

use super::{DeviceError, Result, Stream};

/// What a device keeps for the launches of one communicator; `None` if it keeps nothing. See [`Launches::new_launcher`].
pub type Launcher = Option<Box<dyn Any + Send>>;

/// How another stream waits for the end of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaunchEnd {
    /// By an event recorded behind it.
    ByEvent,
    /// By an event, or by [`Launches::wait_for_launch`], which works whatever has become of the launch's stream.
    ByLauncher,
}

/// Launches of kernels in streams.
pub trait Launches {
    /// What kernels of a new communicator on the current device are launched with.
    fn new_launcher(&self) -> Result<Launcher> {
        Ok(None)
    }

    /// Runs a kernel (all channels of a plan) in stream order. The device holds `launch` until it has run; in a capture until the graph and its
    /// instances are gone.
    fn launch_kernel(
        &self,
        stream: Stream,
        launch: Arc<Launch>,
        launcher: &mut Launcher,
    ) -> Result<LaunchEnd>;

    /// The same without checks. The caller has checked the works, and knows that the stream is in no capture and that device number `device` is
    /// current.
    fn launch_prepared(
        &self,
        _device: i32,
        stream: Stream,
        launch: Arc<Launch>,
        launcher: &mut Launcher,
    ) -> Result<LaunchEnd> {
        self.launch_kernel(stream, launch, launcher)
    }

    /// Makes later work in `stream`, which is in no capture, wait for the last launch with `launcher`. That launch returned
    /// [`LaunchEnd::ByLauncher`].
    fn wait_for_launch(&self, _stream: Stream, _launcher: &mut Launcher) -> Result<()> {
        Err(DeviceError::InvalidUsage(
            "this device's launches end by events only".into(),
        ))
    }
}
