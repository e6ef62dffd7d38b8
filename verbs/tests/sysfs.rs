//! What is chosen on machines whose `/sys` was recorded (`tests/sysfs/record.sh`), and on one whose `/sys` was written down by hand
//! (`hyper-v.tree`).

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
        let chosen = choose_gid(port, None, 2, false).unwrap();
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
        assert_eq!(choose_gid(port, None, 2, false).unwrap().index, 0);
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
