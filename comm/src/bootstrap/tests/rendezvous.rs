//! How ranks find each other, and who is kept out.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Instant,
};

use proptest::prelude::*;

use super::{
    super::{
        rendezvous::ranges,
        wire::{Answer, GaveUp, Hello, Joining},
    },
    *,
};
use crate::observe;

/// What rank `rank` of `ranks` says to the root of `id`.
pub(super) fn joining(id: &UniqueId, rank: u32, ranks: u32) -> Joining {
    Joining {
        rank,
        ranks,
        timeout_ms: 30_000,
        library: observe::LIBRARY_VERSION,
        ids: fnv1a(&UniqueId::public_part(&id.to_bytes())),
        main: (id.cookie, id.address),
        address: id.address,
    }
}

pub(super) fn say(id: &UniqueId, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(id.address).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

/// A rank that says hello and then only waits.
fn hello(id: &UniqueId, rank: u32, ranks: u32) -> TcpStream {
    say(id, &Hello::Join(joining(id, rank, ranks)).encode(id.cookie))
}

/// What the root says in the end, without what it tells in between of who is missing.
pub(super) fn read_whole_answer(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let mut rest = &bytes[..];
    loop {
        let length = wire::word(rest, 4).unwrap() as usize;
        let (answer, behind) = rest.split_at(wire::ANSWER_HEADER + length);
        match Answer::parse(answer).unwrap() {
            Answer::Waiting { .. } => rest = behind,
            answer if behind.is_empty() => return answer,
            answer => panic!("{behind:?} behind {answer:?}"),
        }
    }
}

#[test]
fn strangers_are_told_why_they_are_sent_away() {
    let id = root();
    let ours = Hello::Join(joining(&id, 0, 2)).encode(id.cookie);
    let with = |at: usize, byte: u8| {
        let mut bytes = ours.clone();
        bytes[at] = byte;
        bytes
    };
    let other = Joining {
        library: 1,
        ..joining(&id, 1, 2)
    };
    let waiting = hello(&id, 0, 2);
    for (bytes, why) in [
        (with(0, b'X'), "for the ranks of a communicator"),
        (
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            "for the ranks of a communicator",
        ),
        (with(4, 9), "speaks bootstrap protocol 9, this one 4"),
        (with(6, 9), "cannot be read"),
        (Hello::Peer { from: 0, to: 1 }.encode(id.cookie), "came to a root"),
        (
            Hello::Join(other).encode(id.cookie),
            "rank 1 uses library version 1, rank 0 version",
        ),
        (
            Hello::Join(joining(&id, 3, 2)).encode(id.cookie),
            "rank 3 of 2 is not possible",
        ),
        (
            Hello::Join(Joining {
                ids: 0,
                ..joining(&id, 1, 2)
            })
            .encode(id.cookie),
            "rank 1 was given other unique ids than rank 0",
        ),
    ] {
        match read_whole_answer(say(&id, &bytes)) {
            Answer::Refused(text) => assert!(text.contains(why), "{text:?} instead of {why:?}"),
            other => panic!("{other:?} instead of {why:?}"),
        }
    }
    assert_eq!(read_whole_answer(say(&id, &with(8, !ours[8]))), Answer::Unknown);
    drop(join(&id, 1, 2, LONG).unwrap());
    assert!(matches!(read_whole_answer(waiting), Answer::Table { .. }));
}

/// Connects to `address` again and again, says something random or nothing, and stays or goes. Not without end: a port
/// number that was used is not free again for a minute, and thousands of those make every connect slow. Who is to be disturbed waits at `begun`.
fn spray(address: SocketAddr, seed: u64, likely: &[u8], begun: &Barrier, stop: &AtomicBool) -> u32 {
    let mut random = seed;
    let mut next = |below: usize| {
        // SplitMix64.
        random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % below as u64) as usize
    };
    let (mut open, mut sprayed) = (Vec::new(), 0);
    // Relaxed: nothing else is read by it.
    while sprayed < 150 && !stop.load(Ordering::Relaxed) {
        let connected = TcpStream::connect(address);
        if sprayed == 0 {
            begun.wait();
        }
        let Ok(mut stream) = connected else {
            break; // the root has ended
        };
        sprayed += 1;
        let mut bytes: Vec<u8> = (0..next(200)).map(|_| next(256) as u8).collect();
        if next(2) == 0 {
            // As a rank begins, or nearly.
            bytes = likely[..next(likely.len() + 1)].to_vec();
            if let Some(last) = bytes.last_mut() {
                *last ^= 1 << next(8);
            }
        }
        let _ = stream.write_all(&bytes);
        if next(2) == 0 {
            open.push(stream);
        }
        if open.len() > 100 {
            open.swap_remove(next(100));
        }
    }
    sprayed
}

#[test]
fn random_bytes_at_the_ports_disturb_nobody() {
    for seed in 0..2 {
        let (id, ranks) = (root(), 12);
        let likely = Hello::Join(joining(&id, 0, ranks)).encode(id.cookie ^ 1);
        let peer = Hello::Peer { from: 1, to: 0 }.encode(id.cookie ^ 1);
        let (begun, stop) = (Barrier::new(4), AtomicBool::new(false));
        thread::scope(|scope| {
            let sprayers: Vec<_> = (0..3)
                .map(|number| {
                    scope.spawn({
                        let (likely, begun, stop) = (&likely, &begun, &stop);
                        move || spray(id.address, seed * 10 + number, likely, begun, stop)
                    })
                })
                .collect();
            begun.wait();
            let gathered = all(&id, ranks, |bootstrap| {
                // The ranks' own listeners, too.
                let address = bootstrap.shared.table[((bootstrap.rank() + 1) % ranks) as usize];
                let (begun, end) = (Barrier::new(2), AtomicBool::new(false));
                let parts = thread::scope(|scope| {
                    let sprayer = scope.spawn(|| spray(address, seed, &peer, &begun, &end));
                    begun.wait();
                    let parts: Vec<_> = (0..20u8)
                        .map(|round| bootstrap.all_gather(&[bootstrap.rank() as u8, round]).unwrap())
                        .collect();
                    end.store(true, Ordering::Relaxed);
                    assert!(sprayer.join().unwrap() > 0);
                    parts
                });
                bootstrap.barrier().unwrap();
                parts
            });
            stop.store(true, Ordering::Relaxed);
            for sprayer in sprayers {
                assert!(sprayer.join().unwrap() > 0);
            }
            for parts in gathered {
                for (round, parts) in (0u8..).zip(parts) {
                    assert_eq!(parts, (0..12).map(|rank| vec![rank, round]).collect::<Vec<_>>());
                }
            }
        });
    }
}

#[test]
fn the_time_out_names_the_missing_ranks() {
    let id = root();
    let two = hello(&id, 2, 6);
    let text = join(&id, 0, 6, SHORT).err().unwrap().to_string();
    assert_eq!(text, "4 of 6 ranks did not come within 400ms: rank 1, ranks 3-5");
    // For all, whatever their own time-out: with one rank gone the others would wait in vain.
    let gave_up = GaveUp {
        waiter: 0,
        waited_ms: 400,
        missing: vec![1, 3, 4, 5],
    };
    assert_eq!(read_whole_answer(two), Answer::Missing(gave_up));
    // Who comes now is told so, once, and does not wait.
    let text = join(&id, 4, 6, LONG).err().unwrap().to_string();
    assert_eq!(
        text,
        "rank 4 came too late: rank 0 had given up after 400ms, when 4 of 6 ranks had not come: rank 1, ranks 3-5"
    );
    // The same id serves a second try, also in another number.
    let text = join(&id, 4, 6, SHORT).err().unwrap().to_string();
    assert!(text.contains("5 of 6 ranks did not come"), "{text}");
    assert_eq!(all(&id, 2, |bootstrap| bootstrap.ranks()), [2, 2]);
}

/// The root keeps its address while it has ranks to tell that they are late, and serves the second try there.
#[test]
fn a_fixed_address_serves_a_second_try() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let id = fixed_id(&format!("127.0.0.1:{port}")).unwrap();
    for _ in 0..2 {
        let text = join(&id, 0, 3, SHORT).err().unwrap().to_string();
        assert_eq!(text, "2 of 3 ranks did not come within 400ms: ranks 1-2");
    }
    assert_eq!(all(&id, 2, |bootstrap| bootstrap.ranks()), [2, 2]);
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
        matches!(read_whole_answer(first), Answer::Table { addresses, .. } if addresses.len() == 2 && addresses[0] == id.address)
    );
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
        name: 0,
        cookie: 1,
        fixed: false,
    };
    let told = |bytes: &[u8]| {
        thread::scope(|scope| {
            let rank = scope.spawn(|| join(&id, 1, 4, LONG).err().unwrap());
            // Dropped without a word, as among too many undecided connections: the rank tries again.
            drop(listener.accept().unwrap());
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 96]).unwrap();
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
        told(
            &Answer::Table {
                secret: 1,
                addresses: vec![id.address]
            }
            .encode()
        ),
        Error::Protocol(_)
    ));
    assert!(matches!(told(&[0xff; 64]), Error::Protocol(text) if text.contains("rubbish")));
    assert!(matches!(told(&[1, 0]), Error::Protocol(text) if text.contains("closed")));
    // The root's process is killed.
    let waiting = Answer::Waiting {
        missing: 3,
        first: vec![2, 3],
    };
    let text = told(&waiting.encode()).to_string();
    assert!(
        text.contains("the process that made the unique id is gone; missing were ranks 2-3 and 1 more"),
        "{text}"
    );
    let refused = [waiting.encode(), Answer::Refused("so".into()).encode()].concat();
    assert!(told(&refused).to_string().contains("so; missing were ranks 2-3"));
}

#[test]
fn the_abort_word_releases_the_rendezvous() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let id = UniqueId {
        address: listener.local_addr().unwrap(),
        name: 0,
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
        stream.read_exact(&mut [0; 96]).unwrap();
        let set = Instant::now();
        abort.set();
        let (error, released) = rank.join().unwrap();
        assert!(matches!(error, Error::Aborted(_)), "{error}");
        assert!(released - set < RELEASED, "{:?}", released - set);
    });
}

#[test]
fn an_id_that_has_been_used_is_a_clear_error() {
    let id = root();
    all(&id, 2, |bootstrap| bootstrap.barrier().unwrap());
    // Other tests' ids may keep the root's thread, or not.
    let text = join(&id, 0, 2, LONG).err().unwrap().to_string();
    assert!(text.contains("has been used already"), "{text}");
}

#[test]
fn ranks_of_a_fixed_address_may_come_before_the_root() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let id = fixed_id(&format!("127.0.0.1:{port}")).unwrap();
    assert_eq!(UniqueId::from_bytes(&id.to_bytes()).unwrap(), id);
    assert_eq!(all(&id, 3, |bootstrap| bootstrap.ranks()), [3; 3]);
    assert_eq!(
        fixed_id("[::1]:4711").unwrap().address,
        "[::1]:4711".parse().unwrap()
    );
    assert!(fixed_id("::1").is_err() && fixed_id("127.0.0.1:0").is_err());
    assert!(fixed_id("nowhere").unwrap_err().to_string().contains("host:port"));
}

#[test]
fn a_link_local_address_keeps_its_scope() {
    // Every machine has this interface, with index 1.
    for text in ["[fe80::7%lo]:4711", "[fe80::7%1]:4711"] {
        let id = fixed_id(text).unwrap();
        assert_eq!(id.address.to_string(), "[fe80::7%1]:4711");
        // On another host the interface has another name and another number.
        let other = UniqueId {
            address: "[fe80::7%3]:4711".parse().unwrap(),
            ..id
        };
        let public = |id: UniqueId| UniqueId::public_part(&id.to_bytes());
        assert_eq!(public(id), public(other));
    }
    assert_eq!(
        fixed_id("[fe80::7%lo]:4711").unwrap(),
        fixed_id("[fe80::7%1]:4711").unwrap()
    );
    for (text, why) in [
        ("[fe80::7]:4711", "fe80::7 is link-local, and names no interface"),
        ("[fe80::7%none]:4711", "there is no interface none"),
        ("[fe80::7%lo]:0", "port 0"),
        ("[fe80::7%lo]:x", "x is no port"),
        ("[10.0.0.1]:1", "10.0.0.1 is no IPv6 address"),
    ] {
        let error = fixed_id(text).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

/// `NCCL_COMM_ID` is no secret: whoever knows it, and comes after the ranks, is none of them.
#[test]
fn who_knows_the_fixed_id_alone_is_sent_away_by_the_ranks() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let text = format!("127.0.0.1:{}", free.local_addr().unwrap().port());
    drop(free);
    let id = fixed_id(&text).unwrap();
    let told = all(&id, 2, |bootstrap| {
        let hello = Hello::Peer {
            from: 1 - bootstrap.rank(),
            to: bootstrap.rank(),
        };
        let mut stream = TcpStream::connect(bootstrap.shared.table[bootstrap.rank() as usize]).unwrap();
        stream.write_all(&hello.encode(id.cookie)).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        bootstrap.barrier().unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    });
    for answer in told {
        assert!(answer.contains("of another communicator"), "{answer:?}");
    }
}

proptest! {
    #[test]
    fn an_id_survives_and_any_damage_is_found(ip: [u8; 4], six: [u8; 16], is_six: bool, port in 1u16.., cookie: u64, at in 0usize..128, bit in 0u8..8) {
        let address = if is_six { SocketAddr::from((six, port)) } else { SocketAddr::from((ip, port)) };
        let id = UniqueId { address, name: 0, cookie, fixed: false };
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
