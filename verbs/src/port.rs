//! The ports that this process uses. Each device is opened once; each port has its chosen GID.

use std::{
    collections::HashMap,
    path::{Path as FilePath, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ringsight_comm_base::sys::StandardTaken;

use crate::{
    config::Config,
    device::{Context, Mtu},
    error::{NetError, PortError},
    memory::{Access, Pd},
    sys::{self, Lib},
    sysfs,
};

/// A port of an opened device.
#[derive(Clone)]
pub struct Port {
    pd: Arc<Pd>,
    number: u8,
    /// GID and its index; always there for RoCE.
    gid: Option<([u8; 16], u8)>,
    ethernet: bool,
    lid: u16,
    mtu: Mtu,
    active: bool,
    config: Arc<Config>,
}

impl Port {
    /// Queries a port of an opened device, and chooses its GID from the table in `known`.
    ///
    /// # Errors
    /// The port is down, or as [`Port::standby`].
    pub fn new(pd: &Arc<Pd>, known: &sysfs::Port, config: &Arc<Config>) -> Result<Self, PortError> {
        let port = Self::standby(pd, known, config)?;
        match port.active {
            true => Ok(port),
            false => Err(PortError::Down {
                port: format!("{}:{}", port.device(), port.number),
            }),
        }
    }

    /// As [`Port::new`], for a port that may be down: its queue pairs are connected once it is up.
    ///
    /// # Errors
    /// The port has no P_Key or GID as configured, or its device fails.
    pub fn standby(pd: &Arc<Pd>, known: &sysfs::Port, config: &Arc<Config>) -> Result<Self, PortError> {
        let (context, number) = (pd.context(), known.number);
        let name = format!("{}:{number}", context.name());
        let state = context.port(number)?;
        if !context.has_pkey(number, config.pkey_index) {
            return Err(PortError::NoPkey {
                port: name,
                index: config.pkey_index,
                count: state.pkeys,
            });
        }
        let chosen = sysfs::choose_gid(
            known,
            config.gid_index,
            config.roce_version,
            config.ipv6,
            config.range.as_ref(),
        );
        let gid = match chosen {
            // Read again: a port that was down may have another GID there now.
            Some(gid) => Some((context.gid(number, gid.index)?, gid.index)),
            None if state.ethernet => {
                let wanted = config.gid_index.map_or("any".to_owned(), |index| {
                    format!("index {index} (NCCL_IB_GID_INDEX)")
                });
                let present: Vec<String> = known.gids.iter().map(|gid| gid.index.to_string()).collect();
                return Err(PortError::NoGid {
                    port: name,
                    wanted,
                    present: if present.is_empty() {
                        "none".to_owned()
                    } else {
                        present.join(", ")
                    },
                });
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

    /// Whether the port was up when it was queried.
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

    /// Whether the port is RoCE.
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

    /// The configuration of the process.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Access rights of memory that peers write slots to.
    #[must_use]
    pub fn slots_access(&self) -> Access {
        if self.config.relaxed_ordering {
            Access::RemoteWriteRelaxed
        } else {
            Access::RemoteWrite
        }
    }
}

/// The RDMA ports that this process may use, and the devices that it has opened.
pub struct Net {
    lib: &'static Lib,
    config: Arc<Config>,
    sys: PathBuf,
    /// The usable ports, as of the last [`Net::refresh`]. The list always has the same ports in the same order.
    ports: Mutex<Arc<[sysfs::Port]>>,
    domains: Mutex<HashMap<String, Arc<Pd>>>,
}

impl Net {
    /// Finds the ports in the tree at `sys` (`/sys`). They may all be down.
    ///
    /// # Errors
    /// There is no library, no device, or none that the environment allows.
    pub fn new(config: Config, sys: &FilePath) -> Result<Self, NetError> {
        let _standard = StandardTaken::new();
        let lib = sys::lib().map_err(Clone::clone)?;
        let all = sysfs::ports(sys);
        if all.is_empty() {
            return Err(NetError::NoDevice);
        }
        let names: Vec<&str> = all.iter().map(|port| port.device.as_str()).collect();
        let unknown = config.devices.unknown(&names).join(", ");
        let ports: Vec<sysfs::Port> = all
            .iter()
            .filter(|port| config.devices.allows(&port.device, Some(port.number)))
            .cloned()
            .collect();
        if ports.is_empty() {
            let ports = names_of(&all);
            return Err(NetError::NoneAllowed { ports, unknown });
        }
        Ok(Self {
            lib,
            config: Arc::new(config),
            sys: sys.to_owned(),
            ports: Mutex::new(ports.into()),
            domains: Mutex::default(),
        })
    }

    /// The usable ports, up or down, as of the last [`Net::refresh`].
    #[must_use]
    pub fn ports(&self) -> Arc<[sysfs::Port]> {
        Arc::clone(&self.known())
    }

    fn known(&self) -> MutexGuard<'_, Arc<[sysfs::Port]>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the ports again, for connections that are made from now on. A port that was down may be up now, and faster than it was. A
    /// port that is gone stays in the list, as one that is down.
    ///
    /// # Errors
    /// No port is up.
    pub fn refresh(&self) -> Result<(), NetError> {
        let _standard = StandardTaken::new();
        let read = |known: &sysfs::Port| {
            let now = sysfs::port(&self.sys, &known.device, known.number);
            now.unwrap_or_else(|| sysfs::Port {
                active: false,
                ..known.clone()
            })
        };
        let ports: Arc<[sysfs::Port]> = self.ports().iter().map(read).collect();
        let is_any_up = ports.iter().any(|port| port.active);
        let names = names_of(&ports);
        *self.known() = ports;
        match is_any_up {
            true => Ok(()),
            false => Err(NetError::NoneUp { ports: names }),
        }
    }

    /// The configuration of the process.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Opens a port of [`Net::ports`]. Reads its table of GIDs again: a GID may have moved to another index since the port was down.
    ///
    /// # Errors
    /// The device cannot be opened, the port is gone, or as [`Port::new`].
    pub fn open(&self, index: usize) -> Result<Port, PortError> {
        let (pd, now) = self.domain(index)?;
        Port::new(&pd, &now, &self.config)
    }

    /// As [`Net::open`], for a port that may be down.
    ///
    /// # Errors
    /// The device cannot be opened, the port is gone, or as [`Port::standby`].
    pub fn standby(&self, index: usize) -> Result<Port, PortError> {
        let (pd, now) = self.domain(index)?;
        Port::standby(&pd, &now, &self.config)
    }

    /// The protection domain of a port's device, opened once, and the port as it is now.
    fn domain(&self, index: usize) -> Result<(Arc<Pd>, sysfs::Port), PortError> {
        let _standard = StandardTaken::new();
        let ports = self.ports();
        let known = ports.get(index).ok_or(PortError::NoIndex(index))?;
        let mut domains = self.domains.lock().unwrap_or_else(PoisonError::into_inner);
        let pd = match domains.get(&known.device) {
            Some(pd) => Arc::clone(pd),
            None => {
                let pd = Pd::new(Context::open(self.lib, &known.device)?)?;
                domains.insert(known.device.clone(), Arc::clone(&pd));
                pd
            }
        };
        drop(domains);
        let (device, number) = (known.device.as_str(), known.number);
        let now = sysfs::port(&self.sys, device, number).ok_or_else(|| PortError::Gone {
            port: format!("{device}:{number}"),
        })?;
        Ok((pd, now))
    }
}

/// Names of ports, for messages.
fn names_of(ports: &[sysfs::Port]) -> String {
    let names: Vec<String> = ports
        .iter()
        .map(|port| format!("{}:{}", port.device, port.number))
        .collect();
    names.join(", ")
}
