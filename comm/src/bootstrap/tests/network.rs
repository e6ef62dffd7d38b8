//! Messages, collective calls and deaths, once the ranks know each other.

use std::{
    collections::HashMap,
    sync::{Barrier, mpsc},
    time::Instant,
};

use super::*;

#[test]
fn ranks_gather_in_rank_order_whatever_their_number() {
    for ranks in [1, 2, 3, 4, 5, 7, 8, 13, 64] {
        let part = |rank: u32| vec![rank as u8; rank as usize * 3 % 17];
        let expected: Vec<_> = (0..ranks).map(part).collect();
        for gathered in all(&root(), ranks, |bootstrap| {
            let gathered = bootstrap.all_gather(&part(bootstrap.rank())).unwrap();
            bootstrap.barrier().unwrap();
            gathered
        }) {
            assert_eq!(gathered, expected);
        }
    }
}

#[test]
fn messages_arrive_in_order_by_peer_and_tag() {
    all(&root(), 4, |bootstrap| {
        let rank = bootstrap.rank();
        for peer in 0..4 {
            for i in 0..50u32 {
                bootstrap
                    .send(peer, i % 3, &[rank, peer, i].map(u32::to_le_bytes).concat())
                    .unwrap();
            }
            bootstrap.send(peer, 9, &vec![rank as u8; 3 << 20]).unwrap();
        }
        for peer in (0..4).rev() {
            assert_eq!(bootstrap.recv(peer, 9).unwrap(), vec![peer as u8; 3 << 20]);
            for tag in (0..3).rev() {
                for i in (tag..50).step_by(3) {
                    let expected = [peer, rank, i].map(u32::to_le_bytes).concat();
                    assert_eq!(bootstrap.recv(peer, tag).unwrap(), expected);
                }
            }
        }
        bootstrap.barrier().unwrap();
    });
}

#[test]
fn a_rank_that_leaves_is_named_by_all_who_wait() {
    // Rank 2 leaves; the others wait for different ranks, directly or in a collective.
    let errors = all(&root(), 5, |bootstrap| {
        bootstrap.barrier().unwrap();
        if bootstrap.rank() == 2 {
            return None;
        }
        bootstrap.barrier().err()
    });
    for (rank, error) in errors.into_iter().enumerate() {
        match error {
            Some(Error::PeerLost { rank: culprit, text }) => assert_eq!(culprit, 2, "rank {rank}: {text}"),
            other => assert!(rank == 2 && other.is_none(), "rank {rank}: {other:?}"),
        }
    }
}

#[test]
fn the_abort_word_releases_every_wait() {
    let id = root();
    let (ready, is_ready) = mpsc::channel();
    let aborts: Vec<Arc<AbortWord>> = (0..3).map(|_| Arc::default()).collect();
    thread::scope(|scope| {
        let (id, aborts) = (&id, &aborts);
        let waits: Vec<_> = (0..3)
            .map(|rank| {
                let ready = ready.clone();
                scope.spawn(move || {
                    let bootstrap =
                        Bootstrap::init(id, rank, 3, Arc::clone(&aborts[rank as usize]), LONG).unwrap();
                    bootstrap.barrier().unwrap();
                    ready.send(()).unwrap();
                    (
                        bootstrap.recv((rank + 1) % 3, 5).unwrap_err(),
                        Instant::now(),
                        bootstrap,
                    )
                })
            })
            .collect();
        for _ in 0..3 {
            is_ready.recv().unwrap();
        }
        let set = Instant::now();
        for abort in aborts {
            abort.set();
        }
        for wait in waits {
            let (error, released, _keep) = wait.join().unwrap();
            assert!(matches!(error, Error::Aborted(_)), "{error}");
            assert!(released - set < RELEASED, "{:?}", released - set);
        }
    });
}

/// Losses as a rank's callback sees them.
fn losses(bootstrap: &Bootstrap) -> mpsc::Receiver<(u32, String)> {
    let (tell, told) = mpsc::channel();
    bootstrap.on_lost(Arc::new(move |rank, text| {
        let _ = tell.send((rank, text.to_owned()));
    }));
    told
}

/// Ends a rank as a killed process would: no goodbye.
fn kill(bootstrap: Bootstrap) {
    bootstrap.shared.forget_goodbye();
    drop(bootstrap);
}

#[test]
fn every_rank_hears_of_every_death_once() {
    let ranks = 16;
    // The root of the tree, a chain of three, and leaves; the survivors have no way to each other but new connections.
    let dead = [0, 1, 3, 5, 12];
    let start = Barrier::new(ranks as usize);
    all(&root(), ranks, |bootstrap| {
        let told = losses(&bootstrap);
        bootstrap.barrier().unwrap();
        start.wait();
        let begin = Instant::now();
        if dead.contains(&bootstrap.rank()) {
            return kill(bootstrap);
        }
        let mut heard: Vec<u32> = dead.iter().map(|_| told.recv_timeout(LONG).unwrap().0).collect();
        let taken = begin.elapsed();
        heard.sort_unstable();
        assert_eq!(heard, dead);
        assert!(taken < Duration::from_secs(1), "{taken:?}");
        let alive: Vec<u32> = (0..ranks).filter(|rank| !dead.contains(rank)).collect();
        let error = bootstrap.barrier().unwrap_err();
        assert!(
            matches!(error, Error::PeerLost { rank, .. } if dead.contains(&rank)),
            "{error}"
        );
        let parts = bootstrap
            .gather_among(&alive, 1, &[bootstrap.rank() as u8])
            .unwrap();
        assert_eq!(
            parts,
            alive.iter().map(|rank| vec![*rank as u8]).collect::<Vec<_>>()
        );
        assert!(told.try_recv().is_err(), "a death was told twice");
    });
}

/// Whoever waited for it has tried to connect to it before the end of the connection that there was has been seen.
#[test]
fn a_rank_that_cannot_be_reached_is_what_its_connection_says_at_its_end() {
    for (dies, says) in [(true, "its process ended"), (false, "has left")] {
        all(&root(), 2, |bootstrap| {
            let lost = losses(&bootstrap);
            bootstrap.barrier().unwrap();
            if bootstrap.rank() == 1 {
                bootstrap.recv(0, 1).unwrap();
                return if dies { kill(bootstrap) } else { drop(bootstrap) };
            }
            let text = "rank 1 cannot be reached".to_owned();
            bootstrap.shared.state().cannot_reach(1, text);
            bootstrap.send(1, 1, &[]).unwrap();
            if dies {
                let (rank, text) = lost.recv_timeout(LONG).unwrap();
                assert!(rank == 1 && text.contains(says), "{text}");
            } else {
                // Its goodbye has been read.
                while !bootstrap.shared.state().has_end(1) {
                    thread::yield_now();
                }
            }
            let error = bootstrap.recv(1, 2).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        });
    }
}

#[test]
fn a_goodbye_is_no_death() {
    let start = Barrier::new(7);
    let end = Barrier::new(7);
    all(&root(), 7, |bootstrap| {
        let told = losses(&bootstrap);
        bootstrap.barrier().unwrap();
        start.wait();
        if bootstrap.rank() % 2 == 0 {
            bootstrap.leave(bootstrap.rank() == 4);
            drop(bootstrap);
            end.wait();
            return;
        }
        // Rank 0 has left: found by the goodbye or by connecting, but never called dead.
        let error = bootstrap.recv(0, 0).unwrap_err();
        assert!(
            matches!(
                error,
                Error::PeerLost {
                    rank: 0 | 2 | 4 | 6,
                    ..
                }
            ),
            "{error}"
        );
        end.wait();
        assert!(told.try_recv().is_err());
    });
}

/// A question that goes from rank to rank may come to a rank that has left, whose answer opens a connection.
#[test]
fn who_answers_after_its_goodbye_is_not_dead() {
    let (left, end) = (Barrier::new(7), Barrier::new(7));
    all(&root(), 7, |bootstrap| {
        let told = losses(&bootstrap);
        let (tell, answers) = mpsc::channel();
        bootstrap.on_control(Arc::new(move |from, _: &[u8]| {
            let _ = tell.send(from);
        }));
        bootstrap.barrier().unwrap();
        if bootstrap.rank() == 0 {
            bootstrap.leave(false);
            // Rank 6 is below another one.
            bootstrap.post_control(6, b"here").unwrap();
            drop(bootstrap);
            left.wait();
            end.wait();
            return;
        }
        left.wait();
        let is_asker = bootstrap.rank() == 6;
        let answer = is_asker.then(|| answers.recv_timeout(LONG));
        // Until its end is seen.
        while is_asker && bootstrap.post_control(0, b"again").is_ok() {
            thread::yield_now();
        }
        // Before anything is asserted: who panics would leave the others here.
        end.wait();
        assert_eq!(answer.unwrap_or(Ok(0)), Ok(0));
        assert!(told.try_recv().is_err(), "it was taken for dead");
    });
}

#[test]
fn a_goodbye_is_heard_by_who_connects_meanwhile() {
    for _ in 0..20 {
        let ranks = 7;
        let (start, end) = (Barrier::new(ranks as usize), Barrier::new(ranks as usize));
        all(&root(), ranks, |bootstrap| {
            let told = losses(&bootstrap);
            bootstrap.barrier().unwrap();
            start.wait();
            if bootstrap.rank() == 0 {
                drop(bootstrap);
                end.wait();
                return;
            }
            // Those below the others have no connection to it yet, and open one until they find that it is gone.
            while bootstrap.post_control(0, b"where are you?").is_ok() {
                thread::yield_now();
            }
            // By then service threads have told what they know.
            let others: Vec<u32> = (1..ranks).collect();
            let gathered = bootstrap.gather_among(&others, 1, &[]);
            // Before anything is asserted: who panics would leave the others here.
            end.wait();
            gathered.unwrap();
            assert!(told.try_recv().is_err());
        });
    }
}

#[test]
fn control_messages_come_in_order_also_to_oneself_and_after_an_abort() {
    let ranks = 9;
    let end = Barrier::new(ranks as usize);
    all(&root(), ranks, |bootstrap| {
        bootstrap.shared.abort.set();
        for number in 0..50u8 {
            for peer in 0..ranks {
                bootstrap.post_control(peer, &[number]).unwrap();
            }
            bootstrap.post_control_to_all(&[b'a', number]).unwrap();
        }
        let (tell, told) = mpsc::channel();
        bootstrap.on_control(Arc::new(move |from, data: &[u8]| {
            let _ = tell.send((from, data.to_vec()));
        }));
        let mut heard: HashMap<u32, (Vec<u8>, Vec<u8>)> = HashMap::new();
        for _ in 0..50 * ranks + 50 * (ranks - 1) {
            let (from, data) = told.recv_timeout(LONG).unwrap();
            let (direct, spread) = heard.entry(from).or_default();
            match *data {
                [number] => direct.push(number),
                [b'a', number] => spread.push(number),
                _ => panic!("{data:?}"),
            }
        }
        let counted: Vec<u8> = (0..50).collect();
        for (from, (direct, mut spread)) in heard {
            spread.sort_unstable();
            assert_eq!(direct, counted);
            assert_eq!(
                spread,
                if from == bootstrap.rank() {
                    vec![]
                } else {
                    counted.clone()
                }
            );
        }
        // Everyone has heard everything before anyone leaves.
        end.wait();
    });
}

#[test]
fn a_child_is_made_of_survivors_whatever_the_parent_is_in() {
    let ranks = 8;
    let start = Barrier::new(ranks as usize);
    all(&root(), ranks, |bootstrap| {
        bootstrap.barrier().unwrap();
        start.wait();
        if [0, 3].contains(&bootstrap.rank()) {
            return kill(bootstrap);
        }
        bootstrap.shared.abort.set();
        let members = [7, 1, 6, 2, 4];
        if bootstrap.rank() == 5 {
            let error = bootstrap.child(&members, 3, Arc::default(), LONG).err().unwrap();
            assert!(error.to_string().contains("this rank (5) among them"), "{error}");
            return;
        }
        let (first, second) = (
            bootstrap.child(&members, 3, Arc::default(), LONG).unwrap(),
            bootstrap.child(&members, 4, Arc::default(), LONG).unwrap(),
        );
        assert_eq!(members[first.rank() as usize], bootstrap.rank());
        assert_ne!(first.cookie(), second.cookie());
        drop(bootstrap);
        for child in [first, second] {
            let parts = child.all_gather(&[child.rank() as u8]).unwrap();
            assert_eq!(parts, (0..5).map(|rank| vec![rank]).collect::<Vec<_>>());
        }
    });
}

#[test]
fn every_rank_names_the_one_that_does_not_come() {
    // Long beside what a busy machine keeps a rank from sending.
    const LIMIT: Duration = Duration::from_secs(4);
    fn without(absent: u32) {
        let (id, ranks) = (root(), 7);
        let (start, end) = (Barrier::new(ranks as usize), Barrier::new(ranks as usize));
        thread::scope(|scope| {
            for rank in 0..ranks {
                let (start, end) = (&start, &end);
                scope.spawn(move || {
                    let bootstrap = join_patiently(&id, rank, ranks, LIMIT);
                    start.wait();
                    let text = (rank != absent).then(|| bootstrap.barrier().unwrap_err().to_string());
                    // Before anything is asserted: who panics would leave the others here.
                    end.wait();
                    if let Some(text) = text {
                        assert!(
                            text.contains(&format!("rank {absent} sent nothing for 4s")),
                            "rank {rank}: {text}"
                        );
                    }
                });
            }
        });
    }
    // An inner one of the tree, a leaf and the root of it; who waits for it are its neighbours alone.
    thread::scope(|scope| {
        for absent in [1, 6, 0] {
            scope.spawn(move || without(absent));
        }
    });
}
