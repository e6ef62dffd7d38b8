//! The thread that writes lines, since a write blocks for as long as nobody reads a pipe.
//!
//! Whoever says something waits until it is written, so that it is there even if the process ends right after: but not for
//! long, and not at all while lines wait that others have waited for in vain. So nothing that a thread of the library does
//! is held up by who reads the log. Lines for which there is no more room are counted, and the count is said once the rest
//! is written.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::settings::Sink;
use crate::{
    fork::PerProcess,
    sync::{AtLeastOnce, lock},
};

/// How long a write may take that somebody waits for.
const PATIENCE: Duration = Duration::from_millis(250);
/// How long somebody waits at most: a machine that is busy may keep the thread from writing at all. Also how long a process
/// that ends waits for the lines that wait.
const LIMIT: Duration = Duration::from_secs(1);
/// How many bytes wait. Half of it is for warnings and reports alone.
const ROOM: usize = 256 << 10;
/// How long the thread stays when there is nothing to write.
const LINGER: Duration = Duration::from_secs(1);

static CURRENT: PerProcess<Arc<Writer>> = PerProcess::new();

/// Has lines written; of what is said `urgently` more may wait than of the rest.
pub(super) fn write(sink: &Arc<Sink>, lines: String, urgently: bool) {
    static AT_END: AtLeastOnce = AtLeastOnce::new();
    // SAFETY: registers a function that takes nothing and does not unwind.
    AT_END.call(|| unsafe {
        libc::atexit(finish);
    });
    CURRENT.get().write(sink, lines, urgently);
}

/// Lets what waits be written when the process ends in good order.
extern "C" fn finish() {
    let writer = CURRENT.get();
    let end = Instant::now() + LIMIT;
    // Whoever ends the process in a signal handler may hold the lock itself.
    loop {
        if let Ok(queue) = writer.queue.try_lock() {
            let last = queue.said;
            // Also for a line that nobody has read for long: whoever reads may begin only now.
            drop(writer.wait(queue, last, None));
            return;
        }
        if Instant::now() >= end {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Lines on their way.
#[derive(Default)]
struct Writer {
    queue: Mutex<Queue>,
    /// Told when there is something to write.
    filled: Condvar,
    /// Told when something has been written.
    drained: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<(Arc<Sink>, String)>,
    /// Of what waits, and of what is being written.
    bytes: usize,
    /// How many have been put in and written, ever.
    said: u64,
    written: u64,
    /// When what is being written was begun with.
    writing: Option<Instant>,
    /// Somebody has waited in vain, and lines wait since.
    is_stuck: bool,
    /// For which there was no room.
    lost: u64,
    has_thread: bool,
}

impl Writer {
    fn write(self: &Arc<Self>, sink: &Arc<Sink>, lines: String, urgently: bool) {
        let mut queue = lock(&self.queue);
        let room = if urgently { ROOM } else { ROOM / 2 };
        // What is longer than all the room is written if nothing else waits.
        if queue.bytes > 0 && queue.bytes + lines.len() > room {
            queue.lost += lines.lines().count() as u64;
            return;
        }
        queue.bytes += lines.len();
        queue.waiting.push_back((sink.clone(), lines));
        queue.said += 1;
        if !queue.has_thread {
            let writer = self.clone();
            let started = thread::Builder::new()
                .name("rs-log".into())
                .stack_size(128 << 10)
                .spawn(move || writer.run());
            queue.has_thread = started.is_ok();
            if started.is_err() {
                // A process that can have no thread says why. Not under the lock: nobody else is held up.
                let waiting = std::mem::take(&mut queue.waiting);
                for (_, lines) in &waiting {
                    queue.is_done(lines);
                }
                drop(queue);
                for (sink, lines) in waiting {
                    sink.write(&lines);
                }
                return;
            }
        }
        self.filled.notify_one();
        if !queue.is_stuck {
            let own = queue.said;
            let mut queue = self.wait(queue, own, Some(PATIENCE));
            queue.is_stuck |= queue.written < own;
        }
    }

    /// Waits until so many have been written, unless one takes longer than `patience`, but no longer than [`LIMIT`].
    fn wait<'a>(
        &self,
        mut queue: MutexGuard<'a, Queue>,
        until: u64,
        patience: Option<Duration>,
    ) -> MutexGuard<'a, Queue> {
        let end = Instant::now() + LIMIT;
        while queue.written < until {
            let now = Instant::now();
            let over = patience.map_or(end, |patience| queue.writing.unwrap_or(now) + patience);
            let left = over.min(end).saturating_duration_since(now);
            if left.is_zero() {
                break;
            }
            queue = self
                .drained
                .wait_timeout(queue, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        queue
    }

    /// Writes until there has been nothing to write for a while.
    fn run(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some((sink, lines)) = queue.waiting.pop_front() {
                // Said last of all, once there is somebody who reads.
                let lost = match queue.waiting.len() {
                    0 => std::mem::take(&mut queue.lost),
                    _ => 0,
                };
                queue.writing = Some(Instant::now());
                drop(queue);
                sink.write(&lines);
                if lost > 0 {
                    sink.write(&super::lost(lost));
                }
                queue = lock(&self.queue);
                queue.is_done(&lines);
                self.drained.notify_all();
                continue;
            }
            let (next, waited) = self
                .filled
                .wait_timeout_while(queue, LINGER, |queue| queue.waiting.is_empty())
                .unwrap_or_else(PoisonError::into_inner);
            queue = next;
            if waited.timed_out() {
                queue.has_thread = false;
                return;
            }
        }
    }
}

impl Queue {
    fn is_done(&mut self, lines: &str) {
        (self.written, self.writing) = (self.written + 1, None);
        self.bytes -= lines.len();
        self.is_stuck &= !self.waiting.is_empty();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{PipeReader, Read as _, Write as _, pipe},
        os::fd::OwnedFd,
    };

    use super::*;

    /// Where nobody reads, what is read there later, and how many bytes of that were there before.
    fn full() -> (Arc<Sink>, PipeReader, usize) {
        let (reader, mut writer) = pipe().unwrap();
        // SAFETY: the pipe's own descriptor.
        let size = unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&writer), libc::F_GETPIPE_SZ) };
        let size = usize::try_from(size).unwrap();
        writer.write_all(&vec![b'.'; size]).unwrap();
        let file = File::from(OwnedFd::from(writer));
        (Arc::new(Sink::File("pipe".into(), file)), reader, size)
    }

    fn read(reader: &mut PipeReader, count: usize) -> String {
        let mut bytes = vec![0; count];
        reader.read_exact(&mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn one_waits_for_who_does_not_read_and_the_others_do_not() {
        let (sink, mut reader, before) = full();
        let writer = Arc::new(Writer::default());
        let begin = Instant::now();
        for number in 0..100 {
            writer.write(&sink, format!("line {number:2}\n"), false);
        }
        let took = begin.elapsed();
        // For each of them it would be 25 s.
        assert!(took >= PATIENCE && took < 10 * LIMIT, "{took:?}");
        read(&mut reader, before);
        let expected: String = (0..100).map(|number| format!("line {number:2}\n")).collect();
        assert_eq!(read(&mut reader, expected.len()), expected);
        // Somebody reads again, and what is said is written by then, once it is known of the last line.
        while lock(&writer.queue).is_stuck {
            thread::sleep(Duration::from_millis(1));
        }
        for number in 0..100 {
            writer.write(&sink, format!("again {number}\n"), false);
            let queue = lock(&writer.queue);
            assert_eq!((queue.written, queue.is_stuck), (queue.said, false));
        }
    }

    #[test]
    fn what_there_is_no_room_for_is_counted_and_warnings_have_more() {
        let (sink, mut reader, before) = full();
        let writer = Arc::new(Writer::default());
        let line = format!("{}\n", "x".repeat(1023));
        for _ in 0..ROOM / 1024 {
            writer.write(&sink, line.clone(), false);
        }
        assert_eq!(lock(&writer.queue).lost, (ROOM / 2 / 1024) as u64);
        writer.write(&sink, "a report\n".into(), true);
        assert_eq!(lock(&writer.queue).lost, (ROOM / 2 / 1024) as u64);
        read(&mut reader, before + ROOM / 2);
        let mut rest = String::new();
        while !rest.ends_with("128 lines\n") {
            rest += &read(&mut reader, 1);
        }
        assert!(rest.starts_with("a report\n"), "{rest}");
    }
}
