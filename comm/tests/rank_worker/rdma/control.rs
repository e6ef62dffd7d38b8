//! Two ranks that go through something together: what they tell each other beside RDMA.

use ringsight_comm::abi::{NcclConfig, UniqueIdBytes};
use ringsight_records::{DataType, Function};

use crate::common::{Call, Rank, config, ok, processes::place_of_process, unique_id};

/// A communicator over sockets: no link's failure reaches it, and it holds nothing on a device.
pub(crate) struct Control {
    pub(crate) rank: Rank,
    /// Process of the other rank.
    pub(crate) peer: libc::pid_t,
}

impl Control {
    /// That of this process, which was started as a rank.
    pub(crate) fn of_process() -> Self {
        let (id, rank, ranks) = place_of_process();
        let mut settings = config();
        settings.net_name = c"Socket".as_ptr();
        let mut control = Self {
            rank: Rank::join_with(id, rank, ranks, &mut settings),
            peer: 0,
        };
        let all = control.tell([std::process::id().into(); WORDS]);
        control.peer = all[1 - rank][0] as libc::pid_t;
        control
    }

    /// Tells the other rank something; what either says.
    pub(crate) fn tell(&self, words: [u64; WORDS]) -> [[u64; WORDS]; 2] {
        let mut all = [[0; WORDS]; 2];
        let call = Call {
            data_type: DataType::Uint64,
            ..Call::new(Function::AllGather, WORDS)
        };
        ok(self
            .rank
            .call(&call, words.as_ptr().cast(), all.as_mut_ptr().cast()));
        self.rank.synchronize();
        all
    }

    /// Waits for the other rank.
    pub(crate) fn meet(&self) {
        self.tell([0; WORDS]);
    }

    /// A communicator of both ranks.
    pub(crate) fn make(&self) -> Rank {
        self.make_with(&mut config())
    }

    /// The same with choices.
    pub(crate) fn make_with(&self, settings: &mut NcclConfig) -> Rank {
        let mut words = [0; WORDS];
        if self.rank.rank == 0 {
            for (word, bytes) in words.iter_mut().zip(unique_id().0.as_chunks::<8>().0) {
                *word = u64::from_ne_bytes(*bytes);
            }
        }
        let mut id = UniqueIdBytes([0; 128]);
        for (bytes, word) in id.0.as_chunks_mut::<8>().0.iter_mut().zip(self.tell(words)[0]) {
            *bytes = word.to_ne_bytes();
        }
        Rank::join_with(id, self.rank.rank, self.rank.ranks, settings)
    }
}

/// Words of a unique id.
pub(crate) const WORDS: usize = 16;

/// A process that is stopped; it goes on when this is dropped, also by a panic.
pub(crate) struct Stopped(libc::pid_t);

impl Stopped {
    pub(crate) fn new(process: libc::pid_t) -> Self {
        // SAFETY: a signal to the other rank's process.
        assert_eq!(unsafe { libc::kill(process, libc::SIGSTOP) }, 0);
        Self(process)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::kill(self.0, libc::SIGCONT) };
    }
}
