//! Connections over RDMA between two proxies: the peer's device writes the bytes of a step from slot to slot, without a copy by either
//! processor.
//!
//! The hello of the proxies' TCP stream decides. A sender whose process has RDMA adds an offer to its hello. A receiver that can use RDMA
//! answers with its own offer, and the sender says whether it is connected. If either end cannot, the connection uses the socket and the
//! log says why; with `NCCL_NET=IB` it fails instead. The stream stays open beside RDMA: its end tells a peer that the other is gone, and
//! it carries messages of the failover protocol.
//!
//! | module | owns |
//! |---|---|
//! | `setup` | an end until it is connected |
//! | `path_reports` | logs, records and page entries about the paths of an end |
//! | `end` | what sender and receiver share |
//! | `sender`, `receiver` | the two kinds of [`Connection`](super::connection::Connection) |

mod end;
mod path_reports;
mod receiver;
mod sender;
mod setup;

use ringsight_kernels::fifo::SLOTS;
use ringsight_verbs::endpoint;

pub(crate) use receiver::UnconfirmedReceiver;
pub(crate) use sender::Sender;
pub(crate) use setup::{ConnectedEnd, PreparedEnd, prepare};

/// A FIFO of the kernels and a connection of `ringsight_verbs` have the same slots.
const _: () = assert!(SLOTS == endpoint::SLOTS);
