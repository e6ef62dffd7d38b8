//! Communicators that come of others: split off, or what is left when ranks are excluded.

use std::{collections::HashMap, sync::Arc};

use ringsight_comm_base::{
    error::{Error, Result, ResultCode},
    sync::lock,
};
use ringsight_kernels::AbortWord;

use super::{Communicator, Config, Lifecycle, init::Making};
use crate::{
    bootstrap::{self, fnv1a},
    observe, watchdog,
};

/// The colour of ranks that take part in a split and get no communicator (`NCCL_SPLIT_NOCOLOR`).
const NO_COLOR: i32 = -1;

/// Who becomes a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// Ranks of the same colour, by key and then by rank; all ranks of the parent take part.
    Split {
        /// `None`: this rank gets no communicator.
        color: Option<u32>,
        /// Its place among those of its colour.
        key: i32,
    },
    /// All ranks but some, in rank order; those take no part and may be dead.
    Shrink {
        /// Who is left.
        members: Vec<u32>,
    },
}

impl Selection {
    /// All ranks of a communicator of `ranks` ranks but `excluded`.
    ///
    /// # Errors
    /// `excluded` is empty, names a rank twice or one that does not exist, or `rank` itself.
    pub fn without(excluded: &[i32], rank: u32, ranks: u32) -> Result<Self> {
        if excluded.is_empty() {
            return Err(Error::argument(
                "excludeRanksCount is not positive: name the ranks to exclude",
            ));
        }
        let mut members: Vec<u32> = (0..ranks).collect();
        for number in excluded {
            let found = u32::try_from(*number)
                .ok()
                .and_then(|excluded| members.binary_search(&excluded).ok());
            let Some(index) = found else {
                let twice = excluded.iter().filter(|other| *other == number).count() > 1;
                return Err(Error::argument(if twice {
                    format!("excludeRanksList names rank {number} twice")
                } else {
                    format!("excludeRanksList names {number}: ranks are 0 to {}", ranks - 1)
                }));
            };
            members.remove(index);
        }
        if members.binary_search(&rank).is_err() {
            return Err(Error::argument(format!(
                "excludeRanksList names rank {rank}, the caller: excluded ranks do not call"
            )));
        }
        Ok(Self::Shrink { members })
    }
}

/// How many children of a kind there have been; the same on all ranks that take part in the next one.
#[derive(Default)]
pub(super) struct Counts {
    splits: u64,
    /// By who was left: another list is another set of ranks that count.
    shrinks: HashMap<Vec<u32>, u64>,
}

/// A child that is to be made.
pub struct ChildJob {
    parent: Arc<Communicator>,
    selection: Selection,
    life: Arc<Lifecycle>,
    config: Config,
}

/// Releases the waits of a child in the making when its parent is aborted.
pub(super) struct Expected<'a> {
    parent: &'a Lifecycle,
    abort: &'a Arc<AbortWord>,
}

impl<'a> Expected<'a> {
    /// The child of `parent` that `life` is of.
    pub(super) fn of(parent: &'a Communicator, life: &'a Lifecycle) -> Self {
        let (parent, abort) = (&*parent.life, life.abort_word());
        parent.expect_child(abort);
        Self { parent, abort }
    }
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        self.parent.release_child(self.abort);
    }
}

impl ChildJob {
    /// A child of `parent`, whose handle stands for `life`.
    #[must_use]
    pub fn new(
        parent: Arc<Communicator>,
        selection: Selection,
        life: Arc<Lifecycle>,
        config: Config,
    ) -> Self {
        Self {
            parent,
            selection,
            life,
            config,
        }
    }

    /// Number of this split, or of the shrink to these members; from 1. Taken when it is made and not when it is asked for:
    /// what a group that fails has asked for does not happen, and is not counted by the other ranks.
    fn count(&self) -> u64 {
        let mut counts = lock(&self.parent.children);
        let count = match &self.selection {
            Selection::Split { .. } => &mut counts.splits,
            Selection::Shrink { members } => counts.shrinks.entry(members.clone()).or_default(),
        };
        *count += 1;
        *count
    }

    /// Makes it; `None` if this rank has no colour. Returns when all its ranks are connected.
    ///
    /// # Errors
    /// A rank that takes no part or dies, an abort of the child or its parent, or the system.
    pub fn run(&self) -> Result<Option<Arc<Communicator>>> {
        let start_ns = observe::now_ns();
        let (parent, abort) = (&self.parent, self.life.abort_word());
        let _expected = Expected::of(parent, &self.life);
        let context = |error: Error| {
            error.within(&format!(
                "a child of communicator {:016x}, whose rank {} this is",
                parent.id, parent.rank
            ))
        };
        let count = self.count();
        let Some((color, members)) = self.members(count).map_err(context)? else {
            return Ok(None);
        };
        // A revoked parent's proxy is not to be trusted with more.
        let share = match self.selection {
            _ if parent.is_given_up() => false,
            Selection::Split { .. } => parent.config.split_share,
            Selection::Shrink { .. } => parent.config.shrink_share,
        };
        let proxy_ranks = || members.iter().map(|member| parent.proxy_ranks[*member as usize]);
        let making = Making {
            life: &self.life,
            parent: parent.id,
            device: parent.device,
            config: &self.config,
            share: share.then(|| (parent.membership.proxy.clone(), proxy_ranks().collect())),
            start_ns,
            watchdog: watchdog::Settings::read(&self.config.name)?,
        };
        making.enter_device()?;
        let id = child_id(parent.id, count, color, &members);
        let bootstrap = parent
            .bootstrap
            .child(&members, id, abort.clone(), bootstrap::default_timeout()?)
            .map_err(|error| context(error.into()))?;
        making.complete(bootstrap, id).map(Some).map_err(context)
    }

    /// Its colour and the parent's ranks that it is made of, in the order of its own; `None` without a colour.
    fn members(&self, count: u64) -> Result<Option<(i32, Vec<u32>)>> {
        let (color, key) = match &self.selection {
            Selection::Shrink { members } => return Ok(Some((NO_COLOR, members.clone()))),
            Selection::Split { color, key } => (color.map_or(NO_COLOR, |color| color as i32), *key),
        };
        let parent = &self.parent;
        let everyone: Vec<u32> = (0..parent.ranks).collect();
        let mine = [color.to_le_bytes(), key.to_le_bytes()].concat();
        // Not by the parent's abort word: that of a revoked parent is set.
        let parts =
            parent
                .bootstrap
                .gather_among_with(&everyone, count as u32, &mine, self.life.abort_word())?;
        let choices = parts
            .iter()
            .map(|part| {
                let (color, key) = part.split_first_chunk()?;
                Some((
                    i32::from_le_bytes(*color),
                    i32::from_le_bytes(key.try_into().ok()?),
                ))
            })
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| Error::new(ResultCode::RemoteError, "a rank's colour cannot be read"))?;
        Ok((color != NO_COLOR).then(|| (color, of_color(color, &choices))))
    }
}

/// Ranks of a colour, by key and then by rank; `choices` are (colour, key) by rank.
fn of_color(color: i32, choices: &[(i32, i32)]) -> Vec<u32> {
    let mut members: Vec<u32> = (0..)
        .zip(choices)
        .filter(|(_, (theirs, _))| *theirs == color)
        .map(|(rank, _)| rank)
        .collect();
    members.sort_by_key(|rank| choices[*rank as usize].1); // stable
    members
}

/// The id of a child: the same on all its ranks, never 0.
fn child_id(parent: u64, count: u64, color: i32, members: &[u32]) -> u64 {
    let mut bytes = Vec::with_capacity(20 + 4 * members.len());
    bytes.extend(parent.to_le_bytes());
    bytes.extend(count.to_le_bytes());
    bytes.extend(color.to_le_bytes());
    bytes.extend(members.iter().flat_map(|member| member.to_le_bytes()));
    fnv1a(&bytes).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_of_keys_go_by_rank() {
        let choices = [
            (1, 5),
            (0, 3),
            (1, -2),
            (1, 5),
            (NO_COLOR, 0),
            (0, 3),
            (1, i32::MIN),
        ];
        assert_eq!(of_color(1, &choices), [6, 2, 0, 3]);
        assert_eq!(of_color(0, &choices), [1, 5]);
        assert!(of_color(7, &choices).is_empty());
    }

    #[test]
    fn the_id_depends_on_all_that_makes_a_child() {
        // FNV-1a of 01 00*7, 02 00*7, 03 00*3, 00*4, 02 00*3: also in docs/src/data-model.md.
        let id = child_id(1, 2, 3, &[0, 2]);
        assert_eq!(id, 0xd024_08e4_aeaa_b6f7);
        let others = [
            child_id(2, 2, 3, &[0, 2]),
            child_id(1, 3, 3, &[0, 2]),
            child_id(1, 2, 4, &[0, 2]),
            child_id(1, 2, 3, &[2, 0]),
            child_id(1, 2, 3, &[0]),
        ];
        assert!(!others.contains(&id));
    }

    #[test]
    fn excluded_ranks_are_checked() {
        let members = |excluded: &[i32]| Selection::without(excluded, 1, 4);
        let left = |members: &[u32]| {
            Ok(Selection::Shrink {
                members: members.to_vec(),
            })
        };
        assert_eq!(members(&[2]), left(&[0, 1, 3]));
        assert_eq!(members(&[3, 0, 2]), left(&[1]));
        for (excluded, text) in [
            (&[][..], "excludeRanksCount"),
            (&[4], "names 4"),
            (&[-1], "names -1"),
            (&[2, 0, 2], "names rank 2 twice"),
            (&[1], "the caller"),
        ] {
            let error = members(excluded).unwrap_err();
            assert_eq!(error.code, ResultCode::InvalidArgument);
            assert!(error.text.contains(text), "{error}");
        }
    }
}
