//! What a [`crate::Kind::Failover`] record says in its `value`.

/// Why a connection left a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum PathCause {
    /// This end's port, or its device, is down.
    Port = 1,
    /// A work request ended with an error.
    Completion = 2,
    /// Work requests neither ended nor failed in time.
    Timeout = 3,
    /// Other connections over the same ports failed.
    Shared = 4,
    /// The peer said so.
    Peer = 5,
    /// A queue pair could not be made, connected or used.
    Build = 6,
    /// None: a path that comes before it in order is ready.
    Failback = 7,
}

impl PathCause {
    /// Every cause, in numeric order.
    pub const ALL: &'static [Self] = &[
        Self::Port,
        Self::Completion,
        Self::Timeout,
        Self::Shared,
        Self::Peer,
        Self::Build,
        Self::Failback,
    ];

    /// The cause with this number, if there is one.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        let mut index = 0;
        while index < Self::ALL.len() {
            if Self::ALL[index] as u8 == code {
                return Some(Self::ALL[index]);
            }
            index += 1;
        }
        None
    }

    /// Name in spans and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Port => "port_down",
            Self::Completion => "completion_error",
            Self::Timeout => "timeout",
            Self::Shared => "shared",
            Self::Peer => "peer",
            Self::Build => "queue_pair",
            Self::Failback => "failback",
        }
    }
}

/// What happened to a connection's paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathChange {
    /// Why, where it was left.
    pub cause: Option<PathCause>,
    /// `enum ibv_wc_status` of the completion that told of it; 0 if none did.
    pub status: u8,
    /// The path that it is about, or that is left: 0 is the first one. 4 bits.
    pub from: u8,
    /// The path that is used from now on; the same as `from` where none is switched to. 4 bits.
    pub to: u8,
    /// Port of the path that is used from now on, or that this is about, by its number among those that the process may use (0 to 254).
    pub port: Option<u8>,
    /// Number of that path's queue pair at this end. 24 bits.
    pub number: u32,
}

impl PathChange {
    /// For `value`: `cause << 56 | status << 48 | from << 44 | to << 40 | port + 1 << 32 | number`.
    #[must_use]
    pub const fn to_value(self) -> u64 {
        let cause = match self.cause {
            None => 0,
            Some(cause) => cause as u64,
        };
        let port = match self.port {
            None => 0,
            Some(port) => port as u64 + 1,
        };
        cause << 56
            | (self.status as u64) << 48
            | (self.from as u64 & 0xf) << 44
            | (self.to as u64 & 0xf) << 40
            | (port & 0xff) << 32
            | self.number as u64 & 0xff_ffff
    }

    /// Of a `value`. A cause of a later version is none.
    #[must_use]
    pub const fn from_value(value: u64) -> Self {
        Self {
            cause: PathCause::from_code((value >> 56) as u8),
            status: (value >> 48) as u8,
            from: (value >> 44) as u8 & 0xf,
            to: (value >> 40) as u8 & 0xf,
            port: match (value >> 32) as u8 {
                0 => None,
                port => Some(port - 1),
            },
            number: value as u32 & 0xff_ffff,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_survives_its_value() {
        for cause in PathCause::ALL.iter().copied().map(Some).chain([None]) {
            for port in [None, Some(0), Some(254)] {
                let change = PathChange {
                    cause,
                    status: 12,
                    from: 15,
                    to: 1,
                    port,
                    number: 0xab_cdef,
                };
                assert_eq!(PathChange::from_value(change.to_value()), change);
            }
        }
        assert_eq!(PathChange::from_value(0xff << 56).cause, None);
    }
}
