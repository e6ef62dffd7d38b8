//! RDMA configuration from the environment, with NCCL's names and defaults.

use ringsight_comm_base::{env, names::NameFilter};

use crate::{
    choice::{Cross, Distance},
    queue::RetryPolicy,
    sysfs::Range,
};

/// Maximum number of queue pairs of a path.
pub const MAX_QPS: usize = 16;

/// The RDMA configuration of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Devices and ports that may be used: `NCCL_IB_HCA`.
    pub devices: NameFilter,
    /// `NCCL_IB_GID_INDEX`; `None`: chosen.
    pub gid_index: Option<u8>,
    /// `NCCL_IB_ROCE_VERSION_NUM`: the preferred RoCE version of a GID.
    pub roce_version: u8,
    /// `NCCL_IB_ADDR_FAMILY`: GIDs of IPv6 addresses are preferred to those of IPv4.
    pub ipv6: bool,
    /// `NCCL_IB_TIMEOUT` and `NCCL_IB_RETRY_CNT`.
    pub retry: RetryPolicy,
    /// `NCCL_IB_QPS_PER_CONNECTION`, [`MAX_QPS`] at most.
    pub qps: usize,
    /// The number that `NCCL_IB_QPS_PER_CONNECTION` asked for, if it exceeds [`MAX_QPS`].
    pub qps_asked: Option<usize>,
    /// `NCCL_IB_SPLIT_DATA_ON_QPS`: each step is split over all queue pairs, instead of using them in turn.
    pub split: bool,
    /// `NCCL_IB_SL`; `None`: the connection's owner decides.
    pub service_level: Option<u8>,
    /// `NCCL_IB_TC`; `None`: the connection's owner decides.
    pub traffic_class: Option<u8>,
    /// `NCCL_IB_PKEY`: an index.
    pub pkey_index: u16,
    /// `NCCL_IB_PCI_RELAXED_ORDERING`: 0 never, 1 and 2 if the library supports it.
    pub relaxed_ordering: bool,
    /// `RINGSIGHT_NET_FAILOVER`, or `NCCL_ENABLE_FAULT_TOLERANCE`: connections have a backup.
    pub failover: bool,
    /// Which devices access memory of GPUs.
    pub gpu_direct: GpuDirect,
    /// `NCCL_CROSS_NIC`.
    pub cross: Cross,
    /// `NCCL_IB_ADDR_RANGE`: the preferred addresses of a RoCE port's GID.
    pub range: Option<Range>,
    /// Variables that are set and have no effect, with the reason.
    pub without_effect: Vec<(&'static str, &'static str)>,
}

/// When RDMA devices access slots in the memory of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuDirect {
    /// `NCCL_NET_GDR_LEVEL`: maximum distance between GPU and device; `None`: never.
    pub level: Option<Distance>,
    /// `NCCL_DMABUF_ENABLE`. ringsight supports dma-buf only.
    pub dma_buf: bool,
    /// `NCCL_NET_GDR_READ`: also slots that are sent.
    pub read: bool,
}

impl Default for GpuDirect {
    fn default() -> Self {
        Self {
            level: Some(Distance::Pxb),
            dma_buf: true,
            read: true,
        }
    }
}

impl GpuDirect {
    /// Parses `NCCL_NET_GDR_LEVEL`: `LOC` (no device), a distance, or one of NCCL's older numbers.
    fn level(value: &str) -> Option<Option<Distance>> {
        match value.trim() {
            "0" => Some(None),
            name if name.eq_ignore_ascii_case("LOC") => Some(None),
            "1" => Some(Some(Distance::Pix)),
            "2" => Some(Some(Distance::Pxb)),
            "3" => Some(Some(Distance::Phb)),
            "4" | "5" => Some(Some(Distance::Sys)),
            name => Distance::parse(name).map(Some),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            devices: NameFilter::default(),
            gid_index: None,
            roce_version: 2,
            ipv6: false,
            retry: RetryPolicy {
                timeout: 20,
                retries: 7,
            },
            qps: 1,
            split: false,
            service_level: None,
            traffic_class: None,
            pkey_index: 0,
            relaxed_ordering: true,
            failover: true,
            gpu_direct: GpuDirect::default(),
            cross: Cross::default(),
            range: None,
            qps_asked: None,
            without_effect: Vec::new(),
        }
    }
}

/// A variable with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value}: {wanted}")]
pub struct InvalidVariable {
    /// The variable.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// The accepted values.
    pub wanted: &'static str,
}

impl Config {
    /// Service level and traffic class of a connection whose owner asks for `class`. The environment has precedence; the default is 0. A
    /// service level has four bits.
    #[must_use]
    pub fn classes(&self, class: Option<u8>) -> (u8, u8) {
        let level = self.service_level.or(class.map(|class| class & 15));
        let class = self.traffic_class.or(class);
        (level.unwrap_or(0), class.unwrap_or(0))
    }

    /// Reads the configuration by `lookup`; `None` if `NCCL_IB_DISABLE` is set.
    ///
    /// # Errors
    /// A value is no number, or out of range.
    pub fn from_environment(
        lookup: impl Fn(&'static str) -> Option<String>,
    ) -> Result<Option<Self>, InvalidVariable> {
        let number = |name: &'static str, least: i64, most: i64, wanted: &'static str| {
            let Some(value) = lookup(name) else {
                return Ok(None);
            };
            match env::parse(name, &value) {
                Some(number) if (least..=most).contains(&number) => Ok(Some(number)),
                _ => Err(InvalidVariable { name, value, wanted }),
            }
        };
        if number("NCCL_IB_DISABLE", 0, i64::MAX, "0 or 1 is wanted")?.is_some_and(|value| value != 0) {
            return Ok(None);
        }
        let mut config = Self::default();
        if let Some(text) = lookup("NCCL_IB_HCA") {
            config.devices = NameFilter::parse(&text);
        }
        if let Some(index) = number(
            "NCCL_IB_GID_INDEX",
            -1,
            255,
            "an index from 0 to 255 is wanted, or -1",
        )? {
            config.gid_index = u8::try_from(index).ok();
        }
        if let Some(version) = number("NCCL_IB_ROCE_VERSION_NUM", 1, 2, "1 or 2 is wanted")? {
            config.roce_version = version as u8;
        }
        match lookup("NCCL_IB_ADDR_FAMILY") {
            None => {}
            Some(family) if family == "AF_INET" => config.ipv6 = false,
            Some(family) if family == "AF_INET6" => config.ipv6 = true,
            Some(value) => {
                let (name, wanted) = ("NCCL_IB_ADDR_FAMILY", "AF_INET or AF_INET6 is wanted");
                return Err(InvalidVariable { name, value, wanted });
            }
        }
        if let Some(timeout) = number("NCCL_IB_TIMEOUT", 0, 31, "an exponent from 0 to 31 is wanted")? {
            config.retry.timeout = timeout as u8;
        }
        if let Some(retries) = number("NCCL_IB_RETRY_CNT", 0, 7, "a number from 0 to 7 is wanted")? {
            config.retry.retries = retries as u8;
        }
        // NCCL's maximum is 128; larger values than ours are reduced to ours.
        let wanted = "a number from 1 to 128 is wanted (of which 16 are used at most)";
        if let Some(qps) = number("NCCL_IB_QPS_PER_CONNECTION", 1, 128, wanted)? {
            let qps = qps as usize;
            config.qps = qps.min(MAX_QPS);
            config.qps_asked = (qps > MAX_QPS).then_some(qps);
        }
        if let Some(split) = number("NCCL_IB_SPLIT_DATA_ON_QPS", 0, 1, "0 or 1 is wanted")? {
            config.split = split == 1;
        }
        // NCCL's value for "not set" is -1, as for the index above.
        let wanted = "a service level from 0 to 15 is wanted, or -1";
        if let Some(level) = number("NCCL_IB_SL", -1, 15, wanted)? {
            config.service_level = u8::try_from(level).ok();
        }
        let wanted = "a traffic class from 0 to 255 is wanted, or -1";
        if let Some(class) = number("NCCL_IB_TC", -1, 255, wanted)? {
            config.traffic_class = u8::try_from(class).ok();
        }
        if let Some(index) = number("NCCL_IB_PKEY", 0, 65535, "an index from 0 to 65535 is wanted")? {
            config.pkey_index = index as u16;
        }
        if let Some(relaxed) = number("NCCL_IB_PCI_RELAXED_ORDERING", 0, 2, "0, 1 or 2 is wanted")? {
            config.relaxed_ordering = relaxed != 0;
        }
        let switches = ["NCCL_ENABLE_FAULT_TOLERANCE", "RINGSIGHT_NET_FAILOVER"];
        // ringsight's own variable has precedence.
        for name in switches {
            if let Some(on) = number(name, 0, 1, "0 or 1 is wanted")? {
                config.failover = on == 1;
            }
        }
        if let Some(value) = lookup("NCCL_NET_GDR_LEVEL") {
            let (name, wanted) = ("NCCL_NET_GDR_LEVEL", "LOC, PIX, PXB, PHB, NODE or SYS is wanted");
            config.gpu_direct.level =
                GpuDirect::level(&value).ok_or(InvalidVariable { name, value, wanted })?;
        }
        if let Some(on) = number("NCCL_DMABUF_ENABLE", 0, 1, "0 or 1 is wanted")? {
            config.gpu_direct.dma_buf = on == 1;
        }
        if let Some(on) = number("NCCL_NET_GDR_READ", 0, 1, "0 or 1 is wanted")? {
            config.gpu_direct.read = on == 1;
        }
        if let Some(cross) = number("NCCL_CROSS_NIC", 0, 2, "0, 1 or 2 is wanted")? {
            config.cross = match cross {
                0 => Cross::Never,
                1 => Cross::Any,
                _ => Cross::Avoid,
            };
        }
        let (merge, threshold) = ("NCCL_IB_MERGE_NICS", "NCCL_IB_AR_THRESHOLD");
        if number(merge, 0, 1, "0 or 1 is wanted")? == Some(1) {
            let why = "a connection uses one port of a card, and the other stands by";
            config.without_effect.push((merge, why));
        }
        if number(threshold, 0, i64::MAX, "a number of bytes is wanted")?.is_some() {
            let why = "data of more than 48 bytes always go as a message of their own, which adaptive routing may send any way";
            config.without_effect.push((threshold, why));
        }
        if let Some(value) = lookup("NCCL_IB_ADDR_RANGE") {
            let (name, wanted) = ("NCCL_IB_ADDR_RANGE", "address/bits is wanted");
            config.range = Some(Range::parse(&value).ok_or(InvalidVariable { name, value, wanted })?);
        }
        let set = WITHOUT_EFFECT.iter().filter(|(name, _)| lookup(name).is_some());
        config.without_effect.extend(set);
        Ok(Some(config))
    }
}

/// NCCL's variables that have no effect, with the reason.
const WITHOUT_EFFECT: [(&str, &str); 16] = [
    (
        "NCCL_IB_ADAPTIVE_ROUTING",
        "packets may go any way: what tells of data comes after them in any case",
    ),
    ("NCCL_IB_FIFO_TC", "credits go over the queue pairs of the data"),
    (
        "NCCL_IB_ECE_ENABLE",
        "queue pairs are connected without enhanced connection establishment",
    ),
    ("NCCL_IB_USE_INLINE", "what tells of data always goes inline"),
    (
        "NCCL_IB_SUBNET_AWARE_ROUTING",
        "ports are chosen by their distance alone",
    ),
    (
        "NCCL_IB_RESILIENCY_PORT_FAILOVER",
        "RINGSIGHT_NET_FAILOVER says whether a failed port is survived",
    ),
    (
        "NCCL_IB_MERGE_VFS",
        "functions are not merged: a connection uses one port, and another one stands by",
    ),
    ("NCCL_IB_DATA_DIRECT", "a GPU's memory is reached by dma-buf"),
    (
        "NCCL_IB_WARN_RAIL_LOCAL",
        "the log says which port each connection uses",
    ),
    (
        "NCCL_IB_ROUTABLE_FLID_GID_INDEX",
        "addresses of InfiniBand are of one subnet, or NCCL_IB_GID_INDEX names one",
    ),
    (
        "NCCL_GDR_FLUSH_DISABLE",
        "what a device wrote to a GPU's memory is always flushed",
    ),
    (
        "NCCL_NET_GDR_C2C",
        "NCCL_NET_GDR_LEVEL says when a device reaches a GPU's memory",
    ),
    ("NCCL_NET_PLUGIN", "networks are the library's own"),
    (
        "NCCL_P2P_NET_CHUNKSIZE",
        "a message is cut by the size of the slots",
    ),
    (
        "NCCL_SOCKET_NTHREADS",
        "one progress thread serves a communicator's sockets",
    ),
    ("NCCL_NSOCKS_PERTHREAD", "a connection is one socket"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_range_name_their_variable() {
        let with = |name: &'static str, value: &'static str| {
            Config::from_environment(move |asked| (asked == name).then(|| value.to_owned()))
        };
        assert_eq!(with("NCCL_IB_DISABLE", "1"), Ok(None));
        assert_eq!(with("NCCL_IB_DISABLE", "0"), Ok(Some(Config::default())));
        for (name, value) in [
            ("NCCL_IB_TIMEOUT", "32"),
            ("NCCL_IB_RETRY_CNT", "8"),
            ("NCCL_IB_GID_INDEX", "256"),
            ("NCCL_IB_QPS_PER_CONNECTION", "0"),
            ("NCCL_IB_QPS_PER_CONNECTION", "129"),
            ("NCCL_IB_SL", "x"),
            ("NCCL_IB_ADDR_FAMILY", "AF_UNIX"),
            ("RINGSIGHT_NET_FAILOVER", "yes"),
            ("NCCL_NET_GDR_LEVEL", "6"),
            ("NCCL_NET_GDR_LEVEL", "NEAR"),
            ("NCCL_DMABUF_ENABLE", "2"),
            ("NCCL_NET_GDR_READ", "on"),
            ("NCCL_CROSS_NIC", "3"),
            ("NCCL_IB_MERGE_NICS", "2"),
            ("NCCL_IB_AR_THRESHOLD", "-1"),
            ("NCCL_IB_ADDR_RANGE", "10.0.0.0"),
        ] {
            let error = with(name, value).unwrap_err();
            assert!(
                error.to_string().starts_with(&format!("{name}={value}: ")),
                "{error}"
            );
        }
        let config = with("NCCL_IB_GID_INDEX", "3").unwrap().unwrap();
        assert_eq!(config.gid_index, Some(3));
        assert_eq!(with("NCCL_IB_GID_INDEX", "-1").unwrap().unwrap().gid_index, None);
        for (value, cross) in [("0", Cross::Never), ("1", Cross::Any), ("2", Cross::Avoid)] {
            assert_eq!(with("NCCL_CROSS_NIC", value).unwrap().unwrap().cross, cross);
        }
        let qps = |value| {
            let config = with("NCCL_IB_QPS_PER_CONNECTION", value).unwrap().unwrap();
            (config.qps, config.qps_asked)
        };
        assert_eq!(qps("16"), (16, None));
        assert_eq!(qps("128"), (MAX_QPS, Some(128)));
        let off = with("NCCL_ENABLE_FAULT_TOLERANCE", "0").unwrap().unwrap();
        assert!(!off.failover);
    }

    #[test]
    fn variables_without_effect_are_reported() {
        let reported = |name: &'static str, value: &'static str| {
            let lookup = move |asked| (asked == name).then(|| value.to_owned());
            let config = Config::from_environment(lookup).unwrap().unwrap();
            let names: Vec<_> = config.without_effect.iter().map(|(name, _)| *name).collect();
            names
        };
        assert_eq!(reported("NCCL_IB_MERGE_NICS", "1"), ["NCCL_IB_MERGE_NICS"]);
        assert!(reported("NCCL_IB_MERGE_NICS", "0").is_empty(), "the default");
        assert_eq!(reported("NCCL_IB_AR_THRESHOLD", "0"), ["NCCL_IB_AR_THRESHOLD"]);
        for (name, _) in WITHOUT_EFFECT {
            assert_eq!(reported(name, "1"), [name]);
        }
    }

    #[test]
    fn the_environment_overrides_the_traffic_class() {
        let classes = |variables: &'static [(&str, &str)], wished| {
            let lookup = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            Config::from_environment(lookup).unwrap().unwrap().classes(wished)
        };
        assert_eq!(classes(&[], None), (0, 0));
        assert_eq!(classes(&[], Some(0x68)), (8, 0x68));
        assert_eq!(classes(&[("NCCL_IB_TC", "106")], Some(5)), (5, 106));
        assert_eq!(classes(&[("NCCL_IB_TC", "0x6a")], Some(5)), (5, 106));
        assert_eq!(classes(&[("NCCL_IB_SL", "3")], Some(5)), (3, 5));
        assert_eq!(
            classes(&[("NCCL_IB_SL", "-1"), ("NCCL_IB_TC", "-1")], Some(5)),
            (5, 5)
        );
        assert_eq!(
            classes(&[("NCCL_IB_SL", "0"), ("NCCL_IB_TC", "0")], Some(5)),
            (0, 0)
        );
    }

    #[test]
    fn levels_are_distances_and_their_older_numbers() {
        let level = |value: &'static str| {
            let lookup = move |name: &str| (name == "NCCL_NET_GDR_LEVEL").then(|| value.to_owned());
            Config::from_environment(lookup)
                .unwrap()
                .unwrap()
                .gpu_direct
                .level
        };
        assert_eq!(GpuDirect::default().level, Some(Distance::Pxb), "NCCL's default");
        for (value, wanted) in [
            ("LOC", None),
            ("0", None),
            ("PIX", Some(Distance::Pix)),
            ("pxb", Some(Distance::Pxb)),
            ("PHB", Some(Distance::Phb)),
            ("NODE", Some(Distance::Node)),
            (" SYS ", Some(Distance::Sys)),
            ("2", Some(Distance::Pxb)),
            ("4", Some(Distance::Sys)),
            ("5", Some(Distance::Sys)),
        ] {
            assert_eq!(level(value), wanted, "{value}");
        }
    }
}
