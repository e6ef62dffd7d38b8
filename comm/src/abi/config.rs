//! Reading an `ncclConfig_t` of any version.

use std::ffi::{CStr, c_char, c_int};

use ringsight_comm_base::{
    error::{Error, Result},
    log, release,
};

use super::types::{CONFIG_MAGIC, CONFIG_UNDEF_INT, NcclConfig};
use crate::communicator::Config;

/// NCCL's `MAXCHANNELS`.
const MAX_CHANNELS: c_int = 64;
/// Size, magic and version: what every version's struct begins with.
const HEAD_BYTES: usize = 16;

/// What `NCCL_CONFIG_INITIALIZER` sets.
const INITIALIZER: NcclConfig = NcclConfig {
    size: size_of::<NcclConfig>(),
    magic: CONFIG_MAGIC,
    version: release::LIBRARY_VERSION,
    blocking: CONFIG_UNDEF_INT,
    cga_cluster_size: CONFIG_UNDEF_INT,
    min_ctas: CONFIG_UNDEF_INT,
    max_ctas: CONFIG_UNDEF_INT,
    net_name: std::ptr::null(),
    split_share: CONFIG_UNDEF_INT,
    traffic_class: CONFIG_UNDEF_INT,
    comm_name: std::ptr::null(),
    collnet_enable: CONFIG_UNDEF_INT,
    cta_policy: CONFIG_UNDEF_INT,
    shrink_share: CONFIG_UNDEF_INT,
    nvls_ctas: CONFIG_UNDEF_INT,
    n_channels_per_net_peer: CONFIG_UNDEF_INT,
    nvlink_centric_sched: CONFIG_UNDEF_INT,
    graph_usage_mode: CONFIG_UNDEF_INT,
    num_rma_ctx: CONFIG_UNDEF_INT,
    max_p2p_peers: CONFIG_UNDEF_INT,
    graph_stream_ordering: CONFIG_UNDEF_INT,
};
/// Fields of versions that are younger than this library: offset in bytes, and name. All are `int`, and since 2.31 or 2.32.
const YOUNGER: [(usize, &str); 5] = [
    (96, "launchOrderImplicit"),
    (100, "numRmaSig"),
    (104, "rmaEagerInit"),
    (108, "hostCftMode"),
    (112, "nvlsHostMode"),
];

/// Reads a config by NCCL's rule: as many bytes as both sides know, and of those the fields that existed in the version
/// that the caller was built against. The environment is not asked: that is [`Config::overridden`].
///
/// # Errors
/// The magic is not there; a field has a value that it cannot have.
///
/// # Safety
/// `pointer` points to a struct that begins with its size; the texts in it are C strings.
pub(crate) unsafe fn read(pointer: *const NcclConfig) -> Result<Config> {
    // SAFETY: every version begins with its size.
    let size = unsafe { (&raw const (*pointer).size).read_unaligned() };
    // The least that any version has; what is shorter has no magic to look at. Every version is a whole number of words: a
    // size between them would cut a pointer in half.
    if size < HEAD_BYTES || !size.is_multiple_of(align_of::<NcclConfig>()) {
        return Err(Error::argument(format!(
            "config.size ({size}) is not the size of any version's ncclConfig_t: initialise the struct with \
             NCCL_CONFIG_INITIALIZER"
        )));
    }
    let mut config = INITIALIZER;
    let known = size.min(known_bytes());
    // SAFETY: the caller's struct has `size` bytes, ours has `size_of` bytes, and both are plain data.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), (&raw mut config).cast(), known) };
    if config.magic != CONFIG_MAGIC {
        return Err(Error::argument(format!(
            "config.magic is {:#x}: initialise the struct with NCCL_CONFIG_INITIALIZER",
            config.magic
        )));
    }
    // SAFETY: as above.
    let younger = unsafe { younger_fields(pointer, size) };
    if !younger.is_empty() {
        tracing::info!(
            target: log::INIT,
            "config sets {}, which this library does not know: without effect",
            younger.join(", ")
        );
    }
    forget_what_came_later(&mut config);
    check(&config)?;
    let text = |pointer: *const c_char| {
        (!pointer.is_null()).then(|| {
            // SAFETY: not null, so a C string, says NCCL's documentation.
            unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
        })
    };
    let flag = |value: c_int, default: bool| {
        if value == CONFIG_UNDEF_INT {
            default
        } else {
            value == 1
        }
    };
    // `check` left nothing negative but the undefined.
    let number = |value: c_int| u32::try_from(value).ok();
    Ok(Config {
        blocking: flag(config.blocking, true),
        min_channels: number(config.min_ctas),
        max_channels: number(config.max_ctas),
        cga_cluster_size: number(config.cga_cluster_size),
        net_name: text(config.net_name),
        split_share: flag(config.split_share, false),
        shrink_share: flag(config.shrink_share, false),
        traffic_class: (config.traffic_class != CONFIG_UNDEF_INT).then_some(config.traffic_class),
        name: text(config.comm_name).unwrap_or_default(),
        collnet: flag(config.collnet_enable, false),
        cta_policy: number(config.cta_policy).unwrap_or(0),
        nvls_channels: number(config.nvls_ctas),
        channels_per_net_peer: number(config.n_channels_per_net_peer),
        nvlink_centric: flag(config.nvlink_centric_sched, false),
    })
}

/// Bytes of the struct of the release that the library says it is.
fn known_bytes() -> usize {
    match release::claimed_version() {
        22809 => std::mem::offset_of!(NcclConfig, graph_usage_mode),
        _ => size_of::<NcclConfig>(),
    }
}

/// What the caller sets of fields that are younger than this library.
///
/// # Safety
/// `pointer` points to `size` bytes.
unsafe fn younger_fields(pointer: *const NcclConfig, size: usize) -> Vec<String> {
    let set = |(offset, name): (usize, &str)| {
        if offset + size_of::<c_int>() > size {
            return None;
        }
        // SAFETY: within the caller's `size` bytes.
        let value = unsafe { pointer.cast::<u8>().add(offset).cast::<c_int>().read_unaligned() };
        (value != CONFIG_UNDEF_INT).then(|| format!("{name} ({value})"))
    };
    let mut fields: Vec<String> = YOUNGER.into_iter().filter_map(set).collect();
    // Nobody knows yet what comes behind.
    let known = size_of::<NcclConfig>() + YOUNGER.len() * size_of::<c_int>();
    let known = known.next_multiple_of(align_of::<NcclConfig>());
    if size > known {
        fields.push(format!("{} bytes behind nvlsHostMode", size - known));
    }
    fields
}

/// Sets every field to its default that is younger than the caller's version: what is there is padding, or not the
/// caller's to give. (NCCL believes a `trafficClass` from 2.25 on, where it is padding still.)
fn forget_what_came_later(config: &mut NcclConfig) {
    let version = config.version;
    if version < 21400 {
        config.blocking = INITIALIZER.blocking;
    }
    if version < 21700 {
        config.cga_cluster_size = INITIALIZER.cga_cluster_size;
        config.min_ctas = INITIALIZER.min_ctas;
        config.max_ctas = INITIALIZER.max_ctas;
        config.net_name = INITIALIZER.net_name;
    }
    if version < 21800 {
        config.split_share = INITIALIZER.split_share;
    }
    if version < 22600 {
        config.traffic_class = INITIALIZER.traffic_class;
    }
    if version < 22700 {
        config.comm_name = INITIALIZER.comm_name;
        config.collnet_enable = INITIALIZER.collnet_enable;
        config.cta_policy = INITIALIZER.cta_policy;
        config.shrink_share = INITIALIZER.shrink_share;
        config.nvls_ctas = INITIALIZER.nvls_ctas;
    }
    if version < 22800 {
        config.n_channels_per_net_peer = INITIALIZER.n_channels_per_net_peer;
        config.nvlink_centric_sched = INITIALIZER.nvlink_centric_sched;
    }
    if version < 22900 {
        config.graph_usage_mode = INITIALIZER.graph_usage_mode;
        config.num_rma_ctx = INITIALIZER.num_rma_ctx;
    }
    if version < 23000 {
        config.max_p2p_peers = INITIALIZER.max_p2p_peers;
    }
    if version < 23005 {
        config.graph_stream_ordering = INITIALIZER.graph_stream_ordering;
    }
}

/// NCCL's checks, field by field.
fn check(config: &NcclConfig) -> Result<()> {
    let undefined = |value: c_int| value == CONFIG_UNDEF_INT;
    let within = |name: &str, value: c_int, allowed: std::ops::RangeInclusive<c_int>, what: &str| {
        if undefined(value) || allowed.contains(&value) {
            return Ok(());
        }
        Err(Error::argument(format!("config.{name} ({value}) is {what}")))
    };
    let (any, neither) = (c_int::MAX, "neither 0 nor 1");
    within("blocking", config.blocking, 0..=1, neither)?;
    within("cgaClusterSize", config.cga_cluster_size, 0..=any, "negative")?;
    within("minCTAs", config.min_ctas, 1..=any, "not a positive number")?;
    within("maxCTAs", config.max_ctas, 1..=any, "not a positive number")?;
    // As NCCL compares, an undefined maximum is less than any minimum.
    if config.min_ctas > config.max_ctas {
        let (min, max) = (config.min_ctas, config.max_ctas);
        return Err(Error::argument(if undefined(max) {
            format!("config.minCTAs ({min}) is set and config.maxCTAs is not: set both")
        } else {
            format!("config.minCTAs ({min}) is more than config.maxCTAs ({max})")
        }));
    }
    within("splitShare", config.split_share, 0..=1, neither)?;
    within("collnetEnable", config.collnet_enable, 0..=1, neither)?;
    let policies = "none of the policies 0 (default), 1 (efficiency), 2 (zero) and 3 (both)";
    within("CTAPolicy", config.cta_policy, 0..=3, policies)?;
    within("shrinkShare", config.shrink_share, 0..=1, neither)?;
    within("nvlsCTAs", config.nvls_ctas, 1..=any, "not a positive number")?;
    within(
        "nChannelsPerNetPeer",
        config.n_channels_per_net_peer,
        1..=MAX_CHANNELS,
        "not between 1 and 64",
    )?;
    within("nvlinkCentricSched", config.nvlink_centric_sched, 0..=1, neither)?;
    within(
        "graphUsageMode",
        config.graph_usage_mode,
        0..=2,
        "none of the modes 0, 1 and 2",
    )?;
    within("numRmaCtx", config.num_rma_ctx, 0..=any, "negative")?;
    within(
        "maxP2pPeers",
        config.max_p2p_peers,
        1..=any,
        "not a positive number",
    )?;
    within(
        "graphStreamOrdering",
        config.graph_stream_ordering,
        0..=1,
        neither,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringsight_comm_base::error::ResultCode;

    /// Sizes of the struct in (2.14, 2.17, 2.18 to 2.26, 2.27, 2.28, 2.29, 2.30, 2.31, 2.32).
    const SIZES: [(u32, usize); 11] = [
        (21400, 24),
        (21701, 40),
        (21801, 48),
        (22403, 48),
        (22602, 48),
        (22705, 72),
        (22809, 80),
        (22902, 88),
        (23007, 96),
        (23102, 112),
        (23203, 120),
    ];

    /// A struct of a version with its fields at their offsets, and rubbish wherever the version has none.
    fn read_words(version: u32, size: usize, fields: &[(usize, c_int)]) -> Result<Config> {
        let mut memory = [0x5555_5555_u32; 32];
        let head = [size as u32, 0, CONFIG_MAGIC, version];
        memory[..4].copy_from_slice(&head);
        let pointers = [(32, 21700), (48, 22700)];
        for offset in (16..size).step_by(4) {
            memory[offset / 4] = CONFIG_UNDEF_INT.cast_unsigned();
        }
        for (offset, since) in pointers {
            if version >= since {
                memory[offset / 4..offset / 4 + 2].fill(0);
            }
        }
        for (padding, until) in [(20, 21700), (44, 22600)] {
            if version < until {
                memory[padding / 4] = 0x5555_5555;
            }
        }
        for (offset, value) in fields {
            memory[offset / 4] = value.cast_unsigned();
        }
        // SAFETY: as long as any version's struct; its pointers are null where the version has them.
        unsafe { read(memory.as_ptr().cast()) }
    }

    #[test]
    fn every_version_is_read() {
        for (version, size) in SIZES {
            assert_eq!(read_words(version, size, &[]), Ok(Config::default()), "{version}");
            let config = read_words(version, size, &[(16, 0)]).unwrap();
            assert!(!config.blocking, "{version}");
        }
    }

    #[test]
    fn fields_count_from_their_version_on() {
        type Field = (usize, c_int, u32, fn(&mut Config));
        let fields: [Field; 11] = [
            (16, 0, 21400, |config| config.blocking = false),
            (20, 3, 21700, |config| config.cga_cluster_size = Some(3)),
            (28, 9, 21700, |config| config.max_channels = Some(9)),
            (40, 1, 21800, |config| config.split_share = true),
            (44, 4, 22600, |config| config.traffic_class = Some(4)),
            (56, 1, 22700, |config| config.collnet = true),
            (60, 2, 22700, |config| config.cta_policy = 2),
            (64, 1, 22700, |config| config.shrink_share = true),
            (68, 6, 22700, |config| config.nvls_channels = Some(6)),
            (72, 5, 22800, |config| config.channels_per_net_peer = Some(5)),
            (76, 1, 22800, |config| config.nvlink_centric = true),
        ];
        for (version, size) in SIZES {
            for (offset, value, since, change) in fields {
                let mut expected = Config::default();
                if version >= since {
                    change(&mut expected);
                }
                let read = read_words(version, size, &[(offset, value)]);
                assert_eq!(read, Ok(expected), "version {version}, offset {offset}");
            }
        }
    }

    /// The bytes behind the fields of 2.28 are not looked at, whatever is in them.
    #[test]
    fn fields_of_a_younger_version_are_named_and_have_no_effect() {
        let names = |size: usize, fields: &[(usize, c_int)]| {
            let mut memory = [CONFIG_UNDEF_INT; 40];
            fields
                .iter()
                .for_each(|(offset, value)| memory[offset / 4] = *value);
            // SAFETY: longer than `size`.
            unsafe { younger_fields(memory.as_ptr().cast(), size) }
        };
        assert_eq!(names(96, &[(96, 1)]), [""; 0]);
        assert_eq!(names(112, &[(100, 7), (112, 1)]), ["numRmaSig (7)"]);
        assert_eq!(names(120, &[(112, 1)]), ["nvlsHostMode (1)"]);
        assert_eq!(names(136, &[]), ["16 bytes behind nvlsHostMode"]);
        let set = [(96, 1), (112, 1)];
        assert_eq!(read_words(23203, 120, &set), Ok(Config::default()));
    }

    #[test]
    fn impossible_values_are_refused_by_name() {
        let cases = [
            (16, 2, "config.blocking (2)"),
            (20, -1, "config.cgaClusterSize (-1)"),
            (24, 0, "config.minCTAs (0)"),
            (24, 4, "config.minCTAs (4)"),
            (28, -3, "config.maxCTAs (-3)"),
            (40, 2, "config.splitShare (2)"),
            (56, -1, "config.collnetEnable (-1)"),
            (60, 4, "config.CTAPolicy (4)"),
            (64, 7, "config.shrinkShare (7)"),
            (68, 0, "config.nvlsCTAs (0)"),
            (72, 65, "config.nChannelsPerNetPeer (65)"),
            (76, 2, "config.nvlinkCentricSched (2)"),
            (80, 3, "config.graphUsageMode (3)"),
            (84, -2, "config.numRmaCtx (-2)"),
            (88, 0, "config.maxP2pPeers (0)"),
            (92, 2, "config.graphStreamOrdering (2)"),
        ];
        for (offset, value, text) in cases {
            let error = read_words(23007, 96, &[(offset, value)]).unwrap_err();
            assert_eq!(error.code, ResultCode::InvalidArgument);
            assert!(error.text.starts_with(text), "{error}");
        }
        let error = read_words(22809, 80, &[(24, 8), (28, 4)]).unwrap_err();
        assert!(error.text.contains("more than config.maxCTAs (4)"), "{error}");
        let error = read_words(22809, 80, &[(8, 1)]).unwrap_err();
        assert!(error.text.starts_with("config.magic is 0x1"), "{error}");
        for size in [15, 50, 79] {
            let error = read_words(22809, size, &[]).unwrap_err();
            assert!(
                error.text.starts_with(&format!("config.size ({size})")),
                "{error}"
            );
        }
    }
}
