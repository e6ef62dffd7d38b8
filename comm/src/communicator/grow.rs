//! Communicators that grow: the ranks of one and new ranks make another.
//!
//! One rank of the communicator makes an id and gives it to the new ranks, as the program likes. At the call, the ranks of
//! the communicator tell each other the id. Then all ranks, old and new, meet under it as under any other unique id.

use std::sync::Arc;

use ringsight_comm_base::{
    error::{Error, Result, ResultCode},
    sync::lock,
};

use super::{Communicator, Config, InitJob, Lifecycle, child::Expected};
use crate::bootstrap::{self, UniqueId};

/// Tells tags of grows from tags of splits and windows.
const GROW: u32 = 1 << 30;

type IdBytes = [u8; UniqueId::BYTES];

/// A communicator that is to be made of another one's ranks and new ones.
pub struct GrowJob {
    /// `None` on a new rank.
    pub parent: Option<Arc<Communicator>>,
    /// What the caller passed.
    pub id: Option<IdBytes>,
    /// What its handle stands for.
    pub life: Arc<Lifecycle>,
    /// Ranks, old and new.
    pub ranks: u32,
    /// This one.
    pub rank: u32,
    /// Device number.
    pub device: i32,
    /// Choices.
    pub config: Config,
}

/// What a rank of the communicator tells the others: which id it was passed, and which one it made.
fn told(passed: Option<IdBytes>, made: Option<IdBytes>) -> Vec<u8> {
    [passed, made]
        .into_iter()
        .flat_map(|id| {
            let mut bytes = vec![u8::from(id.is_some())];
            bytes.extend(id.unwrap_or([0; UniqueId::BYTES]));
            bytes
        })
        .collect()
}

fn parse(bytes: &[u8]) -> Option<(Option<IdBytes>, Option<IdBytes>)> {
    let id = |bytes: &[u8]| match bytes.split_first()? {
        (0, _) => Some(None),
        (1, id) => Some(Some(id.try_into().ok()?)),
        _ => None,
    };
    let (passed, made) = bytes.split_at_checked(1 + UniqueId::BYTES)?;
    (made.len() == 1 + UniqueId::BYTES).then_some(())?;
    Some((id(passed)?, id(made)?))
}

/// The id that the ranks agree on, from what each told, by rank.
fn agreed(told: &[Vec<u8>]) -> Result<IdBytes> {
    let told: Vec<(Option<IdBytes>, Option<IdBytes>)> = told
        .iter()
        .map(|bytes| parse(bytes))
        .collect::<Option<_>>()
        .ok_or_else(|| Error::new(ResultCode::RemoteError, "a rank's id cannot be read"))?;
    let mut passed = (0..told.len()).filter_map(|rank| Some((rank, told[rank].0?)));
    let Some((first, id)) = passed.next() else {
        return Err(Error::argument(
            "no rank of the communicator passes the id of ncclCommGetUniqueId",
        ));
    };
    if let Some((other, _)) = passed.find(|(_, theirs)| *theirs != id) {
        return Err(Error::argument(format!(
            "ranks {first} and {other} pass different ids"
        )));
    }
    if told.iter().all(|(_, made)| *made != Some(id)) {
        return Err(Error::argument(format!(
            "the id that rank {first} passes is not one that ncclCommGetUniqueId gave for this communicator, or it was \
             used already"
        )));
    }
    Ok(id)
}

impl GrowJob {
    /// Makes the communicator; returns when all ranks have come.
    ///
    /// # Errors
    /// No id, a wrong one, a rank that does not come or dies, an abort, or the system.
    pub fn run(&self) -> Result<Arc<Communicator>> {
        let _expected = self
            .parent
            .as_ref()
            .map(|parent| Expected::of(parent, &self.life));
        let context = |error: Error| match &self.parent {
            Some(parent) => error.within(&format!("growing communicator {:016x}", parent.id)),
            None => error.within("joining a communicator that grows"),
        };
        let id = self.agree_on_id().map_err(context)?;
        let job = InitJob {
            life: self.life.clone(),
            ids: vec![id],
            ranks: self.ranks,
            rank: self.rank,
            device: self.device,
            config: self.config.clone(),
        };
        job.run().map_err(context)
    }

    fn agree_on_id(&self) -> Result<IdBytes> {
        let Some(parent) = &self.parent else {
            return self.id.ok_or_else(|| Error::argument("uniqueId is NULL"));
        };
        let (count, made) = {
            let mut grows = lock(&parent.grows);
            grows.count += 1;
            // Used up, whatever comes of it.
            (grows.count, grows.id.take())
        };
        let everyone: Vec<u32> = (0..parent.ranks).collect();
        let parts = parent.bootstrap.gather_among_with(
            &everyone,
            GROW | count,
            &told(self.id, made),
            self.life.abort_word(),
        )?;
        agreed(&parts)
    }
}

/// The grows of a communicator.
#[derive(Default)]
pub(super) struct Grows {
    /// How many there have been; the same on all ranks.
    count: u32,
    /// Made by this rank for the next one.
    id: Option<IdBytes>,
}

impl Communicator {
    /// Makes the id for the next grow.
    ///
    /// # Errors
    /// There is one already; the communicator cannot have children; the system.
    pub(crate) fn make_grow_id(&self) -> Result<IdBytes> {
        self.check_parent()?;
        let mut grows = lock(&self.grows);
        if grows.id.is_some() {
            return Err(Error::usage(
                "ncclCommGetUniqueId has given an id for this communicator that no ncclCommGrow has used",
            ));
        }
        Ok(*grows.id.insert(bootstrap::create_root()?.to_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_agree_on_the_id_that_one_of_them_made() {
        let (first, second) = ([1; UniqueId::BYTES], [2; UniqueId::BYTES]);
        let agreed = |ranks: &[(Option<IdBytes>, Option<IdBytes>)]| {
            let parts: Vec<_> = ranks.iter().map(|(passed, made)| told(*passed, *made)).collect();
            agreed(&parts).map_err(|error| error.text)
        };
        assert_eq!(agreed(&[(None, None), (Some(first), Some(first))]), Ok(first));
        assert_eq!(
            agreed(&[(Some(first), None), (Some(first), Some(first))]),
            Ok(first)
        );
        // Rank 0 made one, too, and it is not the one.
        assert_eq!(
            agreed(&[(None, Some(second)), (Some(first), Some(first))]),
            Ok(first)
        );
        for (ranks, why) in [
            (
                &[(None, None), (None, Some(first))][..],
                "no rank of the communicator",
            ),
            (
                &[(Some(second), None), (Some(first), Some(first))],
                "ranks 0 and 1 pass different ids",
            ),
            (&[(None, None), (Some(second), None)], "rank 1 passes is not one"),
        ] {
            let error = agreed(ranks).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn what_a_rank_tells_is_understood() {
        let id = Some([7; UniqueId::BYTES]);
        for both in [(None, None), (id, None), (None, id), (id, id)] {
            assert_eq!(parse(&told(both.0, both.1)), Some(both));
        }
        let bytes = told(id, None);
        let mut wrong = bytes.clone();
        wrong[0] = 2;
        for rubbish in [&bytes[1..], &[&bytes[..], &[0]].concat(), &wrong, &[]] {
            assert_eq!(parse(rubbish), None);
        }
    }
}
