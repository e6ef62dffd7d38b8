//! Processes that make and end communicators and graphs, and list what they hold.

use std::{
    env,
    ffi::c_int,
    ptr::{null, null_mut},
    thread,
    time::{Duration, Instant},
};

use ringsight_comm::{
    abi,
    communicator::{Handle, lookup},
    device::{Event, GraphExec},
    error::ResultCode,
};
use ringsight_records::Function;

use crate::common::{
    Call, Rank, config, group,
    holdings::{Holdings, Random, leaves_nothing},
    host, last_error, ok, unique_id,
};

/// Communicators that the test makes; each has one to four ranks. Ten times as many with `RINGSIGHT_TEST_FULL=1`
/// (`cargo xtask test --full`).
const COMMUNICATORS: usize = 1000;

/// Graphs that the test captures on each of two ranks, and the most that live at the same time.
const GRAPHS: usize = 1000;

const LIVE_GRAPHS: usize = 40;

/// The most ranks that live at the same time.
const LIVE: usize = 24;

const SEED: u64 = 0x5eed_0001;

/// All ranks of one communicator.
struct Set {
    ranks: Vec<Handle>,
    /// Its operations were terminated: it can only go.
    revoked: bool,
}

impl Set {
    /// With `share`, its children use its proxies.
    fn new(size: usize, share: bool) -> Self {
        let mut ranks = vec![Handle(0); size];
        if share {
            let id = unique_id();
            let mut settings = config();
            (settings.split_share, settings.shrink_share) = (1, 1);
            group(|| {
                for (rank, comm) in ranks.iter_mut().enumerate() {
                    // SAFETY: valid places until the group has ended.
                    ok(unsafe {
                        abi::ncclCommInitRankConfig(comm, size as c_int, id, rank as c_int, &raw mut settings)
                    });
                }
            });
        } else {
            // SAFETY: as many places as ranks.
            ok(unsafe { abi::ncclCommInitAll(ranks.as_mut_ptr(), size as c_int, null()) });
        }
        Self {
            ranks,
            revoked: false,
        }
    }

    /// Made by a thread for each rank, as those of several processes are.
    fn on_threads(size: usize) -> Self {
        let id = unique_id();
        let mut ranks = vec![Handle(0); size];
        thread::scope(|scope| {
            for (rank, comm) in ranks.iter_mut().enumerate() {
                scope.spawn(move || {
                    // SAFETY: a valid place.
                    ok(unsafe { abi::ncclCommInitRank(comm, size as c_int, id, rank as c_int) });
                });
            }
        });
        Self {
            ranks,
            revoked: false,
        }
    }

    /// Ranks as they are split by colour, without those that get none.
    fn split(&self, random: &mut Random) -> Vec<Set> {
        let colors: Vec<c_int> = self.ranks.iter().map(|_| random.below(3) as c_int - 1).collect();
        let mut children = vec![Handle(0); self.ranks.len()];
        group(|| {
            for ((comm, color), child) in self.ranks.iter().zip(&colors).zip(&mut children) {
                // SAFETY: a valid place until the group has ended.
                ok(unsafe { abi::ncclCommSplit(*comm, *color, 0, child, null_mut()) });
            }
        });
        let of_color = |color: c_int| -> Vec<Handle> {
            let pairs = colors.iter().zip(&children);
            pairs
                .filter(|(theirs, _)| **theirs == color)
                .map(|(_, child)| *child)
                .collect()
        };
        [0, 1]
            .into_iter()
            .map(|color| Set {
                ranks: of_color(color),
                revoked: false,
            })
            .filter(|set| !set.ranks.is_empty())
            .collect()
    }

    /// All ranks but the last.
    fn shrink(&mut self, terminate: bool) -> Set {
        let mut excluded = [self.ranks.len() as c_int - 1];
        let mut children = vec![Handle(0); self.ranks.len() - 1];
        group(|| {
            for (comm, child) in self.ranks.iter().zip(&mut children) {
                // SAFETY: valid places until the group has ended.
                ok(unsafe {
                    abi::ncclCommShrink(
                        *comm,
                        excluded.as_mut_ptr(),
                        1,
                        child,
                        null_mut(),
                        terminate.into(),
                    )
                });
            }
        });
        self.revoked |= terminate;
        Set {
            ranks: children,
            revoked: false,
        }
    }

    fn all_reduce(&self) {
        let mut data = vec![[1f32; 100]; self.ranks.len()];
        let size = self.ranks.len();
        let ranks: Vec<Rank> = (0..size)
            .map(|rank| Rank {
                comm: self.ranks[rank],
                rank,
                ranks: size,
                stream: host().stream_create().unwrap(),
            })
            .collect();
        group(|| {
            for (rank, data) in ranks.iter().zip(&mut data) {
                let at = data.as_mut_ptr().cast();
                ok(rank.call(&Call::new(Function::AllReduce, 100), at, at));
            }
        });
        for rank in ranks {
            rank.synchronize();
            host().stream_destroy(rank.stream).unwrap();
        }
        assert!(data.iter().flatten().all(|value| *value == size as f32));
    }

    /// Each rank on its own: destroyed, or aborted.
    fn end(self, random: &mut Random) {
        for comm in self.ranks {
            // SAFETY: live communicators.
            unsafe {
                match random.below(4) {
                    0 => ok(abi::ncclCommAbort(comm)),
                    1 if !self.revoked => {
                        ok(abi::ncclCommFinalize(comm));
                        ok(abi::ncclCommDestroy(comm));
                    }
                    _ => ok(abi::ncclCommDestroy(comm)),
                }
            }
        }
    }
}

/// A rank whose peer never comes, aborted while it waits.
fn in_vain() {
    let (id, mut comm) = (unique_id(), Handle(0));
    let mut settings = config();
    settings.blocking = 0;
    // SAFETY: valid places.
    unsafe {
        let code = abi::ncclCommInitRankConfig(&raw mut comm, 2, id, 0, &raw mut settings);
        assert_eq!(code, ResultCode::InProgress);
        ok(abi::ncclCommAbort(comm));
        // The root serves the id until all ranks have come: let it be this one. It is refused as long as the root has not
        // seen that the other one, who said that there are two, is gone.
        let end = Instant::now() + Duration::from_secs(10);
        while abi::ncclCommInitRank(&raw mut comm, 1, id, 0) != ResultCode::Success {
            assert!(Instant::now() < end, "{}", last_error());
            thread::yield_now();
        }
        ok(abi::ncclCommDestroy(comm));
    }
}

/// Makes at least `count` communicators, those that come of others included, and ends them all.
fn come_and_go(count: usize, random: &mut Random) {
    let mut sets: Vec<Set> = Vec::new();
    let mut made = 0;
    while made < count {
        let live: usize = sets.iter().map(|set| set.ranks.len()).sum();
        if sets.is_empty() || live < LIVE && random.one_in(2) {
            let size = 1 + random.below(4);
            sets.push(match random.below(3) {
                0 => Set::on_threads(size),
                share => Set::new(size, share == 1),
            });
            made += 1;
            continue;
        }
        let chosen = random.below(sets.len());
        match random.below(8) {
            0 | 1 if live < LIVE => {
                let children = sets[chosen].split(random);
                made += children.len();
                sets.extend(children);
            }
            2 if live < LIVE && sets[chosen].ranks.len() > 1 => {
                let terminate = random.one_in(2);
                let child = sets[chosen].shrink(terminate);
                made += 1;
                sets.push(child);
            }
            3 => in_vain(),
            4 if !sets[chosen].revoked => sets[chosen].all_reduce(),
            5 if !sets[chosen].revoked => {
                for comm in &sets[chosen].ranks {
                    // SAFETY: a live communicator.
                    ok(unsafe { abi::ncclCommRevoke(*comm, 0) });
                }
                sets[chosen].revoked = true;
            }
            _ => sets.swap_remove(chosen).end(random),
        }
    }
    for set in sets {
        set.end(random);
    }
}

/// Communicators by the thousand.
pub(crate) fn communicators() {
    host();
    let mut random = Random(SEED);
    // What stays for the life of the process is made by the first ones.
    come_and_go(100, &mut random);
    leaves_nothing(times(), || come_and_go(COMMUNICATORS, &mut random));
}

/// How many thousands there are.
fn times() -> usize {
    if env::var_os("RINGSIGHT_TEST_FULL").is_some() {
        10
    } else {
        1
    }
}

/// The number of the next event of the host device, which numbers what it makes upwards.
fn event_number() -> usize {
    let event = host().event_create().unwrap();
    host().event_destroy(event).unwrap();
    event.0
}

/// How many events there are from a number on.
fn events_since(first: usize) -> usize {
    let is_there = |number: &usize| match host().event_query(Event(*number)) {
        Ok(_) => true,
        Err(error) => !error.to_string().contains("does not exist"),
    };
    (first..event_number()).filter(is_there).count()
}

/// An operation captured on each rank.
struct Captured(Vec<GraphExec>);

/// Captures so many graphs on the ranks of a communicator, replays them, and destroys them, in random order.
fn graphs_come_and_go(ranks: &[Rank], data: &mut [Vec<f32>], count: usize, random: &mut Random) {
    let device = host();
    let mut live: Vec<Captured> = Vec::new();
    let mut made = 0;
    while made < count || !live.is_empty() {
        let choice = random.below(4);
        if made < count && live.len() < LIVE_GRAPHS && (choice < 2 || live.is_empty()) {
            for rank in ranks {
                device.capture_begin(rank.stream).unwrap();
            }
            group(|| {
                for (rank, data) in ranks.iter().zip(&mut *data) {
                    let at = data.as_mut_ptr().cast();
                    ok(rank.call(&Call::new(Function::AllReduce, 100), at, at));
                }
            });
            let instance = |rank: &Rank| {
                let graph = device.capture_end(rank.stream).unwrap();
                let exec = device.graph_instantiate(graph).unwrap();
                device.graph_destroy(graph).unwrap();
                exec
            };
            live.push(Captured(ranks.iter().map(instance).collect()));
            made += 1;
            continue;
        }
        let chosen = random.below(live.len());
        if choice == 2 {
            for (rank, exec) in ranks.iter().zip(&live[chosen].0) {
                device.graph_launch(*exec, rank.stream).unwrap();
            }
        } else {
            // A replay that is running finishes first.
            for exec in live.swap_remove(chosen).0 {
                device.graph_exec_destroy(exec).unwrap();
            }
        }
    }
    for rank in ranks {
        rank.synchronize();
    }
    // Zeros stay zeros, however often they are added up.
    assert!(data.iter().flatten().all(|value| *value == 0.0));
    for rank in ranks {
        let comm = lookup(rank.comm).unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        while comm.held_plans().1 > 0 {
            assert!(Instant::now() < end, "{:?} plans are held", comm.held_plans());
            thread::yield_now();
        }
    }
}

/// Graphs by the thousand.
pub(crate) fn graphs() {
    host();
    let mut random = Random(SEED);
    let set = Set::new(2, false);
    let ranks: Vec<Rank> = (0..2)
        .map(|rank| Rank {
            comm: set.ranks[rank],
            rank,
            ranks: 2,
            stream: host().stream_create().unwrap(),
        })
        .collect();
    let mut data = vec![vec![0f32; 100]; 2];
    let first = event_number();
    graphs_come_and_go(&ranks, &mut data, 200, &mut random);
    // Those before have filled what fills once.
    leaves_nothing(2 * times(), || {
        graphs_come_and_go(&ranks, &mut data, GRAPHS, &mut random);
    });
    // Events are in the device's list, where a leak checker finds them, and too small to be seen to grow. Those that order what graphs
    // have go when the next one is captured, some stay with the communicators.
    let end = Instant::now() + Duration::from_secs(10);
    graphs_come_and_go(&ranks, &mut data, 1, &mut random);
    while events_since(first) > 10 {
        assert!(Instant::now() < end, "{} events are left", events_since(first));
        thread::yield_now();
    }
    for rank in ranks {
        host().stream_destroy(rank.stream).unwrap();
    }
    set.end(&mut random);
}

/// Leaks 4321 bytes.
pub(crate) fn leaky() {
    host();
    come_and_go(10, &mut Random(SEED));
    // Optimised, what nobody looks at would not be allocated.
    std::mem::forget(std::hint::black_box(Box::new([1_u8; 4321])));
}

/// Counts the proxies of communicators whose children share them, or not.
pub(crate) fn shared() {
    host();
    for (share, proxies) in [(false, [2, 4, 2, 0]), (true, [2, 2, 2, 0])] {
        let count = || Holdings::now().0.get("thread rs-proxy").copied().unwrap_or(0);
        let settles_at = |expected: usize| {
            let end = Instant::now() + Duration::from_secs(10);
            while count() != expected {
                assert!(Instant::now() < end, "{} proxies, not {expected}", count());
                thread::yield_now();
            }
        };
        let parent = Set::new(2, share);
        settles_at(proxies[0]);
        let mut child = Set {
            ranks: vec![Handle(0); 2],
            revoked: false,
        };
        group(|| {
            for (comm, child) in parent.ranks.iter().zip(&mut child.ranks) {
                // SAFETY: a valid place until the group has ended.
                ok(unsafe { abi::ncclCommSplit(*comm, 0, 0, child, null_mut()) });
            }
        });
        settles_at(proxies[1]);
        let descriptors = || {
            Holdings::now()
                .0
                .get("descriptor of /memfd:ringsight-fifo")
                .copied()
        };
        let before = descriptors();
        parent.all_reduce();
        child.all_reduce();
        for comm in parent.ranks {
            // SAFETY: a live communicator.
            ok(unsafe { abi::ncclCommDestroy(comm) });
        }
        settles_at(proxies[2]);
        assert!(
            descriptors() < before,
            "the parent's connections are gone: {:?} of {before:?}",
            descriptors()
        );
        child.all_reduce();
        for comm in child.ranks {
            // SAFETY: a live communicator.
            ok(unsafe { abi::ncclCommDestroy(comm) });
        }
        settles_at(proxies[3]);
    }
}
