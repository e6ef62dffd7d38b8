//! Records of the kernel's RDMA stack, decoded.

use ringsight_records::network::NetworkRecord;

use super::site::Tells;

/// State of a queue pair, `enum ib_qp_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QpState(pub u32);

impl QpState {
    /// As the specification calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self.0 {
            0 => "RESET",
            1 => "INIT",
            2 => "RTR",
            3 => "RTS",
            4 => "SQD",
            5 => "SQE",
            6 => "ERR",
            _ => "unknown",
        }
    }
}

/// An asynchronous event of the verbs, `enum ib_event_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VerbsEvent(pub u32);

impl VerbsEvent {
    /// The port is down.
    pub const PORT_ERR: Self = Self(10);
    /// The port is up.
    pub const PORT_ACTIVE: Self = Self(9);
    /// The device is lost.
    pub const DEVICE_FATAL: Self = Self(8);

    /// As the kernel's header calls it, in lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self.0 {
            0 => "cq_err",
            1 => "qp_fatal",
            2 => "qp_req_err",
            3 => "qp_access_err",
            4 => "comm_est",
            5 => "sq_drained",
            6 => "path_mig",
            7 => "path_mig_err",
            8 => "device_fatal",
            9 => "port_active",
            10 => "port_err",
            11 => "lid_change",
            12 => "pkey_change",
            13 => "sm_change",
            14 => "srq_err",
            15 => "srq_limit_reached",
            16 => "qp_last_wqe_reached",
            17 => "client_reregister",
            18 => "gid_change",
            19 => "wq_fatal",
            _ => "unknown",
        }
    }

    /// Whether it says that something failed.
    #[must_use]
    pub const fn is_error(self) -> bool {
        matches!(self.0, 0 | 1 | 2 | 3 | 7 | 8 | 10 | 14 | 19)
    }
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkEvent {
    /// A queue pair was created.
    QpCreated {
        /// Its number; 0 if it could not be created.
        qpn: u32,
        /// `enum ib_qp_type`: 2 is RC, 4 UD.
        kind: u32,
    },
    /// A queue pair was modified. What was not asked for is `None`.
    QpModified {
        /// Its number.
        qpn: u32,
        /// The state that was asked for.
        state: Option<QpState>,
        /// The port that it was bound to.
        port: Option<u32>,
        /// The queue pair that it was connected to.
        peer: Option<u32>,
    },
    /// A queue pair is being destroyed.
    QpDestroyed {
        /// Its number.
        qpn: u32,
    },
    /// Memory was registered.
    MrRegistered {
        /// Local key.
        lkey: u32,
        /// Remote key.
        rkey: u32,
        /// Bytes.
        length: u64,
    },
    /// Memory is being deregistered.
    MrDeregistered {
        /// Local key.
        lkey: u32,
        /// Remote key.
        rkey: u32,
    },
    /// An event of a device or of one of its ports.
    Device {
        /// Which.
        event: VerbsEvent,
        /// Port, where it is a port's event.
        port: Option<u32>,
    },
    /// An event of a queue pair.
    Qp {
        /// Which.
        event: VerbsEvent,
        /// Its number.
        qpn: u32,
    },
    /// An event of a completion queue.
    Cq {
        /// Which.
        event: VerbsEvent,
    },
    /// Soft-RoCE gave a queue pair up: retries are exhausted, or the peer refused.
    SoftQpError {
        /// Its number.
        qpn: u32,
    },
    /// An mlx5 device's event of a queue pair.
    Mlx5Qp {
        /// `enum mlx5_event`: 5 work queue catastrophic error, 0x10 invalid request, 0x11 access error.
        kind: u32,
        /// Its number.
        qpn: u32,
    },
    /// An mlx5 device's port changed its state.
    Mlx5Port {
        /// `MLX5_PORT_CHANGE_SUBTYPE_*`: 1 down, 4 active, 5 initialised.
        change: u32,
        /// Port.
        port: u32,
    },
    /// Another event that an mlx5 device's verbs driver was told of.
    Mlx5Other {
        /// `enum mlx5_event`, or `enum mlx5_dev_event`.
        kind: u32,
    },
    /// An mlx5 device's error of a completion queue.
    Mlx5CqError {
        /// Its number.
        cqn: u32,
        /// 1 overrun, 2 access violation.
        syndrome: u32,
    },
    /// An mlx5 device's firmware is not well.
    Mlx5Health {
        /// What it says, `MLX5_INITIAL_SEG_HEALTH_SYNDROME_*` or 0 if the driver noticed first.
        syndrome: u32,
        /// What the driver concluded, `MLX5_SENSOR_*`; 0 if nothing.
        fatal: u32,
    },
    /// The driver begins to get the device back.
    Mlx5Recovery,
    /// An mlx5 device's firmware refused a command. Which device's is not told.
    Mlx5CommandRefused {
        /// `MLX5_CMD_OP_*`.
        opcode: u32,
        /// Its modifier.
        modifier: u32,
        /// `MLX5_CMD_STAT_*`.
        status: u32,
        /// What only the vendor can read.
        syndrome: u32,
        /// What the caller was given, an error number.
        error: i32,
    },
}

/// Bits of `enum ib_qp_attr_mask`.
mod mask {
    pub(super) const STATE: u32 = 1;
    pub(super) const PORT: u32 = 1 << 5;
    pub(super) const DEST_QPN: u32 = 1 << 20;
}

/// `MLX5_EVENT_TYPE_PORT_CHANGE`.
const PORT_CHANGE: u32 = 9;

impl NetworkEvent {
    /// What a record of a site that tells this says.
    pub(super) fn of(tells: Tells, record: &NetworkRecord) -> Self {
        let [a, b, c, d, e] = record.values;
        match tells {
            Tells::QpCreated => Self::QpCreated {
                qpn: if record.result == 0 { a } else { 0 },
                kind: if record.result == 0 { b } else { 0 },
            },
            Tells::QpModified => {
                let given = |bit| b & bit != 0;
                Self::QpModified {
                    qpn: a,
                    state: given(mask::STATE).then_some(QpState(c)),
                    // One byte on some kernels, four on others; ports are few.
                    port: given(mask::PORT).then_some(d),
                    peer: given(mask::DEST_QPN).then_some(e),
                }
            }
            Tells::QpDestroyed => Self::QpDestroyed { qpn: a },
            Tells::MrRegistered => Self::MrRegistered {
                lkey: if record.result == 0 { a } else { 0 },
                rkey: if record.result == 0 { b } else { 0 },
                length: u64::from(d) << 32 | u64::from(c),
            },
            Tells::MrDeregistered => Self::MrDeregistered { lkey: a, rkey: b },
            Tells::DeviceEvent => Self::Device {
                event: VerbsEvent(a),
                // The element of other events is no number, or none.
                port: matches!(a, 9..=13 | 17 | 18).then_some(b),
            },
            Tells::QpEvent => Self::Qp {
                event: VerbsEvent(a),
                qpn: b,
            },
            Tells::CqEvent => Self::Cq { event: VerbsEvent(a) },
            Tells::SoftQpError => Self::SoftQpError { qpn: a },
            Tells::Mlx5QpEvent => Self::Mlx5Qp { kind: a, qpn: b },
            Tells::Mlx5Event if a == PORT_CHANGE => Self::Mlx5Port {
                change: b,
                // The upper four bits of its byte.
                port: c >> 4 & 0xf,
            },
            Tells::Mlx5Event => Self::Mlx5Other { kind: a },
            Tells::Mlx5CqError => Self::Mlx5CqError {
                // As the device wrote it: big-endian, 24 bits.
                cqn: u32::from_be(a) & 0xff_ffff,
                syndrome: b,
            },
            Tells::Mlx5Health => Self::Mlx5Health {
                syndrome: a,
                fatal: b,
            },
            Tells::Mlx5Recovery => Self::Mlx5Recovery,
            Tells::Mlx5CommandRefused => Self::Mlx5CommandRefused {
                opcode: a,
                modifier: b,
                status: c,
                syndrome: d,
                error: e as i32,
            },
        }
    }

    /// Name in spans and messages.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::QpCreated { .. } => "qp_created",
            Self::QpModified { .. } => "qp_modified",
            Self::QpDestroyed { .. } => "qp_destroyed",
            Self::MrRegistered { .. } => "mr_registered",
            Self::MrDeregistered { .. } => "mr_deregistered",
            Self::Device { event, .. } | Self::Qp { event, .. } | Self::Cq { event } => event.name(),
            Self::SoftQpError { .. } => "rxe_qp_error",
            Self::Mlx5Qp { .. } => "mlx5_qp_event",
            Self::Mlx5Port { .. } => "mlx5_port_change",
            Self::Mlx5Other { .. } => "mlx5_event",
            Self::Mlx5CqError { .. } => "mlx5_cq_error",
            Self::Mlx5Health { .. } => "mlx5_health",
            Self::Mlx5Recovery => "mlx5_recovery",
            Self::Mlx5CommandRefused { .. } => "mlx5_command_refused",
        }
    }
}

/// One event of the kernel's RDMA stack, with where and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkSample {
    /// Process that it concerns, if it was passed in its context and is watched.
    pub pid: Option<u32>,
    /// When, `CLOCK_MONOTONIC` nanoseconds; of a call its entry.
    pub time_ns: u64,
    /// How long the call took, nanoseconds; 0 for what is no call.
    pub duration_ns: u64,
    /// What the call returned: 0, or an error number below 0.
    pub result: i32,
    /// Name of the verbs device (`mlx5_0`) or of the PCI device (`0000:18:00.0`): at most 15 bytes of it; empty if it is not
    /// told.
    pub device: String,
    /// What happened.
    pub event: NetworkEvent,
}

/// The text in a record's name.
pub(super) fn name(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(values: [u32; 5], result: i32) -> NetworkRecord {
        NetworkRecord {
            time_ns: 1,
            process: 0,
            duration_ns: 0,
            result,
            site: 0,
            reserved: 0,
            values,
            device: *b"mlx5_0\0xxxxxxxxx",
        }
    }

    #[test]
    fn only_what_was_asked_for_is_told_of_a_queue_pair() {
        let of = |values| NetworkEvent::of(Tells::QpModified, &record(values, 0));
        assert_eq!(
            of([0x11, mask::STATE | mask::DEST_QPN, 2, 7, 0x99]),
            NetworkEvent::QpModified {
                qpn: 0x11,
                state: Some(QpState(2)),
                port: None,
                peer: Some(0x99)
            }
        );
        assert_eq!(
            of([0x11, mask::PORT, 6, 1, 5]),
            NetworkEvent::QpModified {
                qpn: 0x11,
                state: None,
                port: Some(1),
                peer: None
            }
        );
    }

    #[test]
    fn what_was_not_created_has_no_number() {
        let event = NetworkEvent::of(Tells::QpCreated, &record([7, 2, 0, 0, 0], -12));
        assert_eq!(event, NetworkEvent::QpCreated { qpn: 0, kind: 0 });
        let event = NetworkEvent::of(Tells::MrRegistered, &record([1, 2, 0x10, 1, 0], 0));
        let length = 1 << 32 | 0x10;
        assert_eq!(
            event,
            NetworkEvent::MrRegistered {
                lkey: 1,
                rkey: 2,
                length
            }
        );
    }

    #[test]
    fn a_devices_own_byte_order_and_bits_are_undone() {
        let event = NetworkEvent::of(Tells::Mlx5CqError, &record([0x125_u32.to_be(), 1, 0, 0, 0], 0));
        assert_eq!(
            event,
            NetworkEvent::Mlx5CqError {
                cqn: 0x125,
                syndrome: 1
            }
        );
        let event = NetworkEvent::of(Tells::Mlx5Event, &record([PORT_CHANGE, 1, 0x10, 0, 0], 0));
        assert_eq!(event, NetworkEvent::Mlx5Port { change: 1, port: 1 });
        let event = NetworkEvent::of(Tells::Mlx5Event, &record([0x80, 1, 0x10, 0, 0], 0));
        assert_eq!(event, NetworkEvent::Mlx5Other { kind: 0x80 });
    }

    #[test]
    fn names_end_at_their_zero() {
        assert_eq!(name(&record([0; 5], 0).device), "mlx5_0");
        assert_eq!(name(b"0123456789abcdef"), "0123456789abcdef");
        assert_eq!(name(b"\0"), "");
    }
}
