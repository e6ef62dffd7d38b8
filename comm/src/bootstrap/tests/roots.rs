//! Several roots for one communicator, and many ids of one process.

use std::{net::TcpStream, thread, time::Instant};

use super::{
    super::wire::{Answer, GaveUp, Hello, Joining},
    rendezvous::{joining, read_whole_answer, say},
    *,
};

/// A root with a thread and a port of its own, as in another process.
fn separate_root() -> UniqueId {
    let listener = listen_at(([127, 0, 0, 1], 0).into()).unwrap();
    let id = UniqueId {
        address: listener.local_addr().unwrap(),
        name: sys::random_u64().unwrap(),
        cookie: sys::random_u64().unwrap(),
        fixed: false,
    };
    root::serve(listener, id.cookie).unwrap();
    id
}

fn join_scalable(ids: &[UniqueId], rank: u32, ranks: u32, timeout: Duration) -> Result<Bootstrap> {
    Bootstrap::init_scalable(ids, rank, ranks, Arc::default(), timeout)
}

/// A rank that says hello to its root and then only waits.
fn hello(ids: &[UniqueId], rank: u32, ranks: u32) -> TcpStream {
    let all = ids.iter().flat_map(|id| UniqueId::public_part(&id.to_bytes()));
    let all: Vec<u8> = all.collect();
    let id = &ids[root_of(rank, ranks, ids.len() as u32) as usize];
    let joining = Joining {
        ids: fnv1a(&all),
        main: (ids[0].cookie, ids[0].address),
        ..joining(id, rank, ranks)
    };
    let stream = say(id, &Hello::Join(joining).encode(id.cookie));
    // Once another one is refused, this one has come.
    let text = join_scalable(ids, rank, ranks, LONG).err().unwrap().to_string();
    assert!(text.contains("two processes use one rank"), "{text}");
    stream
}

#[test]
fn ranks_are_spread_over_roots_as_nccl_spreads_them() {
    let spread = |ranks, roots| {
        (0..ranks)
            .map(|rank| root_of(rank, ranks, roots))
            .collect::<Vec<_>>()
    };
    assert_eq!(spread(7, 3), [0, 0, 0, 1, 1, 2, 2]);
    assert_eq!(spread(8, 3), [0, 0, 0, 1, 1, 1, 2, 2]);
    assert_eq!(spread(4, 4), [0, 1, 2, 3]);
    assert_eq!(spread(5, 1), [0; 5]);
}

#[test]
fn any_number_of_roots_makes_one_network() {
    for (ranks, roots) in [(1, 1), (2, 2), (5, 2), (7, 3), (9, 9), (24, 5)] {
        // Roots of one process and of several.
        let ids: Vec<UniqueId> = (0..roots)
            .map(|number| if number % 2 == 0 { root() } else { separate_root() })
            .collect();
        thread::scope(|scope| {
            for rank in 0..ranks {
                let ids = &ids;
                scope.spawn(move || {
                    let bootstrap = join_scalable(ids, rank, ranks, LONG).unwrap();
                    let parts = bootstrap.all_gather(&rank.to_le_bytes()).unwrap();
                    let expected: Vec<_> = (0..ranks).map(|rank| rank.to_le_bytes().to_vec()).collect();
                    assert_eq!(parts, expected);
                });
            }
        });
    }
}

#[test]
fn the_time_out_names_the_missing_ranks_of_every_root() {
    let ids: Vec<UniqueId> = (0..3).map(|_| separate_root()).collect();
    // Ranks 0-3, 4-6 and 7-9; of the last nobody comes.
    let waiting = [0, 1, 3, 6].map(|rank| hello(&ids, rank, 10));
    let text = join_scalable(&ids, 4, 10, SHORT).err().unwrap().to_string();
    assert_eq!(
        text,
        "5 of 10 ranks did not come within 400ms: rank 2, rank 5, ranks 7-9"
    );
    for stream in waiting {
        assert!(
            matches!(read_whole_answer(stream), Answer::Missing(GaveUp { waiter: 4, waited_ms: 400, missing }) if missing == [2, 5, 7, 8, 9])
        );
    }
    for late in [9, 2] {
        let text = join_scalable(&ids, late, 10, LONG).err().unwrap().to_string();
        assert!(text.contains("too late: rank 4 had given up"), "{text}");
    }
    // The ids serve a second try, in another number.
    thread::scope(|scope| {
        for rank in 0..3 {
            let ids = &ids;
            scope.spawn(move || join_scalable(ids, rank, 3, LONG).unwrap());
        }
    });
}

#[test]
fn a_rank_that_leaves_one_root_is_named_at_the_others() {
    let ids: Vec<UniqueId> = (0..2).map(|_| separate_root()).collect();
    let (leaver, waiter) = (hello(&ids, 3, 4), hello(&ids, 0, 4));
    drop(leaver);
    assert_eq!(read_whole_answer(waiter), Answer::Lost(3));
}

#[test]
fn a_main_root_that_is_gone_is_named() {
    let gone = separate_root();
    assert!(join(&gone, 0, 1, LONG).is_ok());
    // Its port is closed once its thread has ended.
    let deadline = Instant::now() + LONG;
    while TcpStream::connect(gone.address).is_ok() {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
    let ids = [gone, separate_root()];
    let text = join_scalable(&ids, 1, 2, LONG).err().unwrap().to_string();
    assert!(
        text.contains("the root of the first unique id") && text.contains("cannot be reached"),
        "{text}"
    );
}

#[test]
fn ranks_with_other_ids_or_too_many_are_refused() {
    let ids: Vec<UniqueId> = (0..3).map(|_| separate_root()).collect();
    let text = join_scalable(&ids, 0, 2, SHORT).err().unwrap().to_string();
    assert!(text.contains("3 unique ids for 2 ranks"), "{text}");
    assert!(join_scalable(&[], 0, 2, SHORT).is_err());
    let swapped = [ids[1], ids[0]];
    let texts = thread::scope(|scope| {
        let threads = [(&ids[..2], 0), (&swapped[..], 1)].map(|(ids, rank)| {
            scope.spawn(move || join_scalable(ids, rank, 4, SHORT).err().unwrap().to_string())
        });
        threads.map(|thread| thread.join().unwrap())
    });
    assert!(
        texts
            .iter()
            .all(|text| text.contains("order") || text.contains("did not come")),
        "{texts:?}"
    );
}

#[test]
fn ids_of_one_process_share_one_root_and_ids_may_stay_unused() {
    let ids: Vec<UniqueId> = (0..100).map(|_| root()).collect();
    assert!(ids.iter().all(|id| id.address == ids[0].address));
    for id in ids.iter().skip(90) {
        assert_eq!(all(id, 2, |bootstrap| bootstrap.ranks()), [2, 2]);
    }
}
