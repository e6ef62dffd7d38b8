//! The field's words with NCCL's numbers (`nccl.h` 2.28): functions, data types, reductions, algorithms, protocols.

macro_rules! vocabulary {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $value:literal => $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum $name { $($(#[$vmeta])* #[doc = concat!("`", $text, "`")] $variant = $value,)+ }

        impl $name {
            /// Every value, in numeric order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The value with this number, if there is one.
            #[must_use]
            pub const fn from_code(code: u8) -> Option<Self> {
                match code { $($value => Some(Self::$variant),)+ _ => None }
            }

            /// The number that stands for it in records.
            #[must_use]
            pub const fn code(self) -> u8 { self as u8 }

            /// Its name as spans, logs and metrics write it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result { f.write_str(self.name()) }
        }
    };
}

vocabulary! {
    /// A communication function. Names are those of OpenTelemetry attributes (lower snake case).
    Function {
        AllReduce = 0 => "all_reduce",
        AllGather = 1 => "all_gather",
        ReduceScatter = 2 => "reduce_scatter",
        Broadcast = 3 => "broadcast",
        Reduce = 4 => "reduce",
        AlltoAll = 5 => "alltoall",
        Gather = 6 => "gather",
        Scatter = 7 => "scatter",
        Send = 8 => "send",
        Recv = 9 => "recv",
    }
}

impl Function {
    /// Whether it is one side of a point-to-point pair.
    #[must_use]
    pub const fn is_p2p(self) -> bool {
        matches!(self, Self::Send | Self::Recv)
    }

    /// Whether it combines elements of several ranks.
    #[must_use]
    pub const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce)
    }

    /// Whether no rank can finish before every rank has started, so that its start times can be compared for lag.
    #[must_use]
    pub const fn synchronises(self) -> bool {
        matches!(
            self,
            Self::AllReduce | Self::AllGather | Self::ReduceScatter | Self::AlltoAll
        )
    }

    /// Bus bandwidth over algorithm bandwidth for `ranks` ranks (nccl-tests, `doc/PERFORMANCE.md`).
    #[must_use]
    pub fn bus_factor(self, ranks: u32) -> f64 {
        let n = f64::from(ranks.max(1));
        match self {
            Self::AllReduce => 2.0 * (n - 1.0) / n,
            Self::AllGather | Self::ReduceScatter | Self::AlltoAll | Self::Gather | Self::Scatter => {
                (n - 1.0) / n
            }
            Self::Broadcast | Self::Reduce | Self::Send | Self::Recv => 1.0,
        }
    }
}

vocabulary! {
    /// `ncclDataType_t`.
    DataType {
        Int8 = 0 => "int8",
        Uint8 = 1 => "uint8",
        Int32 = 2 => "int32",
        Uint32 = 3 => "uint32",
        Int64 = 4 => "int64",
        Uint64 = 5 => "uint64",
        Float16 = 6 => "float16",
        Float32 = 7 => "float32",
        Float64 = 8 => "float64",
        Bfloat16 = 9 => "bfloat16",
        Float8e4m3 = 10 => "float8e4m3",
        Float8e5m2 = 11 => "float8e5m2",
    }
}

impl DataType {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::Int8 | Self::Uint8 | Self::Float8e4m3 | Self::Float8e5m2 => 1,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float32 => 4,
            Self::Int64 | Self::Uint64 | Self::Float64 => 8,
        }
    }
}

vocabulary! {
    /// Why an operation does not end, as the watchdog says. If several fit, the smallest number counts: the others are its consequences.
    /// One exception: [`Cause::StuckNic`] was added later, and counts before [`Cause::StuckKernel`].
    Cause {
        RankDead = 1 => "RANK_DEAD",
        DeviceFault = 2 => "DEVICE_FAULT",
        PeerAborted = 3 => "PEER_ABORTED",
        RankStopped = 4 => "RANK_STOPPED",
        NoAnswer = 5 => "NO_ANSWER",
        MetadataMismatch = 6 => "METADATA_MISMATCH",
        NotLaunched = 7 => "NOT_LAUNCHED",
        QueuedBehindCompute = 8 => "QUEUED_BEHIND_COMPUTE",
        StuckKernel = 9 => "STUCK_KERNEL",
        StuckNic = 10 => "STUCK_NIC",
    }
}

impl Cause {
    /// What it says of a rank, in words: `the process of rank 2 is stopped`.
    #[must_use]
    pub const fn of_rank(self, rank: u32) -> CauseOfRank {
        CauseOfRank(self, rank)
    }
}

/// See [`Cause::of_rank`].
#[derive(Clone, Copy, Debug)]
pub struct CauseOfRank(Cause, u32);

impl core::fmt::Display for CauseOfRank {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self(cause, rank) = self;
        match cause {
            Cause::RankDead => write!(f, "the process of rank {rank} is gone"),
            Cause::DeviceFault => write!(f, "the device of rank {rank} has failed"),
            Cause::PeerAborted => {
                write!(
                    f,
                    "rank {rank} has aborted, revoked or destroyed the communicator"
                )
            }
            Cause::RankStopped => write!(f, "the process of rank {rank} is stopped"),
            Cause::NoAnswer => write!(f, "rank {rank} does not answer"),
            Cause::MetadataMismatch => write!(
                f,
                "rank {rank} has called something else: the ranks do not call the same operations in the same order"
            ),
            Cause::NotLaunched => write!(f, "rank {rank} has not launched it"),
            Cause::QueuedBehindCompute => {
                write!(f, "rank {rank} has launched it, its stream has not come to it")
            }
            Cause::StuckNic => write!(f, "the network of rank {rank} carries nothing"),
            Cause::StuckKernel => {
                write!(
                    f,
                    "every rank has come, nothing moves, and rank {rank} stopped first"
                )
            }
        }
    }
}

vocabulary! {
    /// `ncclRedOp_t`, and [`ReduceOp::None`] for functions that do not reduce.
    ReduceOp {
        Sum = 0 => "sum",
        Prod = 1 => "prod",
        Max = 2 => "max",
        Min = 3 => "min",
        Avg = 4 => "avg",
        PreMulSum = 5 => "premulsum",
        None = 255 => "none",
    }
}

vocabulary! {
    /// How the ranks are arranged for an operation.
    Algorithm {
        Tree = 0 => "tree",
        Ring = 1 => "ring",
        Direct = 2 => "direct",
        OneShot = 3 => "one_shot",
        TwoShot = 4 => "two_shot",
        CopyEngine = 5 => "copy_engine",
    }
}

vocabulary! {
    /// How data and flags travel together.
    Protocol {
        Ll = 0 => "ll",
        Ll128 = 1 => "ll128",
        Simple = 2 => "simple",
        Push = 3 => "push",
        Ce = 4 => "ce",
    }
}

/// Longest communicator name kept in the shared pages, in bytes; longer ones are cut at a character boundary.
pub const NAME_BYTES: usize = 48;
