//! What is chosen on machines whose `/sys` was recorded (`tests/sysfs/record.sh`), and on some whose `/sys` was written down by hand
//! after what is published of them (`hyper-v.tree`, `functions.tree`, `dgx-*.tree`: each says after what).

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Component, Path, PathBuf},
};

use ringsight_verbs::{
    choice::{Backup, Distance, assign, backup, distance},
    sysfs::{Place, Port, choose_gid, ports},
};
use tempfile::TempDir;

/// Writes a recorded tree below a new folder.
fn unpack(name: &str) -> TempDir {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/sysfs")
        .join(name)
        .with_extension("tree");
    let text = fs::read_to_string(&file).unwrap();
    let root = tempfile::tempdir().unwrap();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if let Some((path, target)) = line.split_once(" -> ") {
            let path = root.path().join(path);
            let parent = path.parent().unwrap();
            fs::create_dir_all(parent).unwrap();
            // The folder must be there for what comes below it, and for links that lead through it.
            fs::create_dir_all(normal(&real(parent).join(target))).unwrap();
            symlink(target, &path).unwrap();
        } else if let Some((path, text)) = line.split_once(" = ") {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        } else {
            panic!("{name}: {line}");
        }
    }
    root
}

fn real(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap()
}

/// Without `..`, for a path none of whose folders is a link.
fn normal(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut path, part| {
        if part == Component::ParentDir {
            path.pop();
        } else {
            path.push(part);
        }
        path
    })
}

fn names(ports: &[Port]) -> Vec<&str> {
    ports.iter().map(|port| &*port.device).collect()
}

#[test]
fn soft_roce_is_nowhere_and_has_a_gid_of_its_address() {
    let sys = unpack("soft-roce");
    let found = ports(sys.path());
    assert_eq!(names(&found), ["hca0", "hca1", "peer0", "peer1"]);
    for port in &found {
        assert!(port.active && port.ethernet && port.number == 1);
        assert_eq!((port.gbits, &port.place), (10, &None));
        let chosen = choose_gid(port, None, 2, false, None).unwrap();
        assert!(chosen.is_ipv4() && chosen.roce == Some(2), "{chosen:?}");
    }
    assert_eq!(backup(&found, 0), Some(Backup::Neighbour(1)));
    assert_eq!(assign(&found[..2], &[None, None]), [[0, 1], [1, 0]]);
}

#[test]
fn mlx5_is_behind_its_host_bridge() {
    let sys = unpack("mlx5-stand-in");
    let found = ports(sys.path());
    assert_eq!(names(&found), ["mlx5_0", "mlx5_1"]);
    let places: Vec<&Place> = found.iter().map(|port| port.place.as_ref().unwrap()).collect();
    // A platform device of the kernel's has the host bridge: what is above it says nothing of PCI.
    assert_eq!(places[0].path, ["pci10000:00", "10000:00:00.0"]);
    assert_eq!(places[0].numa, None);
    assert_eq!(distance(Some(places[0]), Some(places[1])), Distance::Phb);
    for port in &found {
        assert!(port.active && !port.ethernet);
        assert_eq!(port.gbits, 50);
        assert_eq!(choose_gid(port, None, 2, false, None).unwrap().index, 0);
    }
    assert_eq!(backup(&found, 1), Some(Backup::Neighbour(0)));
}

#[test]
fn host_bridges_below_one_virtual_bus_are_as_near_as_their_nodes() {
    let sys = unpack("hyper-v");
    let found = ports(sys.path());
    assert_eq!(names(&found), ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]);
    let gpus: Vec<Place> = (1..=4)
        .map(|domain| {
            let link = format!("bus/pci/devices/{domain:04x}:00:00.0");
            Place::of(sys.path(), &sys.path().join(link)).unwrap()
        })
        .collect();
    let far = |gpu: usize, port: usize| distance(Some(&gpus[gpu]), found[port].place.as_ref());
    assert_eq!((far(0, 0), far(0, 1)), (Distance::Node, Distance::Node));
    assert_eq!((far(0, 2), far(3, 1)), (Distance::Sys, Distance::Sys));
    let near: Vec<_> = gpus.iter().map(Some).collect();
    assert_eq!(assign(&found, &near), [[0, 1], [1, 0], [2, 3], [3, 2]]);
}

/// Whoever stands by for a function has the card's other physical port.
#[test]
fn functions_of_a_port_are_told_apart_from_those_of_the_other_port() {
    let sys = unpack("functions");
    let found = ports(sys.path());
    let physical: Vec<_> = found
        .iter()
        .map(|port| port.place.as_ref().unwrap().physical())
        .collect();
    let [first, second] = ["0000:01:00.0", "0000:01:00.1"];
    assert_eq!(physical, [first, first, second, second, first]);
    let backups: Vec<_> = (0..5).map(|port| backup(&found, port)).collect();
    assert_eq!(
        backups,
        [2, 2, 0, 0, 2].map(|other| Some(Backup::OtherPort(other)))
    );
}

/// The GPUs of a tree, by address: as drivers number them.
fn gpus(sys: &Path) -> Vec<Place> {
    let folder = sys.join("bus/pci/devices");
    let mut links: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    links.sort();
    links.iter().map(|link| Place::of(sys, link).unwrap()).collect()
}

/// How far each port is from a GPU, as `nvidia-smi topo -m` prints it.
fn row(gpu: &Place, ports: &[Port]) -> String {
    let names: Vec<_> = ports
        .iter()
        .map(|port| distance(Some(gpu), port.place.as_ref()).name())
        .collect();
    names.join(" ")
}

/// Names of the ports that serve each GPU, the one for channel 0 first.
fn serving(gpus: &[Place], ports: &[Port]) -> Vec<Vec<String>> {
    let near: Vec<_> = gpus.iter().map(Some).collect();
    let assigned = assign(ports, &near);
    let names = |mine: Vec<usize>| {
        mine.into_iter()
            .map(|index| ports[index].device.clone())
            .collect()
    };
    assigned.into_iter().map(names).collect()
}

fn down(ports: &mut [Port], name: &str) {
    ports.iter_mut().find(|port| port.device == name).unwrap().active = false;
}

#[test]
fn two_gpus_of_a_switch_share_its_nic_and_go_to_the_next_one_when_it_is_down() {
    let sys = unpack("dgx-2");
    let (mut found, gpus) = (ports(sys.path()), gpus(sys.path()));
    assert_eq!((found.len(), gpus.len()), (10, 16));
    let published = [
        "PIX PXB NODE NODE SYS SYS SYS SYS SYS SYS",
        "PIX PXB NODE NODE SYS SYS SYS SYS SYS SYS",
        "PXB PIX NODE NODE SYS SYS SYS SYS SYS SYS",
        "PXB PIX NODE NODE SYS SYS SYS SYS SYS SYS",
        "NODE NODE PIX PXB SYS SYS SYS SYS SYS SYS",
    ];
    for (gpu, published) in gpus.iter().zip(published) {
        assert_eq!(row(gpu, &found), published, "{gpu:?}");
    }
    let first = |found: &[Port]| serving(&gpus, found)[..6].to_vec();
    assert_eq!(
        first(&found),
        [
            ["mlx5_0"],
            ["mlx5_0"],
            ["mlx5_1"],
            ["mlx5_1"],
            ["mlx5_2"],
            ["mlx5_2"]
        ]
    );
    down(&mut found, "mlx5_0");
    assert_eq!(first(&found)[..4], [["mlx5_1"]; 4]);
    // Both of the upper switch: those of the processor's other one, each for every second GPU at first.
    down(&mut found, "mlx5_1");
    let (one, other) = (["mlx5_2", "mlx5_3"], ["mlx5_3", "mlx5_2"]);
    assert_eq!(first(&found)[..4], [one, other, one, other]);
}

#[test]
fn two_gpus_and_two_nics_that_are_equally_far_take_turns() {
    let sys = unpack("dgx-a100");
    let (found, gpus) = (ports(sys.path()), gpus(sys.path()));
    let far = |from: usize| {
        let name = |port| {
            if port == from || port == from + 1 {
                "PXB"
            } else {
                "SYS"
            }
        };
        (0..12).map(name).collect::<Vec<_>>().join(" ")
    };
    let mut expected = Vec::new();
    // mlx5_4, _5, _10 and _11 are near to none.
    for (pair, nic) in gpus.chunks(2).zip([0, 2, 6, 8]) {
        assert_eq!(
            pair.iter().map(|gpu| row(gpu, &found)).collect::<Vec<_>>(),
            [far(nic), far(nic)]
        );
        let names = [nic, nic + 1].map(|nic| format!("mlx5_{nic}"));
        expected.extend([names.to_vec(), names.iter().rev().cloned().collect()]);
        assert_eq!(backup(&found, nic), Some(Backup::Neighbour(nic + 1)));
        assert_eq!(backup(&found, nic + 1), Some(Backup::Neighbour(nic)));
    }
    assert_eq!(serving(&gpus, &found), expected);
}

#[test]
fn each_gpu_has_its_nic_and_no_storage_port_stands_by_for_it() {
    let sys = unpack("dgx-h100");
    let (found, gpus) = (ports(sys.path()), gpus(sys.path()));
    // By GPU, as the manual has it.
    let own = [0, 3, 4, 5, 6, 9, 10, 11];
    for (index, (gpu, nic)) in gpus.iter().zip(own).enumerate() {
        let name = |port| match (port == nic, (port < 6) == (index < 4)) {
            (true, _) => "PXB",
            (false, true) => "NODE",
            (false, false) => "SYS",
        };
        let published: Vec<_> = (0..12).map(name).collect();
        assert_eq!(row(gpu, &found), published.join(" "), "GPU {index}");
    }
    assert_eq!(serving(&gpus, &found), own.map(|nic| [format!("mlx5_{nic}")]));
    // Neighbours in the list are the storage cards' ports, which are Ethernet: of mlx5_0, _3, _6 and _9.
    for (port, other) in [(0, 3), (6, 9)] {
        assert_eq!(backup(&found, port), Some(Backup::Nearest(other)));
        assert_eq!(backup(&found, other), Some(Backup::Nearest(port)));
    }
    for (port, other) in [(4, 5), (10, 11)] {
        assert_eq!(backup(&found, port), Some(Backup::Neighbour(other)));
        assert_eq!(backup(&found, other), Some(Backup::Neighbour(port)));
    }
    assert_eq!(backup(&found, 1), Some(Backup::OtherPort(2)));
    assert_eq!(backup(&found, 8), Some(Backup::OtherPort(7)));
}
