//! What a rank that is broken, or somebody who knows its secret, can do to the others.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    sync::mpsc,
    thread,
};

use super::{
    super::{
        frame::{Frame, FrameReader},
        wire::{Hello, Joining, Upward},
    },
    *,
};

/// A network of two ranks, of which `body` gets rank 0's end, and the place and the secret by which others connect to it.
fn with_rank_0<T: Send>(body: impl Fn(Bootstrap, SocketAddr) -> T + Sync) -> T {
    let (done, is_done) = mpsc::channel::<()>();
    let is_done = Mutex::new(is_done);
    let done = Mutex::new(Some(done));
    let mut results = all(&root(), 2, |bootstrap| {
        if bootstrap.rank() == 1 {
            // There until rank 0 is done.
            let _ = is_done.lock().unwrap().recv();
            return None;
        }
        let address = bootstrap.shared.table[0];
        let result = body(bootstrap, address);
        drop(done.lock().unwrap().take());
        Some(result)
    });
    results.swap_remove(0).unwrap()
}

/// A connection to rank 0 as rank 1 opens it.
fn as_rank_1(bootstrap: &Bootstrap, address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    let hello = Hello::Peer { from: 1, to: 0 };
    stream.write_all(&hello.encode(bootstrap.cookie())).unwrap();
    stream
}

/// The next frame of a stream; `None` at its end.
fn next_frame(stream: &mut TcpStream) -> Option<Frame> {
    let mut reader = FrameReader::default();
    loop {
        if let Some(frame) = reader.next().unwrap() {
            return Some(frame);
        }
        let mut byte = [0];
        if stream.read(&mut byte).unwrap() == 0 {
            return None;
        }
        reader.push(&byte);
    }
}

#[test]
fn a_rank_has_so_many_connections_and_no_more() {
    with_rank_0(|bootstrap, address| {
        let streams: Vec<TcpStream> = (0..40).map(|_| as_rank_1(&bootstrap, address)).collect();
        // Those that are taken say nothing; the others say why they are not.
        let refused = streams.into_iter().map(|mut stream| {
            stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            let mut first = [0];
            let is_silent = stream.peek(&mut first).is_err();
            (!is_silent).then(|| next_frame(&mut stream)).flatten()
        });
        let refused: Vec<Frame> = refused.flatten().collect();
        assert!(refused.len() >= 40 - 8, "{} of 40 are refused", refused.len());
        for frame in refused {
            let Frame::Refused { text } = frame else {
                panic!("{frame:?}");
            };
            assert!(
                text.contains("rank 1 has 8 connections to rank 0 already"),
                "{text}"
            );
        }
    });
}

#[test]
fn messages_that_nobody_asked_for_end_the_connection() {
    with_rank_0(|bootstrap, address| {
        let mut stream = as_rank_1(&bootstrap, address);
        let message = Frame::Data {
            tag: 9,
            data: Vec::new(),
        };
        // As many as fill the room by their number alone.
        let many = message.encode().repeat(4096);
        let mut sent = 0_u64;
        while stream.write_all(&many).is_ok() {
            sent += 4096;
            assert!(sent < 16 << 20, "{sent} messages are taken and kept");
        }
        assert!(sent >= 1 << 19, "only {sent} messages");
        // The communicator's own connection to rank 1 is another one.
        bootstrap.send(1, 0, b"still there").unwrap();
    });
}

#[test]
fn control_messages_to_a_rank_that_reads_nothing_are_bounded() {
    const MIB: usize = 1 << 20;
    let (stopped, is_stopped) = mpsc::channel::<()>();
    let (go, may_go) = mpsc::channel::<()>();
    let (came, come) = mpsc::channel();
    let id = &root();
    thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let bootstrap = join(id, 1, 2, LONG).unwrap();
            // Its thread stops at the first message, and reads on when it may.
            let may_go = Mutex::new(may_go);
            bootstrap.on_control(Arc::new(move |_, data: &[u8]| {
                if data == b"stop" {
                    stopped.send(()).unwrap();
                    let _ = may_go.lock().unwrap().recv();
                }
                came.send(data.len()).unwrap();
            }));
            let lengths = come.iter().take_while(|length| *length != 3);
            lengths.filter(|length| *length == MIB).count()
        });
        let bootstrap = join(id, 0, 2, LONG).unwrap();
        bootstrap.post_control(1, b"stop").unwrap();
        is_stopped.recv().unwrap();
        let data = vec![7; MIB];
        let posted = (0..200).take_while(|_| bootstrap.post_control(1, &data).is_ok());
        let posted = posted.count();
        assert!((64..100).contains(&posted), "{posted} MiB wait");
        let error = bootstrap.post_control(1, &data).unwrap_err();
        assert!(
            matches!(&error, Error::TimedOut(text) if text.contains("rank 1 reads nothing")),
            "{error}"
        );
        // What is for everybody does not wait for it either.
        for _ in 0..300 {
            bootstrap.post_control_to_all(&data).unwrap();
        }
        drop(go);
        while bootstrap.post_control(1, b"end").is_err() {
            thread::sleep(sys::ABORT_CHECK);
        }
        // By the connection that each may have opened.
        let received = reader.join().unwrap();
        assert!(received <= 2 * posted, "{received} MiB for {posted}");
    });
}

#[test]
fn a_relay_that_reads_nothing_is_left() {
    let id = root();
    let mut stream = TcpStream::connect(id.address).unwrap();
    stream.write_all(&Hello::Relay.encode(id.cookie)).unwrap();
    let joining = Joining {
        rank: 1,
        ranks: 4,
        timeout_ms: 60_000,
        library: crate::observe::LIBRARY_VERSION,
        ids: 7,
        main: (id.cookie, id.address),
        address: id.address,
    };
    // All but the first are refused: each has an answer.
    let many = Upward::Joined(joining).encode().repeat(4096);
    let mut sent = 0;
    while stream.write_all(&many).is_ok() {
        sent += many.len();
        assert!(sent < 256 << 20, "{sent} bytes, and the answers to them wait");
    }
}
