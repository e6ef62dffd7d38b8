//! The ports that this process uses: devices opened once, with what was chosen for each port.

use std::{
    collections::HashMap,
    path::{Path as FilePath, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    config::Config,
    device::{Context, Mtu},
    memory::{Access, Pd},
    sys::{self, Lib},
    sysfs,
};

/// A port of an opened device.
#[derive(Clone)]
pub struct Port {
    pd: Arc<Pd>,
    number: u8,
    /// GID and its index; of RoCE always.
    gid: Option<([u8; 16], u8)>,
    ethernet: bool,
    lid: u16,
    mtu: Mtu,
    active: bool,
    config: Arc<Config>,
}

impl Port {
    /// Looks at a port of an opened device as it is now, and chooses its GID by what `known` says of it.
    ///
    /// # Errors
    /// When it is down, or has no GID as wished for.
    pub fn new(pd: &Arc<Pd>, known: &sysfs::Port, config: &Arc<Config>) -> Result<Self, String> {
        let port = Self::standby(pd, known, config)?;
        match port.active {
            true => Ok(port),
            false => Err(format!("port {}:{} is down", port.device(), port.number)),
        }
    }

    /// The same for a port that need not be up: what is made on it is connected when it is.
    ///
    /// # Errors
    /// When it has no GID as wished for.
    pub fn standby(pd: &Arc<Pd>, known: &sysfs::Port, config: &Arc<Config>) -> Result<Self, String> {
        let (context, number) = (pd.context(), known.number);
        let name = format!("{}:{number}", context.name());
        let state = context.port(number).map_err(|error| error.to_string())?;
        if !context.has_pkey(number, config.pkey_index) {
            let (index, keys) = (config.pkey_index, state.pkeys);
            return Err(format!(
                "port {name} has no P_Key at index {index} (NCCL_IB_PKEY) of {keys}"
            ));
        }
        let chosen = sysfs::choose_gid(
            known,
            config.gid_index,
            config.roce_version,
            config.ipv6,
            config.range.as_ref(),
        );
        let gid = match chosen {
            // As it is now: a port that was down may have got another one.
            Some(gid) => {
                let bytes = context
                    .gid(number, gid.index)
                    .map_err(|error| error.to_string())?;
                Some((bytes, gid.index))
            }
            None if state.ethernet => {
                let wanted = config.gid_index.map_or("any".to_owned(), |index| {
                    format!("index {index} (NCCL_IB_GID_INDEX)")
                });
                let there: Vec<String> = known.gids.iter().map(|gid| gid.index.to_string()).collect();
                return Err(format!(
                    "port {name} has no GID, {wanted} was looked for; there are: {}",
                    if there.is_empty() {
                        "none".to_owned()
                    } else {
                        there.join(", ")
                    }
                ));
            }
            None => None,
        };
        Ok(Self {
            pd: Arc::clone(pd),
            number,
            gid,
            ethernet: state.ethernet,
            lid: state.lid,
            mtu: state.mtu,
            active: state.active,
            config: Arc::clone(config),
        })
    }

    /// It was up when it was looked at.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// The device's protection domain.
    #[must_use]
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Its device.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        self.pd.context()
    }

    /// Name of the device.
    #[must_use]
    pub fn device(&self) -> &str {
        self.context().name()
    }

    /// Its number, from 1.
    #[must_use]
    pub fn number(&self) -> u8 {
        self.number
    }

    /// Its GID and the GID's index.
    #[must_use]
    pub fn gid(&self) -> Option<([u8; 16], u8)> {
        self.gid
    }

    /// It is RoCE.
    #[must_use]
    pub fn is_ethernet(&self) -> bool {
        self.ethernet
    }

    /// Its LID.
    #[must_use]
    pub fn lid(&self) -> u16 {
        self.lid
    }

    /// Its MTU.
    #[must_use]
    pub fn mtu(&self) -> Mtu {
        self.mtu
    }

    /// What the environment wishes for.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Rights of memory that peers write slots to.
    #[must_use]
    pub fn slots_access(&self) -> Access {
        if self.config.relaxed_ordering {
            Access::RemoteWriteRelaxed
        } else {
            Access::RemoteWrite
        }
    }
}

/// The RDMA ports of the machine that may be used, and the devices that were opened so far.
pub struct Net {
    lib: &'static Lib,
    config: Arc<Config>,
    sys: PathBuf,
    /// Those that may be used, as they were at the last [`Net::refresh`]: always the same ones, in the same order.
    ports: Mutex<Arc<[sysfs::Port]>>,
    domains: Mutex<HashMap<String, Arc<Pd>>>,
}

impl Net {
    /// Looks for ports in the tree at `sys`. None of them need be up.
    ///
    /// # Errors
    /// Why there is nothing to use: no library, no device, none that the environment allows.
    pub fn new(config: Config, sys: &FilePath) -> Result<Self, String> {
        let lib = sys::lib().map_err(str::to_owned)?;
        let all = sysfs::ports(sys);
        if all.is_empty() {
            return Err("this machine has no RDMA device".into());
        }
        let names: Vec<&str> = all.iter().map(|port| port.device.as_str()).collect();
        let unknown = config.devices.unknown(&names).join(", ");
        let ports: Vec<sysfs::Port> = all
            .iter()
            .filter(|port| config.devices.allows(&port.device, port.number))
            .cloned()
            .collect();
        if ports.is_empty() {
            let of = if unknown.is_empty() {
                String::new()
            } else {
                format!(" ({unknown} is none)")
            };
            return Err(format!(
                "NCCL_IB_HCA allows none of the RDMA ports {}{of}",
                names_of(&all)
            ));
        }
        Ok(Self {
            lib,
            config: Arc::new(config),
            sys: sys.to_owned(),
            ports: Mutex::new(ports.into()),
            domains: Mutex::default(),
        })
    }

    /// The ports that may be used, up or not, as they were when they were looked at last.
    #[must_use]
    pub fn ports(&self) -> Arc<[sysfs::Port]> {
        Arc::clone(&self.known())
    }

    fn known(&self) -> MutexGuard<'_, Arc<[sysfs::Port]>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the ports anew, for connections that are made from here on. A port that was down when the process began may be up, and
    /// faster than it said. What was down and what is gone stays in its place.
    ///
    /// # Errors
    /// None of them is up.
    pub fn refresh(&self) -> Result<(), String> {
        let look = |known: &sysfs::Port| {
            let now = sysfs::port(&self.sys, &known.device, known.number);
            now.unwrap_or_else(|| sysfs::Port {
                active: false,
                ..known.clone()
            })
        };
        let ports: Arc<[sysfs::Port]> = self.ports().iter().map(look).collect();
        let is_any_up = ports.iter().any(|port| port.active);
        let names = names_of(&ports);
        *self.known() = ports;
        match is_any_up {
            true => Ok(()),
            false => Err(format!("no RDMA port is up of those that may be used: {names}")),
        }
    }

    /// What the environment wishes for.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// A port of [`Net::ports`] as it is now, its device opened if it is not: since the process began, or since it was down, its GIDs may
    /// have moved to other indices.
    ///
    /// # Errors
    /// When the device cannot be opened, when the port is gone, or as [`Port::new`].
    pub fn open(&self, index: usize) -> Result<Port, String> {
        let (pd, now) = self.domain(index)?;
        Port::new(&pd, &now, &self.config)
    }

    /// The same for a port that need not be up.
    ///
    /// # Errors
    /// When the device cannot be opened, when the port is gone, or as [`Port::standby`].
    pub fn standby(&self, index: usize) -> Result<Port, String> {
        let (pd, now) = self.domain(index)?;
        Port::standby(&pd, &now, &self.config)
    }

    /// The protection domain of a port's device, opened once, and the port as it is now.
    fn domain(&self, index: usize) -> Result<(Arc<Pd>, sysfs::Port), String> {
        let ports = self.ports();
        let known = ports
            .get(index)
            .ok_or_else(|| format!("there is no port {index}"))?;
        let mut domains = self.domains.lock().unwrap_or_else(PoisonError::into_inner);
        let pd = match domains.get(&known.device) {
            Some(pd) => Arc::clone(pd),
            None => {
                let context = Context::open(self.lib, &known.device).map_err(|error| error.to_string())?;
                let pd = Pd::new(context).map_err(|error| error.to_string())?;
                domains.insert(known.device.clone(), Arc::clone(&pd));
                pd
            }
        };
        drop(domains);
        let (device, number) = (known.device.as_str(), known.number);
        let now = sysfs::port(&self.sys, device, number)
            .ok_or_else(|| format!("port {device}:{number} is gone"))?;
        Ok((pd, now))
    }
}

/// For messages.
fn names_of(ports: &[sysfs::Port]) -> String {
    let names: Vec<String> = ports
        .iter()
        .map(|port| format!("{}:{}", port.device, port.number))
        .collect();
    names.join(", ")
}
