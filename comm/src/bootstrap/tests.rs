use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Barrier, mpsc},
};

use proptest::prelude::*;

use super::{shared::Wait, *};

const SHORT: Duration = Duration::from_millis(400);
const LONG: Duration = Duration::from_secs(30);

fn root() -> UniqueId {
    // On loopback, whatever interfaces the machine has and whatever other tests do to the environment.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let id = UniqueId {
        address,
        cookie: sys::random_u64().unwrap(),
        fixed: false,
    };
    root::start(listener, id).unwrap();
    UniqueId::from_bytes(&id.to_bytes()).unwrap()
}

fn join(id: &UniqueId, rank: u32, ranks: u32, timeout: Duration) -> Result<Bootstrap> {
    Bootstrap::init(id, rank, ranks, Arc::default(), timeout)
}

/// Runs `body` on every rank, each on a thread of its own.
fn all<T: Send>(id: &UniqueId, ranks: u32, body: impl Fn(Bootstrap) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let body = &body;
        let start = move |rank| scope.spawn(move || body(join(id, rank, ranks, LONG).unwrap()));
        let threads: Vec<_> = (0..ranks).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

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
fn rubbish_at_the_port_is_refused_and_the_rendezvous_lives_on() {
    let id = root();
    let mut open = Vec::new();
    let hello = Hello::Join {
        rank: 0,
        ranks: 2,
        timeout_ms: 1000,
        address: id.address,
    };
    let mut old = hello.encode(id.cookie);
    old[4] ^= 0xff; // another version
    let mut truncated = hello.encode(id.cookie);
    truncated.truncate(20);
    let sprays: [&[u8]; 6] = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        &[0xff; 4096],
        &old,
        &hello.encode(id.cookie ^ 1),
        &truncated,
    ];
    for round in 0..60 {
        let mut stream = TcpStream::connect(id.address).unwrap();
        let _ = stream.write_all(sprays[round % sprays.len()]);
        if round % 2 == 0 {
            open.push(stream); // half of them stay
        }
    }
    let gathered = all(&id, 3, |bootstrap| {
        // The ranks' own listeners take rubbish, too.
        for address in &bootstrap.shared.table {
            let mut stream = TcpStream::connect(address).unwrap();
            let _ = stream.write_all(&[0x5a; 300]);
        }
        bootstrap.all_gather(&[bootstrap.rank() as u8]).unwrap()
    });
    assert_eq!(gathered, vec![vec![vec![0], vec![1], vec![2]]; 3]);
}

#[test]
fn the_time_out_names_the_missing_ranks() {
    let id = root();
    let errors = thread::scope(|scope| {
        let threads = [0, 2].map(|rank| scope.spawn(move || join(&id, rank, 6, SHORT).err().unwrap()));
        threads.map(|thread| thread.join().unwrap().to_string())
    });
    assert!(
        errors
            .iter()
            .any(|text| text.contains("4 of 6 ranks did not come within 400ms: rank 1, ranks 3-5")),
        "{errors:?}"
    );
    // Everyone has left; the same id serves a second try.
    assert_eq!(all(&id, 2, |bootstrap| bootstrap.ranks()), [2, 2]);
}

/// A rank that says hello and then only waits.
fn hello(id: &UniqueId, rank: u32, ranks: u32) -> TcpStream {
    let mut stream = TcpStream::connect(id.address).unwrap();
    let hello = Hello::Join {
        rank,
        ranks,
        timeout_ms: 30_000,
        address: id.address,
    };
    stream.write_all(&hello.encode(id.cookie)).unwrap();
    stream
}

fn read_whole_answer(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    Answer::parse(&bytes).unwrap()
}

#[test]
fn a_rank_cannot_come_twice_nor_with_another_number() {
    let id = root();
    let first = hello(&id, 0, 2);
    let another_number = join(&id, 1, 3, LONG).err().unwrap().to_string();
    assert!(
        another_number.contains("rank 1 says 3 ranks, the first that came said 2"),
        "{another_number}"
    );
    let twice = join(&id, 0, 2, LONG).err().unwrap().to_string();
    assert!(twice.contains("two processes use one rank"), "{twice}");
    drop(join(&id, 1, 2, LONG).unwrap());
    assert!(
        matches!(read_whole_answer(first), Answer::Table(table) if table.len() == 2 && table[0] == id.address)
    );
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
fn a_rank_that_leaves_during_the_rendezvous_is_named() {
    let id = root();
    let (leaver, waiter) = (hello(&id, 3, 4), hello(&id, 0, 4));
    // Once a third one is refused, the root has read the two before it.
    assert!(matches!(join(&id, 0, 4, LONG), Err(Error::Protocol(_))));
    drop(leaver);
    assert_eq!(read_whole_answer(waiter), Answer::Lost(3));
}

#[test]
fn what_the_root_says_becomes_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let id = UniqueId {
        address: listener.local_addr().unwrap(),
        cookie: 1,
        fixed: false,
    };
    let told = |bytes: &[u8]| {
        thread::scope(|scope| {
            let rank = scope.spawn(|| join(&id, 1, 4, LONG).err().unwrap());
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 52]).unwrap();
            stream.write_all(bytes).unwrap();
            drop(stream);
            rank.join().unwrap()
        })
    };
    assert!(matches!(
        told(&Answer::Lost(3).encode()),
        Error::PeerLost { rank: 3, .. }
    ));
    assert!(
        matches!(told(&Answer::Refused("so".into()).encode()), Error::Protocol(text) if text.contains("so"))
    );
    assert!(matches!(
        told(&Answer::Table(vec![id.address]).encode()),
        Error::Protocol(_)
    ));
    assert!(matches!(told(&[0xff; 64]), Error::Protocol(text) if text.contains("rubbish")));
    assert!(matches!(told(&[]), Error::Protocol(text) if text.contains("closed")));
}

#[test]
fn the_abort_word_releases_the_rendezvous() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let id = UniqueId {
        address: listener.local_addr().unwrap(),
        cookie: 1,
        fixed: false,
    };
    let abort = Arc::new(AbortWord::default());
    thread::scope(|scope| {
        let rank = scope.spawn(|| {
            let error = Bootstrap::init(&id, 0, 2, Arc::clone(&abort), LONG)
                .err()
                .unwrap();
            (error, Instant::now())
        });
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 52]).unwrap();
        let set = Instant::now();
        abort.set();
        let (error, released) = rank.join().unwrap();
        assert!(matches!(error, Error::Aborted(_)), "{error}");
        assert!(
            released - set < Duration::from_millis(100),
            "{:?}",
            released - set
        );
    });
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
            assert!(
                released - set < Duration::from_millis(100),
                "{:?}",
                released - set
            );
        }
    });
}

#[test]
fn an_ended_root_is_a_clear_error() {
    let id = root();
    all(&id, 2, |bootstrap| bootstrap.barrier().unwrap());
    let text = loop {
        // The root's thread may be about to end.
        match join(&id, 0, 2, SHORT).err().unwrap() {
            Error::Protocol(text) => break text,
            Error::System { .. } => {}
            other => panic!("{other}"),
        }
    };
    assert!(text.contains("root"), "{text}");
}

#[test]
fn ranks_of_a_fixed_address_may_come_before_the_root() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let id = fixed_id(&format!("127.0.0.1:{port}")).unwrap();
    assert_eq!(UniqueId::from_bytes(&id.to_bytes()).unwrap(), id);
    assert_eq!(all(&id, 3, |bootstrap| bootstrap.ranks()), [3; 3]);
    assert!(fixed_id("nowhere").unwrap_err().to_string().contains("host:port"));
}

proptest! {
    #[test]
    fn an_id_survives_and_any_damage_is_found(ip: [u8; 4], six: [u8; 16], is_six: bool, port in 1u16.., cookie: u64, at in 0usize..128, bit in 0u8..8) {
        let address = if is_six { SocketAddr::from((six, port)) } else { SocketAddr::from((ip, port)) };
        let id = UniqueId { address, cookie, fixed: false };
        let mut bytes = id.to_bytes();
        prop_assert_eq!(UniqueId::from_bytes(&bytes).unwrap(), id);
        bytes[at] ^= 1 << bit;
        prop_assert!(UniqueId::from_bytes(&bytes).is_err());
    }
}

#[test]
fn runs_of_ranks_are_written_short() {
    assert_eq!(ranges(&[0, 2, 3, 4, 9]), "rank 0, ranks 2-4, rank 9");
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

#[test]
fn control_messages_come_in_order_also_to_oneself_and_after_an_abort() {
    let ranks = 9;
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
        let members: Vec<u32> = (0..ranks).collect();
        let never = AbortWord::default();
        let wait = Wait {
            abort: &never,
            timeout: LONG,
            needs: None,
        };
        bootstrap.gather(&members, 1, &[], wait).unwrap();
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
