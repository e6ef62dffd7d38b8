//! What users have reported of libraries of this kind, tried on this one: a test for each kind of report.

mod common;

#[path = "../../tests/src/skip.rs"]
mod skip;

use std::{
    fs,
    os::unix::process::CommandExt as _,
    process::{Command, Output, Stdio},
};

use common::{
    processes::{outputs, start_each, text, worker},
    variables::{FOLDER, WHAT},
};

/// A worker whose environment sets none of the variables that the tests set by files.
fn bare(body: &str) -> Command {
    let mut command = worker(body);
    command.env("RINGSIGHT_DEVICE", "host");
    for name in [
        "NCCL_DEBUG",
        "NCCL_DEBUG_SUBSYS",
        "NCCL_SOCKET_IFNAME",
        "NCCL_CONF_FILE",
        "HOME",
    ] {
        command.env_remove(name);
    }
    command
}

/// Runs a worker behind `script` in namespaces of its own, as their root. `None`, and a note, if `test` cannot have them: a script says
/// "ready" before it runs the worker.
fn apart(test: &str, namespaces: &[&str], script: &str, worker: &Command) -> Option<Output> {
    let mut command = Command::new("unshare");
    command
        .args(namespaces)
        .args(["--map-root-user", "sh", "-ec"])
        .arg(format!("{script}\necho ready\nexec \"$0\" \"$@\""))
        .arg(worker.get_program())
        .args(worker.get_args());
    for (name, value) in worker.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    match command.output() {
        Ok(output) if text(&output).contains("ready") => Some(output),
        other => {
            skip::skip(test, &format!("no such namespaces can be had here: {other:?}"));
            None
        }
    }
}

#[track_caller]
fn succeeds(output: &Output) -> String {
    let text = text(output);
    assert!(output.status.success(), "{}:\n{text}", output.status);
    text
}

/// What the log says of a variable.
fn set_by(name: &str, source: &str, value: &str) -> String {
    format!("NCCL INFO {name} set by {source} to {value}.")
}

#[test]
fn variables_stand_in_the_file_that_nccl_conf_file_names() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("job.conf");
    let lines = "# a comment\nNCCL_DEBUG=INFO\nNCCL_SOCKET_IFNAME=doesnotexist0\nNCCL_HOSTID=file\n";
    fs::write(&file, lines).unwrap();
    let path = file.display().to_string();
    let mut command = bare("reports::unique_id_alone");
    command.env("NCCL_CONF_FILE", &file);
    let said = succeeds(&command.output().unwrap());
    assert!(
        said.contains("END=InvalidArgument ncclGetUniqueId: NCCL_SOCKET_IFNAME=doesnotexist0"),
        "{said}"
    );
    // The log reads it, too.
    assert!(
        said.contains(&set_by("NCCL_SOCKET_IFNAME", &path, "doesnotexist0")),
        "{said}"
    );
    // What the environment sets counts, also where it is blank.
    let mut command = bare("logging::ranks");
    command
        .env("NCCL_CONF_FILE", &file)
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env("NCCL_HOSTID", "")
        .env(WHAT, "work");
    let said = succeeds(&command.output().unwrap());
    assert!(
        said.contains(&set_by("NCCL_SOCKET_IFNAME", "environment", "lo")),
        "{said}"
    );
    assert!(!said.contains("NCCL_HOSTID set"), "{said}");
    // One that is not there is named.
    let mut command = bare("reports::unique_id_alone");
    command
        .env("NCCL_CONF_FILE", "/nonexistent.conf")
        .env("NCCL_DEBUG", "WARN");
    let said = succeeds(&command.output().unwrap());
    assert!(
        said.contains("NCCL WARN /nonexistent.conf: its variables are not set"),
        "{said}"
    );
}

#[test]
fn variables_stand_in_the_files_of_the_user_and_of_the_system() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().display();
    let script = format!(
        "mount -t tmpfs none {at}
         mkdir {at}/upper {at}/work {at}/home {at}/other
         mount -t overlay none -o lowerdir=/etc,upperdir={at}/upper,workdir={at}/work /etc
         echo 'root:x:0:0::{at}/home:/bin/sh' > /etc/passwd
         printf 'NCCL_DEBUG=INFO\\nNCCL_SOCKET_IFNAME=ofhome0\\n' > {at}/home/.nccl.conf
         printf 'NCCL_SOCKET_IFNAME=ofother0\\nNCCL_SOCKET_FAMILY=AF_INET6\\n' > {at}/other/.nccl.conf
         printf 'NCCL_SOCKET_IFNAME=ofsystem0\\nNCCL_SOCKET_FAMILY=AF_INET\\nNCCL_COMM_ID=nowhere\\n' > /etc/nccl.conf
         printf 'NCCL_DEBUG=INFO\\n' > {at}/named.conf"
    );
    let test = "variables_stand_in_the_files_of_the_user_and_of_the_system";
    let run = |expected: &str, variables: &[(&str, String)]| {
        let mut command = bare("reports::unique_id_alone");
        command.envs(variables.iter().cloned());
        let said = succeeds(&apart(test, &["--mount"], &script, &command)?);
        let end = format!("END=InvalidArgument ncclGetUniqueId: {expected}");
        assert!(said.contains(&end), "no {end}: {said}");
        Some(said)
    };
    // The system's file comes last, and is read also where another one is named.
    let named = ("NCCL_CONF_FILE", format!("{at}/named.conf"));
    let Some(said) = run("NCCL_COMM_ID=nowhere: ", &[named]) else {
        return;
    };
    assert!(
        said.contains(&set_by("NCCL_COMM_ID", "/etc/nccl.conf", "nowhere")),
        "{said}"
    );
    // The home of the password file, whatever `HOME` says, and then that.
    let own = ("NCCL_COMM_ID", String::new());
    let home = ("HOME", format!("{at}/other"));
    let said = run(
        "NCCL_SOCKET_IFNAME=ofhome0 NCCL_SOCKET_FAMILY=AF_INET6",
        &[own.clone(), home],
    )
    .unwrap();
    let path = format!("{at}/home/.nccl.conf");
    assert!(
        said.contains(&set_by("NCCL_SOCKET_IFNAME", &path, "ofhome0")),
        "{said}"
    );
    run("NCCL_SOCKET_IFNAME=ofhome0 NCCL_SOCKET_FAMILY=AF_INET:", &[own]).unwrap();
}

/// Interfaces of a network namespace: `enp1s0` is up, and the other end of its link is down; the others run.
const LINKS: &str = "ip link set lo up
    ip link add enp1s0 type veth peer name away0
    ip addr add 10.1.0.1/24 dev enp1s0
    ip link set enp1s0 up
    for name in virbr0 docker0 eth0 ib0; do
        ip link add $name type veth peer name p$name
        ip link set $name up
        ip link set p$name up
    done
    ip addr add 10.2.0.1/24 dev virbr0
    ip addr add 10.3.0.1/24 dev docker0
    ip addr add 10.4.0.1/24 dev eth0
    ip addr add 10.5.0.1/24 dev ib0";

#[test]
fn an_interface_runs_and_is_chosen_by_nccls_order_of_names() {
    for (remove, wanted, expected) in [
        ("", None, "ib0:10.5.0.1"),
        ("ip link del ib0", None, "eth0:10.4.0.1"),
        ("ip link del ib0", Some("en,eth"), "eth0:10.4.0.1"),
        ("ip link del ib0; ip link del eth0", None, "docker0:10.3.0.1"),
        (
            "ip link del ib0; ip link del eth0; ip link del docker0",
            None,
            "lo:127.0.0.1",
        ),
    ] {
        let mut command = bare("reports::unique_id_alone");
        command.env("NCCL_DEBUG", "INFO");
        if let Some(wanted) = wanted {
            command.env("NCCL_SOCKET_IFNAME", wanted);
        }
        let test = "an_interface_runs_and_is_chosen_by_nccls_order_of_names";
        let script = format!("{LINKS}\n{remove}");
        let Some(output) = apart(test, &["--net"], &script, &command) else {
            return;
        };
        let said = succeeds(&output);
        assert!(
            said.contains(&format!("Bootstrap : Using {expected}\n")),
            "{remove}, {wanted:?}: {said}"
        );
    }
    // Without any that runs, those that do not are named.
    let mut command = bare("reports::unique_id_alone");
    command.env("NCCL_SOCKET_IFNAME", "en");
    if let Some(output) = apart("an interface without a carrier", &["--net"], LINKS, &command) {
        let said = succeeds(&output);
        assert!(said.contains("; down or without a carrier: enp1s0"), "{said}");
    }
}

#[test]
fn a_link_local_address_works_with_its_interface_by_name_and_by_number() {
    // Addresses are ready at once, and the interface has a number that is not the loopback's.
    let script = "echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad
        ip link set lo up
        ip link add eth0 type veth peer name peth0
        ip link set peth0 up
        ip link set eth0 up
        ip -6 addr add fe80::7/64 dev eth0 nodad";
    for scope in ["eth0", "$(cat /sys/class/net/eth0/ifindex)"] {
        let mut command = bare("reports::two_nodes");
        // Blank, so that nothing is set: ranks listen where they reach the root from.
        command.env("NCCL_IB_DISABLE", "1").env("NCCL_SOCKET_IFNAME", "");
        let test = "a_link_local_address_works_with_its_interface_by_name_and_by_number";
        // /sys shows the namespace's own interfaces once it is mounted anew.
        let script =
            format!("{script}\nmount -t sysfs none /sys\nexport NCCL_COMM_ID=\"[fe80::7%{scope}]:29804\"");
        let Some(output) = apart(test, &["--net", "--mount"], &script, &command) else {
            return;
        };
        succeeds(&output);
    }
}

#[test]
fn a_rank_without_descriptors_says_so() {
    // A communicator takes about fifteen: so many limits, one after the other, end its making at every place.
    let places = (60..76).flat_map(|limit| [(limit, &[0][..]), (limit, &[1])]);
    for (limit, limited) in places.chain([60, 100, 256].map(|limit| (limit, &[0, 1][..]))) {
        let processes = start_each("reports::splits_without_end", 2, 1, |rank, command| {
            // A proxy that cannot accept a client lets it wait, as long as ranks wait for each other.
            command.env("RINGSIGHT_BOOTSTRAP_TIMEOUT_MS", "2000");
            if !limited.contains(&rank) {
                return;
            }
            let lower = move || {
                let limit = libc::rlimit {
                    rlim_cur: limit,
                    rlim_max: limit,
                };
                // SAFETY: a valid limit.
                unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
                Ok(())
            };
            // SAFETY: the closure makes one system call and allocates nothing.
            unsafe { command.pre_exec(lower) };
        });
        let ends: Vec<String> = outputs(processes).iter().map(succeeds).collect();
        let says = |end: &str| end.contains("END=SystemError") && end.contains("Too many open files");
        // A limited rank's proxy may meet the limit first: it answers the peer that asked, which tells why.
        let refused = |end: &str, rank: &usize| {
            end.contains(&format!("the proxy of rank {rank} refuses: "))
                && end.contains("Too many open files")
        };
        let told = |rank: &usize| says(&ends[*rank]) || ends.iter().any(|end| refused(end, rank));
        let context = format!("limit {limit} of ranks {limited:?}:\n{}", ends.join("\n"));
        // Of two the first that has none left ends it for both.
        assert!(limited.iter().any(told), "{context}");
    }
}

#[test]
fn a_program_without_standard_descriptors_loses_lines_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = bare("reports::without_standard_descriptors");
    command
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env("NCCL_DEBUG", "INFO")
        .env("NCCL_DEBUG_SUBSYS", "ALL")
        .env(FOLDER, folder.path());
    let output = command.output().unwrap();
    let found = fs::read_to_string(folder.path().join("found"));
    assert_eq!(found.ok().as_deref(), Some("[] []"), "{}", text(&output));
    succeeds(&output);
}

#[test]
fn a_program_whose_output_nobody_reads_goes_on() {
    let mut command = bare("reports::without_readers");
    command
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env("NCCL_DEBUG", "INFO")
        .env("NCCL_DEBUG_SUBSYS", "ALL")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    succeeds(&child.wait_with_output().unwrap());
}

#[test]
fn numbers_and_the_logs_time_are_written_as_for_nccl() {
    let mut command = bare("logging::ranks");
    command
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env("NCCL_DEBUG", "INFO")
        .env("NCCL_DEBUG_TIMESTAMP_LEVELS", "ALL")
        .env("NCCL_DEBUG_TIMESTAMP_FORMAT", "at_%H_")
        .env("NCCL_BUFFSIZE", "0x200000")
        .env("NCCL_MIN_CTAS", "03")
        .env("NCCL_P2P_DISABLE", "0x0")
        .env("NCCL_CHECK_POINTERS", "0x1")
        .env("NCCL_IGNORE_CPU_AFFINITY", "0x1")
        .env(WHAT, "work");
    let said = succeeds(&command.output().unwrap());
    let complete = said.lines().find(|line| line.contains("Init COMPLETE")).unwrap();
    assert!(
        complete.contains("channels 3 slots of 262144 bytes"),
        "{complete}"
    );
    let hour = complete.strip_prefix("at ").and_then(|rest| rest.split_once(' '));
    assert!(
        hour.is_some_and(|(hour, _)| hour.parse::<u8>().is_ok()),
        "{complete}"
    );
}
