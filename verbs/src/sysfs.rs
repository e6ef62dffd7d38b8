//! RDMA ports as the kernel lists them in `/sys`. Every choice of a port is made from this, so a recorded tree serves as well as `/sys`.

use std::{fs, io, net::IpAddr, path::Path};

/// One port of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Name of the device.
    pub device: String,
    /// Number of the port, from 1.
    pub number: u8,
    /// Where the device is; `None` for a software device.
    pub place: Option<Place>,
    /// The port is up.
    pub active: bool,
    /// The link layer is Ethernet: RoCE.
    pub ethernet: bool,
    /// Rate, Gbit/s.
    pub gbits: u32,
    /// The port's GIDs, by index, without empty entries.
    pub gids: Vec<Gid>,
}

/// Where a PCI device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its path in `/sys/devices`, from the first host bridge on: host bridge, bridges, device.
    pub path: Vec<String>,
    /// NUMA node, if the machine has several.
    pub numa: Option<u32>,
    /// For a virtual function, the address of its physical function. `None` in a virtual machine to which the function was passed.
    pub virtual_of: Option<String>,
}

impl Place {
    /// Address of the device itself, as `0000:01:00.0`.
    #[must_use]
    pub fn address(&self) -> &str {
        self.path.last().map_or("", String::as_str)
    }

    /// Address of the physical function that has the ports. A virtual function's is another device's; a subfunction's
    /// (`0000:01:00.0/mlx5_core.sf.4`) is its parent's.
    #[must_use]
    pub fn physical(&self) -> &str {
        let own = self.path.iter().rev().find(|part| is_pci_address(part));
        self.virtual_of.as_ref().or(own).map_or("", String::as_str)
    }

    /// The place of a PCI device in the tree at `sys`. `link` is its folder, or a link to it (`/sys/bus/pci/devices/0000:01:00.0`).
    ///
    /// # Errors
    /// There is no such device.
    pub fn of(sys: &Path, link: &Path) -> io::Result<Self> {
        let folder = fs::canonicalize(link)?;
        let devices = fs::canonicalize(sys)?.join("devices");
        let path = folder
            .strip_prefix(&devices)
            .map_err(|_| {
                io::Error::new(
                    io::ErrorKind::NotFound,
                    format!("{} is no device", folder.display()),
                )
            })?
            .iter()
            .map(|part| part.to_string_lossy().into_owned())
            // Buses above the host bridge are not PCI: virtual machines have all devices below one such bus.
            .skip_while(|part| !part.starts_with("pci"))
            .collect();
        let numa = text(&folder.join("numa_node")).and_then(|node| node.parse().ok());
        let physical = fs::read_link(folder.join("physfn")).ok();
        let virtual_of = physical
            .as_deref()
            .and_then(Path::file_name)
            .map(|name| name.to_string_lossy().into_owned());
        Ok(Self {
            path,
            numa,
            virtual_of,
        })
    }
}

/// `0000:01:00.0`: domain, bus, device and function. A domain may have more digits than four.
fn is_pci_address(text: &str) -> bool {
    let is_hex = |text: &str, least: usize, most: usize| {
        (least..=most).contains(&text.len()) && text.bytes().all(|digit| digit.is_ascii_hexdigit())
    };
    let Some((place, function)) = text.rsplit_once('.') else {
        return false;
    };
    let parts: Vec<&str> = place.split(':').collect();
    matches!(parts[..], [domain, bus, device] if is_hex(domain, 4, 8) && is_hex(bus, 2, 2) && is_hex(device, 2, 2))
        && is_hex(function, 1, 1)
}

/// One entry of a port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Its index.
    pub index: u8,
    /// Its bytes.
    pub bytes: [u8; 16],
    /// RoCE version, 1 or 2; `None` for InfiniBand, or if it is unknown.
    pub roce: Option<u8>,
}

impl Gid {
    /// Whether it is the GID of an IPv4 address: `::ffff:a.b.c.d`.
    #[must_use]
    pub fn is_ipv4(&self) -> bool {
        self.bytes[..10] == [0; 10] && self.bytes[10..12] == [0xff, 0xff]
    }

    /// Whether it is a link-local address.
    #[must_use]
    pub fn is_link_local(&self) -> bool {
        self.bytes[0] == 0xfe && self.bytes[1] & 0xc0 == 0x80
    }
}

/// A range of addresses with a common prefix: `NCCL_IB_ADDR_RANGE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// An address of the range, as a GID.
    first: [u8; 16],
    /// Length of the prefix, bits.
    bits: u8,
}

impl Range {
    /// Reads `address/bits`, of either family.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (address, bits) = text.trim().split_once('/')?;
        let bits: u8 = bits.parse().ok()?;
        let (address, skipped, most) = match address.parse().ok()? {
            IpAddr::V4(address) => (address.to_ipv6_mapped(), 96, 32),
            IpAddr::V6(address) => (address, 0, 128),
        };
        (bits <= most).then_some(Self {
            first: address.octets(),
            bits: skipped + bits,
        })
    }

    /// Whether a GID's address is in the range.
    #[must_use]
    pub fn has(&self, gid: &Gid) -> bool {
        let differ = u128::from_be_bytes(self.first) ^ u128::from_be_bytes(gid.bytes);
        differ.leading_zeros() >= self.bits.into()
    }
}

/// The ports of all RDMA devices in the tree at `sys` (`/sys`), by device name and port number. Empty without RDMA.
#[must_use]
pub fn ports(sys: &Path) -> Vec<Port> {
    let class = sys.join("class/infiniband");
    let mut found = Vec::new();
    for device in names(&class) {
        let folder = class.join(&device);
        let place = Place::of(sys, &folder.join("device")).ok();
        for number in names(&folder.join("ports")) {
            if let Ok(port) = number.parse() {
                found.push(read(
                    &device,
                    port,
                    place.clone(),
                    &folder.join("ports").join(&number),
                ));
            }
        }
    }
    found.sort_by(|a, b| {
        order(&a.device)
            .cmp(&order(&b.device))
            .then(a.number.cmp(&b.number))
    });
    found
}

/// One port as it is now; `None` if it does not exist.
#[must_use]
pub fn port(sys: &Path, device: &str, number: u8) -> Option<Port> {
    let folder = sys.join("class/infiniband").join(device);
    let place = Place::of(sys, &folder.join("device")).ok();
    let port = folder.join("ports").join(number.to_string());
    port.exists().then(|| read(device, number, place, &port))
}

/// Names sort with their numbers: `mlx5_2` before `mlx5_10`.
fn order(name: &str) -> (&str, u64, &str) {
    let digits = name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    (&name[..digits], name[digits..].parse().unwrap_or(0), name)
}

fn read(device: &str, number: u8, place: Option<Place>, folder: &Path) -> Port {
    let field = |name: &str| text(&folder.join(name)).unwrap_or_default();
    // "4: ACTIVE", "100 Gb/sec (4X EDR)".
    let active = field("state").starts_with("4:");
    let rate = field("rate");
    let gbits = rate
        .split_whitespace()
        .next()
        .and_then(|number| number.parse::<f64>().ok())
        .map_or(0, |number| number as u32);
    let ethernet = field("link_layer") == "Ethernet";
    let gids = folder.join("gids");
    // Each entry is a file, and a table may have a thousand. Used entries are at the front, with holes where addresses were removed.
    let mut table = Vec::new();
    let mut empty = 0;
    for index in 0..=u8::MAX {
        let name = index.to_string();
        let gid = text(&gids.join(&name)).and_then(|text| parse_gid(&text));
        let Some(bytes) = gid.filter(|bytes| *bytes != [0; 16]) else {
            empty += 1;
            match empty {
                MOST_EMPTY => break,
                _ => continue,
            }
        };
        empty = 0;
        let kind = text(&folder.join("gid_attrs/types").join(&name)).unwrap_or_default();
        let roce = match kind.as_str() {
            "RoCE v2" => Some(2),
            "RoCE v1" => Some(1),
            "IB/RoCE v1" if ethernet => Some(1),
            _ => None,
        };
        table.push(Gid { index, bytes, roce });
    }
    Port {
        device: device.to_owned(),
        number,
        place,
        active,
        ethernet,
        gbits,
        gids: table,
    }
}

/// Empty entries in a row after which the rest of a GID table counts as empty.
const MOST_EMPTY: usize = 32;

/// `fe80:0000:…`, eight groups of four digits.
fn parse_gid(text: &str) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    let mut groups = text.split(':');
    for pair in bytes.as_chunks_mut::<2>().0 {
        let group = groups.next().filter(|group| group.len() == 4)?;
        *pair = u16::from_str_radix(group, 16).ok()?.to_be_bytes();
    }
    groups.next().is_none().then_some(bytes)
}

fn text(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// The GID of a port to use, by NCCL's rules.
///
/// If `index` is set, the GID with that index. For InfiniBand, the first one. For RoCE, the best by these criteria, most important first: in `range`, the
/// wanted RoCE version, the wanted address family, not link-local, the lowest index.
#[must_use]
pub fn choose_gid(
    port: &Port,
    index: Option<u8>,
    version: u8,
    ipv6: bool,
    range: Option<&Range>,
) -> Option<Gid> {
    if let Some(index) = index {
        return port.gids.iter().copied().find(|gid| gid.index == index);
    }
    if !port.ethernet {
        return port.gids.first().copied();
    }
    let rank = |gid: &Gid| {
        (
            range.is_some_and(|range| !range.has(gid)),
            gid.roce != Some(version),
            gid.is_ipv4() == ipv6,
            gid.is_link_local(),
            gid.index,
        )
    };
    port.gids.iter().copied().min_by_key(rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u8, text: &str, roce: u8) -> Gid {
        Gid {
            index,
            bytes: parse_gid(text).unwrap(),
            roce: Some(roce),
        }
    }

    fn roce(gids: Vec<Gid>) -> Port {
        Port {
            device: "mlx5_0".into(),
            number: 1,
            place: None,
            active: true,
            ethernet: true,
            gbits: 100,
            gids,
        }
    }

    const LOCAL: &str = "fe80:0000:0000:0000:0001:02ff:fe03:0405";
    const IPV4: &str = "0000:0000:0000:0000:0000:ffff:0a00:0001";
    const IPV6: &str = "2001:0db8:0000:0000:0000:0000:0000:0001";

    #[test]
    fn roce_version_comes_before_address_family() {
        // As mlx5 fills its table: each address once for either version.
        let table = vec![
            gid(0, LOCAL, 1),
            gid(1, LOCAL, 2),
            gid(2, IPV4, 1),
            gid(3, IPV4, 2),
            gid(4, IPV6, 1),
            gid(5, IPV6, 2),
        ];
        let port = roce(table);
        let index =
            |wanted, version, ipv6| choose_gid(&port, wanted, version, ipv6, None).map(|gid| gid.index);
        assert_eq!(index(None, 2, false), Some(3));
        assert_eq!(index(None, 1, false), Some(2));
        assert_eq!(index(None, 2, true), Some(5));
        assert_eq!(index(Some(1), 2, false), Some(1));
        assert_eq!(index(Some(6), 2, false), None);
        // A link-local address is better than nothing, and version 1 too.
        let only = |gids| choose_gid(&roce(gids), None, 2, false, None).map(|gid| gid.index);
        assert_eq!(only(vec![gid(0, LOCAL, 1), gid(1, LOCAL, 2)]), Some(1));
        assert_eq!(only(vec![gid(0, LOCAL, 1), gid(2, IPV4, 1)]), Some(2));
        assert_eq!(only(vec![]), None);
    }

    #[test]
    fn addresses_of_pci_are_told_from_other_parts_of_a_path() {
        for address in ["0000:01:00.0", "10000:c1:1f.7", "abcdef01:00:00.0"] {
            assert!(is_pci_address(address), "{address}");
        }
        for other in [
            "pci0000:00",
            "0000:01",
            "mlx5_core.sf.4",
            "0000:01:00.10",
            "000:01:00.0",
            "0000:01:00:00.0",
            "",
        ] {
            assert!(!is_pci_address(other), "{other}");
        }
    }

    #[test]
    fn names_sort_by_their_numbers() {
        let mut names = ["mlx5_10", "mlx5_2", "hca0", "mlx5_bond", "mlx5_1"];
        names.sort_by_key(|name| order(name));
        assert_eq!(names, ["hca0", "mlx5_1", "mlx5_2", "mlx5_10", "mlx5_bond"]);
    }

    #[test]
    fn what_is_no_gid_is_refused() {
        for text in ["", "fe80", "fe80::1", "zzzz:0000:0000:0000:0000:0000:0000:0000"] {
            assert_eq!(parse_gid(text), None, "{text:?}");
        }
        let long = format!("{LOCAL}:0000");
        assert_eq!(parse_gid(&long), None);
    }

    #[test]
    fn an_address_of_the_wanted_range_comes_before_all_else() {
        let port = roce(vec![
            gid(0, "fe80:0000:0000:0000:0000:00ff:fe00:0001", 2),
            gid(1, "0000:0000:0000:0000:0000:ffff:0a00:0001", 2),
            gid(2, "0000:0000:0000:0000:0000:ffff:0a01:0001", 1),
            gid(3, "fd00:0000:0000:0007:0000:0000:0000:0001", 2),
        ]);
        let index = |range: &str| {
            let range = Range::parse(range).unwrap();
            choose_gid(&port, None, 2, false, Some(&range)).map(|gid| gid.index)
        };
        assert_eq!(index("10.0.0.0/16"), Some(1));
        assert_eq!(index("10.1.0.0/16"), Some(2));
        assert_eq!(
            index("10.1.255.0/15"),
            Some(1),
            "of two the one of the wanted version"
        );
        assert_eq!(index("fd00:0:0:7::/64"), Some(3));
        assert_eq!(index("::/0"), Some(1));
        assert_eq!(index("192.168.0.0/16"), Some(1), "none is in it");
        for rubbish in ["", "10.0.0.0", "10.0.0.0/33", "::/129", "x/8", "10.0.0.0/-1"] {
            assert_eq!(Range::parse(rubbish), None, "{rubbish}");
        }
    }
}
