//! What a caller may choose for a communicator, and what the environment makes of it.

use ringsight_comm_base::{
    env,
    error::{Error, Result},
    log,
};

use crate::transport::rdma::NetworkChoice;

/// Most channels of a communicator: descriptions carry them as a mask of 64 bits.
pub(super) const MAX_CHANNELS: u32 = 32;

/// Choices for a communicator (`ncclConfig_t`), checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `blocking`: calls return when they are done; else `ncclInProgress`.
    pub blocking: bool,
    /// Fewest channels (`minCTAs`).
    pub min_channels: Option<u32>,
    /// Most channels (`maxCTAs`).
    pub max_channels: Option<u32>,
    /// `cgaClusterSize`: blocks of a cluster, 0 to 8; for kernels on a GPU.
    pub cga_cluster_size: Option<u32>,
    /// Network to use (`netName`).
    pub net_name: Option<String>,
    /// Children of a split share this communicator's proxy (`splitShare`).
    pub split_share: bool,
    /// Children of a shrink share this communicator's proxy (`shrinkShare`).
    pub shrink_share: bool,
    /// `trafficClass` of the network.
    pub traffic_class: Option<i32>,
    /// Name for traces (`commName`).
    pub name: String,
    /// `collnetEnable`: reductions in switches, where there are such.
    pub collnet: bool,
    /// `CTAPolicy`: 0 default, else the bits 1 (efficiency) and 2 (zero).
    pub cta_policy: u32,
    /// `nvlsCTAs`: channels for NVLink SHARP.
    pub nvls_channels: Option<u32>,
    /// `nChannelsPerNetPeer`.
    pub channels_per_net_peer: Option<u32>,
    /// `nvlinkCentricSched`.
    pub nvlink_centric: bool,
}

impl Default for Config {
    /// What NCCL takes where a caller chooses nothing.
    fn default() -> Self {
        Self {
            blocking: true,
            min_channels: None,
            max_channels: None,
            cga_cluster_size: None,
            net_name: None,
            split_share: false,
            shrink_share: false,
            traffic_class: None,
            name: String::new(),
            collnet: false,
            cta_policy: 0,
            nvls_channels: None,
            channels_per_net_peer: None,
            nvlink_centric: false,
        }
    }
}

impl Config {
    /// This config with what the environment says in its place: the environment wins over the program, as in NCCL, and
    /// a number out of its field's range is warned of and passed over, or the nearest one in range taken.
    ///
    /// # Errors
    /// A variable that is no number; a network that there is none of.
    pub fn overridden(self) -> Result<Self> {
        self.overridden_by(&env::text)
    }

    fn overridden_by(mut self, environment: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let number = |names: &[&str]| env::number_in::<i64>(environment, names);
        let nonsense = |names: &[&str], value: i64, instead: &str| {
            let names = names.join(" or ");
            tracing::warn!(target: log::ENV, "{names}={value} is out of range: {instead}");
        };
        let positive = |names: &[&str]| {
            Ok::<_, Error>(number(names)?.and_then(|value| {
                let sense = u32::try_from(value).ok().filter(|value| *value > 0);
                if sense.is_none() {
                    nonsense(names, value, "it is ignored");
                }
                sense
            }))
        };
        let channels = |names: &[&str]| {
            Ok::<_, Error>(positive(names)?.map(|value| {
                if value > MAX_CHANNELS {
                    nonsense(names, value.into(), &format!("{MAX_CHANNELS} is taken"));
                }
                value.min(MAX_CHANNELS)
            }))
        };
        let flag = |names: &[&str], field: &mut bool, else_off: bool| {
            match number(names)? {
                Some(value @ (0 | 1)) => *field = value == 1,
                // What is neither yes nor no switches sharing and offload off; other fields stay as they are.
                Some(value) if else_off => {
                    nonsense(names, value, "0 is taken");
                    *field = false;
                }
                Some(value) => nonsense(names, value, "it is ignored"),
                None => {}
            }
            Ok::<_, Error>(())
        };
        flag(&["NCCL_COMM_BLOCKING"], &mut self.blocking, false)?;
        flag(&["NCCL_COMM_SPLIT_SHARE_RESOURCES"], &mut self.split_share, true)?;
        flag(
            &["NCCL_COMM_SHRINK_SHARE_RESOURCES"],
            &mut self.shrink_share,
            true,
        )?;
        flag(&["NCCL_COLLNET_ENABLE"], &mut self.collnet, true)?;
        flag(
            &["NCCL_NVLINK_UTIL_CENTRIC_SCHED_ENABLE"],
            &mut self.nvlink_centric,
            false,
        )?;
        self.min_channels = channels(&["NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS"])?.or(self.min_channels);
        self.max_channels = channels(&["NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"])?.or(self.max_channels);
        self.nvls_channels = positive(&["NCCL_NVLS_NCHANNELS"])?.or(self.nvls_channels);
        self.channels_per_net_peer =
            positive(&["NCCL_NCHANNELS_PER_NET_PEER"])?.or(self.channels_per_net_peer);
        let cluster = &["NCCL_CGA_CLUSTER_SIZE"];
        match number(cluster)? {
            Some(size @ 0..=8) => self.cga_cluster_size = Some(size as u32),
            Some(size @ 9..) => {
                nonsense(cluster, size, "8 is taken");
                self.cga_cluster_size = Some(8);
            }
            Some(size) => nonsense(cluster, size, "it is ignored"),
            None => {}
        }
        let policy = &["NCCL_CTA_POLICY"];
        match number(policy)? {
            Some(value @ 0..=3) => self.cta_policy = value as u32,
            Some(value) => {
                nonsense(policy, value, "0 is taken");
                self.cta_policy = 0;
            }
            None => {}
        }
        if let Some(name) = environment("NCCL_NET").filter(|name| !name.is_empty()) {
            self.net_name = Some(name);
        }
        if let Some(name) = &self.net_name
            && NetworkChoice::parse(Some(name)).is_none()
        {
            return Err(Error::usage(format!(
                "network {name} (config.netName or environment variable NCCL_NET) is not there: IB and Socket are"
            )));
        }
        // The least maximum wins over the greatest minimum.
        if let (Some(min), Some(max)) = (self.min_channels, self.max_channels) {
            if min > max {
                tracing::warn!(target: log::ENV, "at least {min} channels and at most {max} are asked for: {max} are made");
            }
            self.min_channels = Some(min.min(max));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringsight_comm_base::error::ResultCode;

    fn with(config: Config, variables: &[(&str, &str)]) -> Result<Config> {
        config.overridden_by(&|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_environment_wins_over_the_program() {
        let asked = Config {
            min_channels: Some(3),
            max_channels: Some(6),
            ..Config::default()
        };
        assert_eq!(with(asked.clone(), &[]), Ok(asked.clone()));
        let changed = with(
            asked.clone(),
            &[
                ("NCCL_COMM_BLOCKING", "0"),
                ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1"),
                ("NCCL_COMM_SHRINK_SHARE_RESOURCES", "1"),
                ("NCCL_MIN_CTAS", "4"),
                ("NCCL_MAX_NCHANNELS", "5"),
                ("NCCL_CGA_CLUSTER_SIZE", "99"),
                ("NCCL_CTA_POLICY", "2"),
                ("NCCL_NVLS_NCHANNELS", "7"),
                ("NCCL_NCHANNELS_PER_NET_PEER", "2"),
                ("NCCL_NVLINK_UTIL_CENTRIC_SCHED_ENABLE", "1"),
                ("NCCL_COLLNET_ENABLE", "1"),
                ("NCCL_NET", "socket"),
            ],
        );
        let expected = Config {
            blocking: false,
            min_channels: Some(4),
            max_channels: Some(5),
            cga_cluster_size: Some(8),
            net_name: Some("socket".into()),
            split_share: true,
            shrink_share: true,
            collnet: true,
            cta_policy: 2,
            nvls_channels: Some(7),
            channels_per_net_peer: Some(2),
            nvlink_centric: true,
            ..Config::default()
        };
        assert_eq!(changed, Ok(expected));
    }

    #[test]
    fn numbers_that_make_no_sense_are_passed_over() {
        let asked = Config {
            min_channels: Some(3),
            split_share: true,
            ..Config::default()
        };
        let changed = with(
            asked.clone(),
            &[
                ("NCCL_COMM_BLOCKING", "2"),
                ("NCCL_MIN_CTAS", "0"),
                ("NCCL_MAX_NCHANNELS", "-4"),
                ("NCCL_CGA_CLUSTER_SIZE", "-1"),
                ("NCCL_CTA_POLICY", "4"),
                ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "2"),
            ],
        );
        let expected = Config {
            split_share: false,
            ..asked
        };
        assert_eq!(changed, Ok(expected));
    }

    #[test]
    fn more_channels_than_there_are_is_all_of_them() {
        let changed = with(
            Config::default(),
            &[("NCCL_MIN_CTAS", "9999"), ("NCCL_MAX_CTAS", "0")],
        );
        let expected = Config {
            min_channels: Some(MAX_CHANNELS),
            ..Config::default()
        };
        assert_eq!(changed, Ok(expected));
    }

    #[test]
    fn the_least_maximum_wins() {
        let config = Config {
            min_channels: Some(8),
            ..Config::default()
        };
        let config = with(config, &[("NCCL_MAX_CTAS", "2")]).unwrap();
        assert_eq!((config.min_channels, config.max_channels), (Some(2), Some(2)));
    }

    #[test]
    fn what_cannot_be_served_is_refused() {
        let refused = |variable, value| with(Config::default(), &[(variable, value)]).unwrap_err();
        let error = refused("NCCL_NET", "AWS Libfabric");
        assert_eq!(error.code, ResultCode::InvalidUsage);
        assert!(error.text.contains("NCCL_NET"), "{error}");
        let error = refused("NCCL_MIN_CTAS", "many");
        assert_eq!(error.code, ResultCode::InvalidArgument);
        assert!(error.text.contains("NCCL_MIN_CTAS=many"), "{error}");
    }
}
