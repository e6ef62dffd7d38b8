//! Which algorithm a library takes for an operation, and why not another: `ringsight explain`.
//!
//! The table belongs to the library, which tells of it through `ringsightExplain` of ringsight.h. The library's code is run by a process
//! that has nothing to lose ([`ask`]). Here are the operations that it is asked about: of a running process or of recorded spans
//! ([`Seen`]), or of nobody.

mod ask;
mod explained;
mod sandbox;
mod seen;
mod table;

pub use ask::{COMMAND, answer, ask};
pub use explained::Explained;
pub use seen::{Seen, of_process, of_spans};
pub use table::{Question, Row};

use std::fmt;

use ringsight_records::{
    Algorithm, DataType, Function, Protocol, ReduceOp,
    pages::{APART_BYTES, Communicator, text},
};

/// An operation, as far as the choice depends on it, and the communicator that it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Operation {
    /// Function.
    pub function: Function,
    /// Message bytes by nccl-tests' definition.
    pub bytes: u64,
    /// Type.
    pub data_type: DataType,
    /// Reduction, [`ReduceOp::None`] where there is none.
    pub reduce_op: ReduceOp,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Its buffers lie in registered memory; `None` where that is not known.
    pub registered: Option<bool>,
    /// It was captured; `None` where that is not known.
    pub captured: Option<bool>,
}

impl Operation {
    /// Elements, as the function takes them.
    #[must_use]
    pub fn count(&self) -> u64 {
        let parts = match self.function {
            Function::AllGather
            | Function::ReduceScatter
            | Function::AlltoAll
            | Function::Gather
            | Function::Scatter => u64::from(self.ranks.max(1)),
            _ => 1,
        };
        self.bytes / (self.data_type.size() as u64 * parts)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes, {}", self.function, self.bytes, self.data_type)?;
        if self.reduce_op != ReduceOp::None {
            write!(f, " {}", self.reduce_op)?;
        }
        write!(f, ", {} ranks", self.ranks)?;
        match self.registered {
            Some(true) => f.write_str(", registered buffers")?,
            Some(false) => f.write_str(", ordinary buffers")?,
            None => {}
        }
        match self.captured {
            Some(true) => f.write_str(", captured"),
            Some(false) => f.write_str(", eager"),
            None => Ok(()),
        }
    }
}

/// What the choice depends on of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Terms {
    /// Channels.
    pub channels: u32,
    /// Bytes of a FIFO slot.
    pub slot_bytes: u32,
    /// All ranks' devices do operations in one shot.
    pub one_shot: bool,
    /// All ranks' kernels reach each other's memory.
    pub peers: bool,
    /// Why they do not, if that is known: zero-padded.
    pub apart: [u8; APART_BYTES],
    /// Copy engines do what they can in windows, however short it is, as where all ranks' `CTAPolicy` is zero.
    pub zero_cta: bool,
}

impl Terms {
    /// Those of a communicator; `None` if its library does not tell.
    #[must_use]
    pub fn of(communicator: &Communicator) -> Option<Self> {
        (communicator.slot_bytes != 0).then_some(Self {
            channels: communicator.channels,
            slot_bytes: communicator.slot_bytes,
            one_shot: communicator.abilities & Communicator::ONE_SHOT != 0,
            peers: communicator.abilities & Communicator::PEERS != 0,
            apart: communicator.apart,
            zero_cta: communicator.abilities & Communicator::ZERO_CTA != 0,
        })
    }

    /// Why ranks' kernels do not reach each other's memory; empty if they do, or if that is not known.
    #[must_use]
    pub fn apart(&self) -> &str {
        text(&self.apart)
    }
}

/// How an operation was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Done {
    /// Algorithm.
    pub algorithm: Algorithm,
    /// Protocol.
    pub protocol: Protocol,
    /// Channels.
    pub channels: u32,
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = if self.channels == 1 { "" } else { "s" };
        write!(
            f,
            "{}/{}, {} channel{s}",
            self.algorithm, self.protocol, self.channels
        )
    }
}
