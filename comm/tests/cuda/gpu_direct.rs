//! GPUDirect without a GPU and without a NIC: ranks on nodes of their own with slots in the "memory of the GPU" of libcuda.cpp, which
//! libibverbs.cpp registers by dma-buf, reads and writes. Its devices are those of a /sys that is made here and mounted over the real
//! one in a namespace of the program's own.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use ringsight_kernels::cuda;
use tempfile::TempDir;

use crate::{
    built,
    native::{library, run},
    skip,
};

/// What the fabric has carried, in bytes that did not travel with a request, and what is registered: the beginning of its file.
#[derive(Debug)]
struct Carried {
    from_dma_bufs: u64,
    into_dma_bufs: u64,
    from_host: u64,
    into_host: u64,
    regions_left: u64,
    /// Requests over either device.
    requests: [u64; 2],
}

impl Carried {
    fn read(file: &Path) -> Self {
        let bytes = fs::read(file).unwrap();
        let (words, _) = bytes.as_chunks::<8>();
        let word = |at: usize| words.get(at).map_or(0, |word| u64::from_le_bytes(*word));
        Self {
            from_dma_bufs: word(0),
            into_dma_bufs: word(1),
            from_host: word(2),
            into_host: word(3),
            regions_left: word(4),
            requests: [word(5), word(6)],
        }
    }

    fn is_direct(&self) -> bool {
        self.into_dma_bufs > 0 && self.from_dma_bufs == self.into_dma_bufs && self.of_host() == [0, 0]
    }

    fn of_host(&self) -> [u64; 2] {
        [self.from_host, self.into_host]
    }
}

/// Where the GPUs are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Gpus {
    /// Behind the switch of both NICs.
    Near,
    /// Below another host bridge.
    Far,
    /// The second one, with the second NIC.
    Apart,
}

/// A /sys with two GPUs and the NICs mock0 and mock1.
fn sysfs(gpus: Gpus) -> TempDir {
    const SWITCH: &str = "devices/pci0000:00/0000:00:01.0/0000:01:00.0";
    let root = tempfile::tempdir().unwrap();
    let folder = |path: &str| {
        let path = root.path().join(path);
        fs::create_dir_all(&path).unwrap();
        path
    };
    const OTHER: &str = "devices/pci0000:80/0000:80:01.0/0000:81:00.0";
    // Of the GPUs, and of the NICs.
    let [switches, nics] = match gpus {
        Gpus::Near => [[SWITCH; 2]; 2],
        Gpus::Far => [[OTHER; 2], [SWITCH; 2]],
        Gpus::Apart => [[SWITCH, OTHER]; 2],
    };
    let known = folder("bus/pci/devices");
    for ((port, address), switch) in [("0000:02:01.0", "0000:10:00.0"), ("0000:02:02.0", "0000:11:00.0")]
        .into_iter()
        .zip(switches)
    {
        let device = format!("{switch}/{port}/{address}");
        folder(&device);
        symlink(format!("../../../{device}"), known.join(address)).unwrap();
    }
    for ((name, place), switch) in [
        ("mock0", "0000:02:03.0/0000:20:00.0"),
        ("mock1", "0000:02:04.0/0000:21:00.0"),
    ]
    .into_iter()
    .zip(nics)
    {
        let device = format!("{switch}/{place}");
        folder(&device);
        let port = folder(&format!("class/infiniband/{name}/ports/1"));
        let link = root.path().join("class/infiniband").join(name).join("device");
        symlink(format!("../../../{device}"), link).unwrap();
        for (file, text) in [
            ("state", "4: ACTIVE"),
            ("rate", "100 Gb/sec (4X EDR)"),
            ("link_layer", "InfiniBand"),
        ] {
            fs::write(port.join(file), format!("{text}\n")).unwrap();
        }
    }
    root
}

/// What runs a program on another /sys.
fn over(sys: &Path) -> Command {
    let mut command = Command::new("unshare");
    let script = r#"mount --bind "$0" /sys && exec "$@""#;
    command
        .args(["--map-root-user", "--mount", "sh", "-c", script])
        .arg(sys);
    command
}

/// Runs two ranks, each on a node; what they said, and what was carried. `None`: not here.
fn nodes(
    test: &str,
    arguments: &[&str],
    (gpus, verbs): (Gpus, &str),
    variables: &[(&str, &str)],
) -> Option<(String, Carried)> {
    let sys = sysfs(gpus);
    if let Err(missing) = cuda::fatbin() {
        skip::skip(test, missing);
        return None;
    }
    let can = over(sys.path()).arg("true").output();
    if !can.is_ok_and(|output| output.status.success()) {
        skip::skip(
            test,
            "no namespace to mount another /sys in (unshare --map-root-user --mount)",
        );
        return None;
    }
    let fabric = sys.path().join("fabric");
    fs::write(&fabric, []).unwrap();
    let folders: [PathBuf; 2] = [built().into(), built().join(verbs)];
    let said = run(over(sys.path())
        .arg(built().join("driver"))
        .arg(library())
        .args(arguments)
        .env("LD_LIBRARY_PATH", std::env::join_paths(folders).unwrap())
        .env("RINGSIGHT_MOCK_FABRIC", "/sys/fabric")
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env("NCCL_MAX_CTAS", "4")
        .env("NCCL_DEBUG", "INFO")
        .env("NCCL_DEBUG_SUBSYS", "INIT,NET")
        // A busy machine is no failed path.
        .env("RINGSIGHT_NET_TIMEOUT_MS", "20000")
        .env("RINGSIGHT_NET_PROBE_MS", "20000")
        .env_remove("RINGSIGHT_DEVICE")
        .envs(variables.iter().copied()));
    assert!(!said.contains("FAILED"), "{said}");
    let carried = Carried::read(&fabric);
    assert_eq!(carried.regions_left, 0, "{carried:?}\n{said}");
    Some((said, carried))
}

/// How many lines of the log say this.
fn lines(said: &str, text: &str) -> usize {
    said.lines().filter(|line| line.contains(text)).count()
}

#[test]
fn devices_read_and_write_slots_in_the_memory_of_gpus() {
    let test = "gpu_direct::devices_read_and_write_slots_in_the_memory_of_gpus";
    let on = (Gpus::Near, "verbs");
    let Some((said, carried)) = nodes(test, &["check", "2", "n", "1048576"], on, &[]) else {
        return;
    };
    assert!(said.contains(" cases a rank\n"), "{said}");
    for rank in 0..2 {
        let gpu = format!("GPUDirect : GPU {rank} (0000:1{rank}:00.0)");
        let near = format!("{gpu} and mock0:1 (backup mock1:1) : distance PIX <= PXB (NCCL_NET_GDR_LEVEL)");
        assert_eq!(lines(&said, &near), 1, "{near}: {said}");
        let made = format!("{gpu} : 16 places of 1048576 bytes for slots, received and sent, flushed");
        assert_eq!(lines(&said, &made), 1, "{made}: {said}");
    }
    let both = |way| lines(&said, &format!("[{way}] via NET/IB/0/GDRDMA")) >= 2;
    assert!(both("send") && both("receive"), "{said}");
    assert!(
        !said.contains("via NET/Socket") && !said.contains("NCCL WARN"),
        "{said}"
    );
    assert!(carried.is_direct(), "{carried:?}");
    nodes(test, &["graph", "2", "n"], on, &[]);
    nodes(test, &["abort", "2", "n"], on, &[]);
}

/// What a path had under way when it failed goes over the other one, from the same slots into the same slots.
#[test]
fn slots_survive_a_path() {
    let test = "gpu_direct::slots_survive_a_path";
    let on = (Gpus::Near, "verbs");
    let fails = [
        ("RINGSIGHT_MOCK_FAILS_AFTER", "40"),
        // What is lost with the path is asked for again.
        ("RINGSIGHT_NET_TIMEOUT_MS", "3000"),
        ("RINGSIGHT_NET_PROBE_MS", "1000"),
        ("RINGSIGHT_NET_GIVE_UP_MS", "120000"),
    ];
    let Some((said, carried)) = nodes(test, &["random", "2", "n", "3"], on, &fails) else {
        return;
    };
    assert!(said.contains("from mock0:1 to mock1:1 (epoch 1)"), "{said}");
    assert!(carried.is_direct(), "{carried:?}");
    assert!(
        carried.requests[0] == 40 && carried.requests[1] > 40,
        "{carried:?}"
    );
}

#[test]
fn what_a_gpu_orders_is_not_flushed() {
    let ordered = [
        ("RINGSIGHT_MOCK_GDR_ORDERING", "100"),
        ("RINGSIGHT_MOCK_GDR_FLUSH", "0"),
    ];
    let test = "gpu_direct::what_a_gpu_orders_is_not_flushed";
    let on = (Gpus::Near, "verbs");
    if let Some((said, carried)) = nodes(test, &["random", "2", "n", "3"], on, &ordered) {
        assert_eq!(lines(&said, "received and sent, no flush needed"), 2, "{said}");
        assert!(carried.is_direct(), "{carried:?}");
    }
}

#[test]
fn what_is_sent_may_be_staged_alone() {
    let test = "gpu_direct::what_is_sent_may_be_staged_alone";
    let on = (Gpus::Near, "verbs");
    if let Some((said, carried)) = nodes(
        test,
        &["random", "2", "n", "3"],
        on,
        &[("NCCL_NET_GDR_READ", "0")],
    ) {
        assert_eq!(
            lines(&said, "received (NCCL_NET_GDR_READ=0), flushed"),
            2,
            "{said}"
        );
        assert_eq!(carried.from_dma_bufs, 0, "{carried:?}");
        assert!(
            carried.into_dma_bufs > 0 && carried.into_dma_bufs == carried.from_host,
            "{carried:?}"
        );
    }
}

/// Each rank says once why its slots are in host memory, and the data get there all the same.
#[test]
fn what_cannot_be_direct_is_staged() {
    let test = "gpu_direct::what_cannot_be_direct_is_staged";
    let (near, far) = ((Gpus::Near, "verbs"), (Gpus::Far, "verbs"));
    for (on, variable, why) in [
        (
            near,
            ("RINGSIGHT_MOCK_DMA_BUF", "0"),
            "exports no dma-buf (CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)",
        ),
        (
            near,
            ("RINGSIGHT_MOCK_GDR_FLUSH", "0"),
            "its driver offers no cuFlushGPUDirectRDMAWrites",
        ),
        (near, ("NCCL_DMABUF_ENABLE", "0"), "NCCL_DMABUF_ENABLE=0"),
        (near, ("NCCL_NET_GDR_LEVEL", "LOC"), "NCCL_NET_GDR_LEVEL=LOC"),
        (far, ("NCCL_NET_GDR_LEVEL", "PHB"), "distance NODE > PHB"),
        (
            near,
            ("RINGSIGHT_MOCK_NO_DMA_BUF_MR", "mock0"),
            "of a dma-buf with mock0: Operation not supported",
        ),
        // What fails over has to reach the same slots.
        (
            near,
            ("RINGSIGHT_MOCK_NO_DMA_BUF_MR", "mock1"),
            "of a dma-buf with mock1: Operation not supported",
        ),
        (
            (Gpus::Near, "old"),
            ("NCCL_NET_GDR_LEVEL", "PXB"),
            "libibverbs has no ibv_reg_dmabuf_mr",
        ),
    ] {
        let Some((said, carried)) = nodes(test, &["random", "2", "n", "1"], on, &[variable]) else {
            return;
        };
        let told = said
            .lines()
            .filter_map(|line| Some(&line[line.find("GPUDirect : GPU ")?..]))
            .filter(|line| line.contains("staged in host memory") && line.contains(why));
        let mut told: Vec<&str> = told.collect();
        told.sort_unstable();
        let of = |gpu| told.iter().any(|line| line.starts_with(gpu));
        assert!(
            of("GPUDirect : GPU 0 ") && of("GPUDirect : GPU 1 "),
            "{variable:?}: {said}"
        );
        assert!(
            told.windows(2).all(|two| two[0] != two[1]),
            "{variable:?}: {told:?}"
        );
        assert!(
            !said.contains("NCCL WARN") && said.contains("via NET/IB/0"),
            "{variable:?}: {said}"
        );
        // Regions of the other device were made and are gone.
        assert!(
            carried.from_dma_bufs + carried.into_dma_bufs == 0 && carried.from_host > 0,
            "{variable:?}: {carried:?}"
        );
    }
    // As far as is allowed.
    let allowed = [("NCCL_NET_GDR_LEVEL", "NODE")];
    if let Some((said, carried)) = nodes(test, &["random", "2", "n", "1"], far, &allowed) {
        // Of both ranks, each with both ports.
        assert_eq!(lines(&said, "distance NODE <= NODE"), 4, "{said}");
        assert!(carried.is_direct(), "{carried:?}");
    }
}

/// Each GPU has a NIC of its own. Where the sender's has the say, the receiver's slots are staged: its GPU is far from that one.
#[test]
fn slots_of_a_port_that_the_peer_has_chosen_are_direct_if_it_is_near() {
    let test = "gpu_direct::slots_of_a_port_that_the_peer_has_chosen_are_direct_if_it_is_near";
    // Without a backup, which would be far from either.
    let with = |cross| [("RINGSIGHT_NET_FAILOVER", "0"), ("NCCL_CROSS_NIC", cross)];
    let on = (Gpus::Apart, "verbs");
    let Some((said, carried)) = nodes(test, &["random", "2", "n", "1"], on, &with("2")) else {
        return;
    };
    assert!(carried.is_direct(), "{carried:?}\n{said}");
    if let Some((said, carried)) = nodes(test, &["random", "2", "n", "1"], on, &with("0")) {
        assert!(!said.contains("NCCL WARN"), "{said}");
        assert!(
            carried.from_dma_bufs > 0 && carried.from_host == 0 && carried.into_dma_bufs == 0,
            "{carried:?}\n{said}"
        );
    }
}

/// Slots in the memory of a GPU are of no use to a socket: kernels find theirs in host memory, also where these were asked for before
/// it was known.
#[test]
fn what_goes_over_sockets_after_all_is_staged() {
    let test = "gpu_direct::what_goes_over_sockets_after_all_is_staged";
    for node in ["node0", "node1"] {
        let unreached = [("RINGSIGHT_MOCK_UNREACHED", node)];
        let on = (Gpus::Near, "verbs");
        let Some((said, carried)) = nodes(test, &["random", "2", "n", "2"], on, &unreached) else {
            return;
        };
        assert_eq!(lines(&said, "16 places of "), 2, "{said}");
        assert!(said.contains("via NET/Socket"), "{said}");
        assert_eq!((carried.from_dma_bufs, carried.from_host), (0, 0), "{carried:?}");
    }
}
