//! Ranks whose calls do not fit together.

use anyhow::Result;

use super::{
    super::{
        call::{Call, Launched},
        cases::{Fault, Operation, SUCCESS},
        journal::What,
    },
    Member, Stage,
};
use crate::nccl::{Buffer, Communicator};

impl Member<'_> {
    /// The ranks call what does not fit together.
    pub(super) fn mismatch(&self, communicator: Communicator<'_>) -> Result<()> {
        let round = self.round;
        let (first, second) = (
            self.new_call(&communicator, round.operation, round.elements)?,
            self.new_call(
                &communicator,
                match round.operation {
                    Operation::AllReduce => Operation::AllGather,
                    _ => Operation::AllReduce,
                },
                round.elements,
            )?,
        );
        // Connections stand before the fault.
        for number in 0..round.before {
            self.before(2 * number, || first.call(&communicator))?;
            self.before(2 * number + 1, || second.call(&communicator))?;
        }
        communicator.synchronise()?;
        let other = self.new_call(&communicator, round.operation, round.elements + 1)?;
        let message = communicator.buffer(round.elements)?;
        let calls = || match (round.fault, self.is_victim()) {
            (Fault::Count, true) => other.call(&communicator),
            (Fault::Count, false) => first.call(&communicator),
            (Fault::Order, true) => second
                .call(&communicator)
                .and_then(|()| first.call(&communicator)),
            (Fault::Order, false) => first
                .call(&communicator)
                .and_then(|()| second.call(&communicator)),
            _ => self.crosses(&communicator, &first, &message),
        };
        let launched = Launched::prepare(round.mode, &communicator, calls)?;
        self.stages.have_graphs(&[&communicator])?;
        self.begin()?;
        self.note(What::Called)?;
        let outcome = launched.launch(&communicator, calls);
        self.launched()?;
        if let Err(error) = outcome
            // The first of two calls may be found out before the second one is made.
            && communicator.state()?.0 == SUCCESS
        {
            return Err(error);
        }
        self.fails(&communicator)?;
        self.stages.wait(Stage::End);
        launched.forget(&communicator)?;
        communicator.abort()
    }

    /// Two ranks begin with what the other one comes to only afterwards, if it has called it at all.
    fn crosses(&self, communicator: &Communicator<'_>, collective: &Call, message: &Buffer) -> Result<()> {
        let round = self.round;
        let receives_from = round.receives_from(self.rank);
        match receives_from {
            Some(from) => communicator.receive(message, 0..message.len(), from),
            None => collective.call(communicator),
        }?;
        let Some(other) = round.crossed_with(self.rank).filter(|_| round.enqueues_both()) else {
            return Ok(());
        };
        // What it comes to first is no message from this rank, or what the other one waits for is one.
        if receives_from.is_none() || round.receives_from(other).is_some() {
            communicator.send(message, 0..message.len(), other)?;
        }
        match receives_from {
            Some(_) => collective.call(communicator),
            None => Ok(()),
        }
    }
}
