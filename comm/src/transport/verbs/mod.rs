//! RDMA between two proxies: the bytes of a connection's FIFO go from slot to slot, without a copy of either processor.
//!
//! What the proxies' TCP connection says first decides: a sender whose process has RDMA adds an offer to its hello, a
//! receiver that can answers with its own, and the sender says whether it is connected. If either cannot, the connection stands over
//! the socket and the log says why; with `NCCL_NET=IB` it fails instead. The socket stays open beside RDMA: that it closes is how an
//! end learns that the other one is gone.

mod line;
mod paths;
mod prepared;
mod receiver;
mod sender;
mod talk;

use std::{
    path::Path as FilePath,
    sync::{Arc, OnceLock},
};

use ringsight_kernels::fifo::SLOTS;
use ringsight_verbs::{
    choice,
    config::{Config, MAX_QPS},
    endpoint,
    failover::Settings,
    port::Net,
    port_health::PortHealth,
    sysfs::Place,
};

use ringsight_comm_base::fork::PerProcess;

use crate::{
    error::{Error, Result, ResultCode},
    log,
};

pub(crate) use prepared::{Connected, Prepared, prepare};
pub(crate) use receiver::{Confirmed, Receiver, Unconfirmed};
pub(crate) use sender::Sender;

/// What kernels call slots, and what the peer's device writes, are the same.
const _: () = assert!(SLOTS == endpoint::SLOTS);

/// RDMA that a proxy may use.
#[derive(Clone)]
pub struct Rdma {
    /// The process's ports.
    pub net: Arc<Net>,
    /// What is known of them and of the paths between them and peers' ports.
    pub port_health: Arc<PortHealth>,
    /// Connections that cannot go over it fail.
    pub required: bool,
    /// Traffic class of its packets, where the environment names none.
    pub class: Option<u8>,
}

/// What `config.netName` or `NCCL_NET` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// RDMA where it can be.
    Any,
    /// Nothing else.
    Ib,
    /// No RDMA.
    Socket,
}

impl Wish {
    /// Of a network's name.
    pub(crate) fn parse(name: Option<&str>) -> Option<Self> {
        match name {
            None => Some(Self::Any),
            Some(name) if name.eq_ignore_ascii_case("IB") => Some(Self::Ib),
            Some(name) if name.eq_ignore_ascii_case("Socket") => Some(Self::Socket),
            Some(_) => None,
        }
    }
}

/// The RDMA of this process for a communicator that is being made; `None` where there is none, which the log explains. What devices there
/// are is found out when a process first asks for it (a forked child anew), and which ports are up each time. `class` is `config.trafficClass`.
///
/// # Errors
/// When a variable says what it cannot, or RDMA is wished for and is not there.
pub(crate) fn by_environment(wish: Wish, class: Option<i32>) -> Result<Option<Rdma>> {
    static NET: PerProcess<OnceLock<std::result::Result<Option<Rdma>, Found>>> = PerProcess::new();
    if wish == Wish::Socket {
        return Ok(None);
    }
    let required = wish == Wish::Ib;
    let net = NET.get().get_or_init(look);
    match net {
        Ok(Some(rdma)) => match rdma.net.refresh() {
            Ok(()) => Ok(Some(Rdma {
                required,
                class: class.and_then(class_of),
                ..rdma.clone()
            })),
            // For this communicator: the next one may find one up.
            Err(error) => {
                let text = error.to_string();
                tell_absence(rdma.net.config(), &text);
                match required {
                    true => Err(missing(&text)),
                    false => Ok(None),
                }
            }
        },
        Ok(None) if required => Err(missing("NCCL_IB_DISABLE is set")),
        Ok(None) => Ok(None),
        Err(Found::Invalid(text)) => Err(Error::new(ResultCode::InvalidArgument, text.clone())),
        Err(Found::Nothing(text)) if required => Err(missing(text)),
        Err(Found::Nothing(_)) => Ok(None),
    }
}

/// A traffic class that packets can have.
fn class_of(class: i32) -> Option<u8> {
    let found = u8::try_from(class).ok();
    if found.is_none() {
        tracing::warn!(target: log::NET, "NET/IB : traffic class {class} (config.trafficClass) is ignored: 0 to 255 is wanted");
    }
    found
}

fn missing(why: &str) -> Error {
    Error::usage(format!(
        "network IB (config.netName or environment variable NCCL_NET) cannot be used: {why}"
    ))
}

/// Why there is no RDMA.
enum Found {
    /// A variable says what it cannot.
    Invalid(String),
    /// There is none to use.
    Nothing(String),
}

fn look() -> std::result::Result<Option<Rdma>, Found> {
    let config =
        Config::from_environment(crate::env::text).map_err(|error| Found::Invalid(error.to_string()))?;
    let settings = Settings::read(crate::env::text).map_err(|error| Found::Invalid(error.to_string()))?;
    let Some(config) = config else {
        tracing::info!(target: log::NET, "NET/IB : NCCL_IB_DISABLE is set");
        return Ok(None);
    };
    match Net::new(config.clone(), FilePath::new("/sys")) {
        Ok(net) => {
            let list: Vec<String> = (0..)
                .zip(net.ports().iter())
                .map(|(index, port)| {
                    let layer = if port.ethernet { "RoCE" } else { "IB" };
                    let down = if port.active { "" } else { " (down)" };
                    format!("[{index}]{}:{}/{layer}{down}", port.device, port.number)
                })
                .collect();
            tracing::info!(target: log::NET, "NET/IB : Using {}", list.join(" "));
            if let Some(asked) = net.config().qps_asked {
                tracing::warn!(
                    target: log::NET,
                    "NET/IB : NCCL_IB_QPS_PER_CONNECTION={asked} is more than a connection can have: {MAX_QPS} queue pairs are used"
                );
            }
            for (name, why) in &net.config().without_effect {
                tracing::info!(target: log::ENV, "{name} has no effect: {why}");
            }
            if net.config().failover {
                tell_backups(&net);
            }
            Ok(Some(Rdma {
                net: Arc::new(net),
                port_health: PortHealth::new(Arc::new(settings)),
                required: false,
                class: None,
            }))
        }
        Err(error) => {
            let text = error.to_string();
            tell_absence(&config, &text);
            Err(Found::Nothing(text))
        }
    }
}

/// Tells why there is no RDMA: who names devices expects one.
fn tell_absence(config: &Config, text: &str) {
    if config.devices == Default::default() {
        tracing::info!(target: log::NET, "NET/IB : no RDMA, sockets are used: {text}");
    } else {
        tracing::warn!(target: log::NET, "NET/IB : no RDMA, sockets are used: {text}");
    }
}

/// Where the PCI device at an address is, if that is one.
pub(super) fn place_of(bus: &str) -> Option<Place> {
    let sys = FilePath::new("/sys");
    let is_one = bus
        .bytes()
        .all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte));
    let link = sys.join("bus/pci/devices").join(bus);
    (is_one && !bus.is_empty())
        .then(|| Place::of(sys, &link).ok())
        .flatten()
}

/// The ports that rank number `local` of a node uses, by channel, round and round; `buses` are the PCI addresses of the GPUs of the
/// node's ranks, empty for those without.
pub(crate) fn ports_of(net: &Net, buses: &[&str], local: usize) -> Vec<usize> {
    let places: Vec<Option<Place>> = buses.iter().map(|bus| place_of(bus)).collect();
    let near: Vec<_> = places.iter().map(Option::as_ref).collect();
    let mut assigned = choice::assign(&net.ports(), &near);
    if local < assigned.len() {
        assigned.swap_remove(local)
    } else {
        Vec::new()
    }
}

/// Number of the port that stands by for port number `port`, if one is wanted and there is one.
pub(super) fn backup_of(net: &Net, port: usize) -> Option<usize> {
    let wanted = net.config().failover;
    wanted
        .then(|| choice::backup(&net.ports(), port))
        .flatten()
        .map(choice::Backup::index)
}

/// Tells which port stands by for each.
fn tell_backups(net: &Net) {
    let ports = net.ports();
    for (index, port) in ports.iter().enumerate() {
        let text = match choice::backup(&ports, index) {
            Some(backup) => {
                let other = &ports[backup.index()];
                format!("{}:{}, {}", other.device, other.number, backup.reason())
            }
            None => "none, there is no other port of its kind".to_owned(),
        };
        tracing::info!(target: log::NET, "NET/IB : backup of {}:{} : {text}", port.device, port.number);
    }
}
