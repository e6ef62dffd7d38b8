//! RDMA of this process: whether there is any, and which ports serve which rank.
//!
//! A process looks for devices once, at the first communicator that may use RDMA; a forked child looks again. Which ports are up is
//! determined anew for each communicator.

use std::{
    path::Path as FilePath,
    sync::{Arc, OnceLock},
};

use ringsight_comm_base::{
    env,
    error::{Error, Result, ResultCode},
    fork::PerProcess,
    log,
};
use ringsight_verbs::{
    choice,
    config::{Config, MAX_QPS},
    error::NetError,
    failover::Settings,
    port::Net,
    port_health::PortHealth,
    sysfs::Place,
};

/// RDMA that a proxy may use.
#[derive(Clone)]
pub struct Rdma {
    /// The ports of the process.
    pub net: Arc<Net>,
    /// Health of these ports, and of the paths from them to peers' ports.
    pub port_health: Arc<PortHealth>,
    /// A connection that cannot use RDMA fails.
    pub required: bool,
    /// Traffic class of its packets, if the environment names none.
    pub class: Option<u8>,
}

/// The network that `config.netName` or `NCCL_NET` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NetworkChoice {
    /// RDMA if it can be used, else sockets.
    Any,
    /// RDMA only.
    Rdma,
    /// Sockets only.
    Socket,
}

impl NetworkChoice {
    /// Parses a network's name; `None` for an unknown one.
    pub(crate) fn parse(name: Option<&str>) -> Option<Self> {
        match name {
            None => Some(Self::Any),
            Some(name) if name.eq_ignore_ascii_case("IB") => Some(Self::Rdma),
            Some(name) if name.eq_ignore_ascii_case("Socket") => Some(Self::Socket),
            Some(_) => None,
        }
    }
}

/// The RDMA of this process for a new communicator; `None` if there is none, which the log explains. `class` is `config.trafficClass`.
///
/// # Errors
/// A variable has an invalid value, or RDMA is required and cannot be used.
pub(crate) fn from_environment(choice: NetworkChoice, class: Option<i32>) -> Result<Option<Rdma>> {
    static NET: PerProcess<OnceLock<std::result::Result<Option<Rdma>, Absence>>> = PerProcess::new();
    if choice == NetworkChoice::Socket {
        return Ok(None);
    }
    let required = choice == NetworkChoice::Rdma;
    match NET.get().get_or_init(find) {
        Ok(Some(rdma)) => match rdma.net.refresh() {
            Ok(()) => Ok(Some(Rdma {
                required,
                class: class.and_then(checked_class),
                ..rdma.clone()
            })),
            // For this communicator only: the next one may find a port up.
            Err(error) => {
                log_absence(rdma.net.config(), &error);
                match required {
                    true => Err(missing(&error.to_string())),
                    false => Ok(None),
                }
            }
        },
        Ok(None) if required => Err(missing("NCCL_IB_DISABLE is set")),
        Ok(None) => Ok(None),
        Err(Absence::InvalidVariable(text)) => Err(Error::new(ResultCode::InvalidArgument, text.clone())),
        Err(Absence::NoPort(error)) if required => Err(missing(&error.to_string())),
        Err(Absence::NoPort(_)) => Ok(None),
    }
}

/// A traffic class in the range of packets; a warning otherwise.
fn checked_class(class: i32) -> Option<u8> {
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
enum Absence {
    /// A variable has an invalid value.
    InvalidVariable(String),
    /// No port can be used.
    NoPort(NetError),
}

/// Reads the configuration and finds the ports of this process; `None` if `NCCL_IB_DISABLE` is set.
fn find() -> std::result::Result<Option<Rdma>, Absence> {
    let config =
        Config::from_environment(env::text).map_err(|error| Absence::InvalidVariable(error.to_string()))?;
    let settings =
        Settings::read(env::text, env::parse).map_err(|error| Absence::InvalidVariable(error.to_string()))?;
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
                log_backups(&net);
            }
            Ok(Some(Rdma {
                net: Arc::new(net),
                port_health: PortHealth::new(Arc::new(settings)),
                required: false,
                class: None,
            }))
        }
        Err(error) => {
            log_absence(&config, &error);
            Err(Absence::NoPort(error))
        }
    }
}

/// Logs why there is no RDMA. It is a warning if the user names devices, and so expects one.
fn log_absence(config: &Config, error: &NetError) {
    if config.devices == Default::default() {
        tracing::info!(target: log::NET, "NET/IB : no RDMA, sockets are used: {error}");
    } else {
        tracing::warn!(target: log::NET, "NET/IB : no RDMA, sockets are used: {error}");
    }
}

/// The place of the PCI device at an address, if there is one.
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

/// Indices of the ports that rank number `local` of a node uses: channel c uses the c-th, in turn. `buses` are the PCI addresses of the
/// GPUs of the node's ranks, empty for ranks without a GPU.
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

/// Index of the backup port of port `port`, if failover is on and there is one.
pub(super) fn backup_of(net: &Net, port: usize) -> Option<usize> {
    net.config()
        .failover
        .then(|| choice::backup(&net.ports(), port))
        .flatten()
        .map(choice::Backup::index)
}

/// Logs the backup of each port.
fn log_backups(net: &Net) {
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
