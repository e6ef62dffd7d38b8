//! Which port serves a rank on a channel, and which one stands by: pure functions over [`crate::sysfs`].

use crate::sysfs::{Place, Port};

/// How far two PCI devices are apart: NCCL's names and order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// Over one PCIe switch.
    Pix,
    /// Over several, but no host bridge.
    Pxb,
    /// Over the host bridge of a processor.
    Phb,
    /// Over the interconnect of host bridges of one NUMA node.
    Node,
    /// Over the interconnect of NUMA nodes; or nothing is known.
    Sys,
}

impl Distance {
    /// The one of this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Pix, Self::Pxb, Self::Phb, Self::Node, Self::Sys]
            .into_iter()
            .find(|distance| distance.name().eq_ignore_ascii_case(name))
    }

    /// What NCCL's logs and `nvidia-smi topo` call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        }
    }
}

/// How far two places are apart. Nobody knows how far something is that is nowhere: it is [`Distance::Sys`].
#[must_use]
pub fn distance(a: Option<&Place>, b: Option<&Place>) -> Distance {
    let (Some(a), Some(b)) = (a, b) else {
        return Distance::Sys;
    };
    let common = a.path.iter().zip(&b.path).take_while(|(a, b)| a == b).count();
    let longest = a.path.len().max(b.path.len());
    match common {
        0 if a.numa.is_some() && a.numa == b.numa => Distance::Node,
        // One NUMA node in all.
        0 if a.numa.is_none() && b.numa.is_none() => Distance::Node,
        0 => Distance::Sys,
        // The host bridge alone.
        1 => Distance::Phb,
        // Functions of one card, or behind bridges of one switch: below what is common a downstream port and the device.
        _ if longest - common <= 2 => Distance::Pix,
        _ => Distance::Pxb,
    }
}

/// What a rank on a node is near to: the place of its GPU, or none for a rank without one.
pub type Near<'a> = Option<&'a Place>;

/// Indices of `ports` that serve each rank of a node, the one for channel 0 first: channel c uses the c-th, round and round.
///
/// A rank uses the ports that are nearest to it and up. Where several ranks share a nearest class, the ranks that come later begin with
/// the port that the fewest begin with so far, so that with as many ports as ranks each rank has one of its own on channel 0. Slower
/// ports of a class are left out. Every rank of a node computes this from the same lists and so comes to the same.
#[must_use]
pub fn assign(ports: &[Port], ranks: &[Near<'_>]) -> Vec<Vec<usize>> {
    let mut first_of = vec![0_u32; ports.len()];
    ranks
        .iter()
        .map(|near| {
            let usable = || ports.iter().enumerate().filter(|(_, port)| port.active);
            let far = |port: &Port| distance(*near, port.place.as_ref());
            let Some(nearest) = usable().map(|(_, port)| far(port)).min() else {
                return Vec::new();
            };
            let class = || usable().filter(|(_, port)| far(port) == nearest);
            let fastest = class().map(|(_, port)| port.gbits).max().unwrap_or(0);
            let mut mine: Vec<usize> = class()
                .filter(|(_, port)| port.gbits == fastest)
                .map(|(index, _)| index)
                .collect();
            let begin = (0..mine.len()).min_by_key(|at| first_of[mine[*at]]).unwrap_or(0);
            mine.rotate_left(begin);
            if let Some(first) = mine.first() {
                first_of[*first] += 1;
            }
            mine
        })
        .collect()
}

/// Whether the two ends of a connection may be ports of different numbers: `NCCL_CROSS_NIC`. Where the first ports of all machines are on
/// one switch, the second ones on another and so on, such ports reach each other by a detour or not at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cross {
    /// Not if the receiver has a port of the sender's number.
    Never,
    /// However it comes.
    Any,
    /// Not if the receiver's port of the sender's number is one that serves it.
    #[default]
    Avoid,
}

/// The port on which a receiver takes what its peer sends from the peer's port number `theirs`, whose numbers are those of this
/// machine's `ports`; `serving`: those that serve the receiver, of which it would use `own`.
#[must_use]
pub fn facing(ports: &[Port], (serving, own): (&[usize], usize), theirs: usize, cross: Cross) -> usize {
    let is_like = |port: &Port| ports.get(own).is_some_and(|own| own.ethernet == port.ethernet);
    let may = match cross {
        Cross::Never => ports.get(theirs).is_some_and(is_like),
        Cross::Avoid => serving.contains(&theirs),
        Cross::Any => false,
    };
    if may { theirs } else { own }
}

/// Why a port is another's backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backup {
    /// The other port of the same card.
    OtherPort(usize),
    /// The neighbour: of an even one the next, of an odd one the previous.
    Neighbour(usize),
    /// The nearest of those that are left.
    Nearest(usize),
}

impl Backup {
    /// Index of the port.
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Self::OtherPort(index) | Self::Neighbour(index) | Self::Nearest(index) => index,
        }
    }

    /// In words.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::OtherPort(_) => "other port of the card",
            Self::Neighbour(_) => "neighbour",
            Self::Nearest(_) => "nearest left",
        }
    }
}

/// The backup of `ports[primary]`. `None` if no port can be its backup.
///
/// The first of these: the other port of the same card; the neighbour as the ports are listed (of an even index the next, of an odd index
/// the previous), if its link layer is the same; the nearest port of the same link layer. Where that leaves a choice, a port that is up
/// comes before one that is down. A virtual function of the same physical port fails with it, so it is no backup.
#[must_use]
pub fn backup(ports: &[Port], primary: usize) -> Option<Backup> {
    let own = ports.get(primary)?;
    let is_candidate = |index: usize| {
        ports
            .get(index)
            .is_some_and(|port| index != primary && port.ethernet == own.ethernet && !is_same_port(own, port))
    };
    let others = || (0..ports.len()).filter(|index| is_candidate(*index));
    if let Some(index) = others().find(|index| is_same_card(own, &ports[*index])) {
        return Some(Backup::OtherPort(index));
    }
    let neighbour = primary ^ 1;
    if is_candidate(neighbour) && ports[neighbour].gbits == own.gbits {
        return Some(Backup::Neighbour(neighbour));
    }
    others()
        .min_by_key(|index| {
            let port = &ports[*index];
            let far = distance(own.place.as_ref(), port.place.as_ref());
            (!port.active, far, port.gbits != own.gbits, *index)
        })
        .map(Backup::Nearest)
}

/// Two ports of one device, or of two functions of one card (`0000:01:00.0` and `0000:01:00.1`).
fn is_same_card(a: &Port, b: &Port) -> bool {
    let card = |port| Some(physical(port)?.rsplit_once('.')?.0);
    a.device == b.device || card(a).is_some() && card(a) == card(b)
}

/// Two devices that have one physical port: virtual functions, subfunctions, and the physical function itself. Each numbers its ports as
/// that does.
fn is_same_port(a: &Port, b: &Port) -> bool {
    let is_known = physical(a).is_some_and(|address| !address.is_empty());
    a.number == b.number && is_known && physical(a) == physical(b)
}

fn physical(port: &Port) -> Option<&str> {
    port.place.as_ref().map(Place::physical)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn place(path: &str, numa: Option<u32>) -> Place {
        Place {
            path: path.split('/').map(str::to_owned).collect(),
            numa,
            virtual_of: None,
        }
    }

    fn port(device: &str, place: Option<Place>, gbits: u32) -> Port {
        Port {
            device: device.into(),
            number: 1,
            place,
            active: true,
            ethernet: false,
            gbits,
            gids: Vec::new(),
        }
    }

    /// A machine with eight GPUs and eight NICs, a switch for each pair of both: four switches with two of each on either processor.
    fn eight() -> (Vec<Place>, Vec<Port>) {
        let (mut gpus, mut nics) = (Vec::new(), Vec::new());
        for i in 0..8_u32 {
            let (bus, numa) = (i / 2, Some(i / 4));
            let switch = format!("pci0000:{bus:x}0/0000:{bus:x}0:01.0/0000:{bus:x}1:00.0");
            let (port, at) = (i % 2, i % 2 + 4);
            gpus.push(place(
                &format!("{switch}/0000:{bus:x}2:0{port}.0/0000:{bus:x}{at}:00.0"),
                numa,
            ));
            let at = format!("{switch}/0000:{bus:x}2:1{port}.0/0000:{bus:x}{}:00.0", at + 2);
            nics.push(port_named(i, place(&at, numa)));
        }
        (gpus, nics)
    }

    fn port_named(i: u32, place: Place) -> Port {
        port(&format!("mlx5_{i}"), Some(place), 400)
    }

    #[test]
    fn distances_have_nccls_names() {
        let gpu = place(
            "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0",
            Some(0),
        );
        let cases = [
            (
                "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:04.0/0000:04:00.0",
                Some(0),
                "PIX",
            ),
            (
                "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:08.0/0000:08:00.0/0000:09:00.0/0000:0a:00.0",
                Some(0),
                "PXB",
            ),
            ("pci0000:00/0000:00:02.0/0000:10:00.0", Some(0), "PHB"),
            ("pci0000:40/0000:40:01.0/0000:41:00.0", Some(0), "NODE"),
            ("pci0000:80/0000:80:01.0/0000:81:00.0", Some(1), "SYS"),
            ("pci0000:80/0000:80:01.0/0000:81:00.0", None, "SYS"),
        ];
        for (path, numa, name) in cases {
            let nic = place(path, numa);
            assert_eq!(distance(Some(&gpu), Some(&nic)).name(), name, "{path}");
            assert_eq!(distance(Some(&nic), Some(&gpu)).name(), name, "the other way");
        }
        assert_eq!(distance(Some(&gpu), None), Distance::Sys);
        let functions = (
            place("pci0000:00/0000:00:02.0/0000:10:00.0", None),
            place("pci0000:00/0000:00:02.0/0000:10:00.1", None),
        );
        assert_eq!(distance(Some(&functions.0), Some(&functions.1)), Distance::Pix);
    }

    #[test]
    fn each_gpu_has_the_nic_of_its_switch() {
        let (gpus, nics) = eight();
        let near: Vec<Near<'_>> = gpus.iter().map(Some).collect();
        let assigned = assign(&nics, &near);
        // Two NICs on a switch: both serve both GPUs, beginning with one each.
        let expected: Vec<Vec<usize>> = (0..8).map(|i| vec![i, i ^ 1]).collect();
        assert_eq!(assigned, expected);
        // One port down: its GPU uses the switch's other one, as does that one's own.
        let mut broken = nics.clone();
        broken[2].active = false;
        let assigned = assign(&broken, &near);
        assert_eq!((&assigned[2], &assigned[3]), (&vec![3], &vec![3]));
        // All of a switch down: the ports of the next one that are equally far.
        broken[3].active = false;
        let assigned = assign(&broken, &near);
        assert_eq!(assigned[2], [0, 1]);
        assert_eq!(assigned[3], [1, 0], "not the one that rank 2 begins with");
        assert!(assign(&[], &near).iter().all(Vec::is_empty));
    }

    #[test]
    fn ranks_without_a_gpu_take_turns() {
        let soft: Vec<Port> = (0..2).map(|i| port(&format!("hca{i}"), None, 10)).collect();
        assert_eq!(
            assign(&soft, &[None, None, None]),
            [vec![0, 1], vec![1, 0], vec![0, 1]]
        );
        // A slow management port is no part of it.
        let mut uneven = soft;
        uneven.push(port("bmc0", None, 1));
        assert_eq!(assign(&uneven, &[None]), [vec![0, 1]]);
    }

    #[test]
    fn backups_are_the_cards_other_port_then_the_neighbour_then_the_nearest() {
        let (_, nics) = eight();
        for i in 0..8 {
            assert_eq!(backup(&nics, i), Some(Backup::Neighbour(i ^ 1)));
        }
        // Seven: the last has no neighbour, and takes the nearest.
        assert_eq!(backup(&nics[..7], 6), Some(Backup::Nearest(4)));
        // Two functions of one card, not side by side in the list.
        let card = |function: u32| place(&format!("pci0000:00/0000:00:01.0/0000:01:00.{function}"), None);
        let mut mixed = vec![port("a", Some(card(0)), 100)];
        mixed.push(port(
            "b",
            Some(place("pci0000:00/0000:00:02.0/0000:02:00.0", None)),
            100,
        ));
        mixed.push(port("c", Some(card(1)), 100));
        assert_eq!(backup(&mixed, 0), Some(Backup::OtherPort(2)));
        assert_eq!(backup(&mixed, 2), Some(Backup::OtherPort(0)));
        // The neighbour is taken by nobody's card; it has no other.
        assert_eq!(backup(&mixed, 1), Some(Backup::Neighbour(0)));
        // One device with two ports.
        let mut two = vec![port("m", None, 100), port("m", None, 100)];
        two[1].number = 2;
        assert_eq!(backup(&two, 1), Some(Backup::OtherPort(0)));
        // None at all, and none of the same link layer.
        assert_eq!(backup(&two[..1], 0), None);
        two[1] = port("n", None, 100);
        two[1].ethernet = true;
        assert_eq!(backup(&two, 0), None);
        assert_eq!(backup(&two, 5), None, "no such port");
    }

    /// They fail together.
    #[test]
    fn functions_of_one_physical_port_do_not_stand_by_for_each_other() {
        let virtual_of = |physical: u32, function: u32| Place {
            virtual_of: Some(format!("0000:01:00.{physical}")),
            ..place(&format!("pci0000:00/0000:00:01.0/0000:01:08.{function}"), None)
        };
        // Two virtual functions of a card's first port, side by side; then one of its second port.
        let mut ports: Vec<Port> = [(0, 2), (0, 3), (1, 4)]
            .map(|(physical, function)| {
                port(&format!("v{function}"), Some(virtual_of(physical, function)), 100)
            })
            .into();
        assert_eq!(backup(&ports[..2], 0), None);
        assert_eq!(backup(&ports, 0), Some(Backup::OtherPort(2)));
        assert_eq!(backup(&ports, 2), Some(Backup::OtherPort(0)));
        // A domain has more digits than usual, below a device of another one: two cards.
        let below = |function: &str| place(&format!("pci0000:00/0000:00:0e.0/pci10000:00/{function}"), None);
        let mut cards: Vec<Port> = ["10000:01:00.0", "10000:02:00.0", "10000:01:00.1"]
            .map(|function| port(function, Some(below(function)), 100))
            .into();
        assert_eq!(backup(&cards, 0), Some(Backup::OtherPort(2)));
        cards.truncate(2);
        assert_eq!(backup(&cards, 0), Some(Backup::Neighbour(1)));
        // Another card's comes before none.
        ports[2] = port(
            "other",
            Some(place("pci0000:00/0000:00:02.0/0000:02:00.0", None)),
            100,
        );
        assert_eq!(backup(&ports, 1), Some(Backup::Nearest(2)));
        // The physical function, and subfunctions of it.
        let function = "pci0000:00/0000:00:01.0/0000:01:00.0";
        let mut ports: Vec<Port> = [function, &format!("{function}/mlx5_core.sf.4")]
            .map(|path| port(path, Some(place(path, None)), 100))
            .into();
        assert_eq!(backup(&ports, 0), None);
        // A device with two ports, of which each function has both.
        ports[1].number = 2;
        assert_eq!(backup(&ports, 0), Some(Backup::OtherPort(1)));
    }

    #[test]
    fn ends_of_a_connection_are_ports_of_one_number_as_far_as_is_asked() {
        let (gpus, mut nics) = eight();
        let near: Vec<Near<'_>> = gpus.iter().map(Some).collect();
        // The last GPU of a machine sends to the first of the next.
        let (sender, receiver) = (assign(&nics, &near)[7].clone(), assign(&nics, &near)[0].clone());
        let of = |ports: &[Port], serving: &[usize], theirs, cross| {
            facing(ports, (serving, serving[0]), theirs, cross)
        };
        assert_eq!(of(&nics, &receiver, sender[0], Cross::Any), 0);
        assert_eq!(
            of(&nics, &receiver, sender[0], Cross::Avoid),
            0,
            "the other one is far"
        );
        assert_eq!(of(&nics, &receiver, sender[0], Cross::Never), 7);
        // A port of its own switch.
        assert_eq!(of(&nics, &receiver, 1, Cross::Any), 0);
        assert_eq!(of(&nics, &receiver, 1, Cross::Avoid), 1);
        // Here are fewer ports than there, or the port is of another kind.
        assert_eq!(of(&nics[..4], &receiver, 7, Cross::Never), 0);
        nics[7].ethernet = true;
        assert_eq!(of(&nics, &receiver, 7, Cross::Never), 0);
    }

    fn machine() -> impl Strategy<Value = Vec<Port>> {
        let one = (
            0_u32..3,
            0_u32..3,
            0_u32..2,
            any::<bool>(),
            any::<bool>(),
            1_u32..3,
        );
        proptest::collection::vec(one, 0..10).prop_map(|ports| {
            let of = |(i, (bridge, card, function, active, ethernet, gbits)): (
                usize,
                (u32, u32, u32, bool, bool, u32),
            )| {
                let at = place(
                    &format!("pci0000:{bridge}0/0000:{bridge}0:0{card}.0/0000:{bridge}{card}:00.{function}"),
                    Some(bridge / 2),
                );
                Port {
                    active,
                    ethernet,
                    ..port(&format!("d{i}"), Some(at), gbits * 100)
                }
            };
            ports.into_iter().enumerate().map(of).collect()
        })
    }

    proptest! {
        #[test]
        fn choices_hold_for_every_machine(ports in machine(), ranks in 1_usize..9) {
            let gpu = place("pci0000:00/0000:00:00.0/0000:00:00.7", Some(0));
            let near = vec![Some(&gpu); ranks];
            let assigned = assign(&ports, &near);
            let mut firsts = vec![0; ports.len()];
            for mine in &assigned {
                prop_assert_eq!(mine.is_empty(), !ports.iter().any(|port| port.active));
                for index in mine {
                    prop_assert!(ports[*index].active);
                    let far = |index: usize| distance(Some(&gpu), ports[index].place.as_ref());
                    for (other, port) in ports.iter().enumerate() {
                        prop_assert!(!port.active || far(other) >= far(*index), "a nearer one");
                    }
                }
                if let Some(first) = mine.first() {
                    firsts[*first] += 1;
                }
            }
            // The load is even.
            if let Some(mine) = assigned.first() {
                let loads = || mine.iter().map(|index| firsts[*index]);
                prop_assert!(loads().max().unwrap_or(0) - loads().min().unwrap_or(0) <= 1);
            }
            for primary in 0..ports.len() {
                match backup(&ports, primary) {
                    None => prop_assert!(!ports.iter().any(|port| port.ethernet == ports[primary].ethernet && physical(port) != physical(&ports[primary]))),
                    Some(chosen) => {
                        prop_assert_ne!(physical(&ports[chosen.index()]), physical(&ports[primary]));
                        prop_assert_eq!(ports[chosen.index()].ethernet, ports[primary].ethernet);
                    }
                }
            }
        }
    }
}
