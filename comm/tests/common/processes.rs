//! Processes that a test starts, and what each of them learns of its part.
//!
//! A test names a body of the program `rank-worker` (`tests/rank_worker/`), and a process of its own runs it: a rank, or
//! something that may share its process with nothing else. A process that ends with success has run its body to the end.

use std::{
    env,
    fmt::Write as _,
    process::{Child, Command, Output, Stdio},
    sync::OnceLock,
    thread,
    time::Duration,
};

use ringsight_comm::abi::UniqueIdBytes;

use super::{
    Rank, host, unique_id,
    variables::{ID, PLACE},
};

/// How long after the death of a process the other ranks are released.
pub const RELEASE: Duration = Duration::from_secs(2);

/// The program; unknown where the program itself is compiled.
const WORKER: Option<&str> = option_env!("CARGO_BIN_EXE_rank-worker");

/// The command that runs `body` in a process of its own. Panics at once if there is no such body.
#[track_caller]
pub fn worker(body: &str) -> Command {
    static BODIES: OnceLock<String> = OnceLock::new();
    let program = WORKER.expect("only tests start processes");
    let run = |argument| {
        let output = Command::new(program).arg(argument).output();
        output.unwrap_or_else(|error| panic!("{program}: {error}"))
    };
    let bodies = BODIES.get_or_init(|| text(&run("--list")));
    if !bodies.lines().any(|known| known == body) {
        // The program says which name is meant.
        panic!("{}", text(&run(body)));
    }
    let mut command = Command::new(program);
    command.arg(body);
    command
}

/// What a process wrote: its standard output, then its standard error.
pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Runs a body in a process of its own, which must succeed, and returns what it wrote.
#[track_caller]
pub fn alone(body: &str, change: impl FnOnce(&mut Command)) -> String {
    let mut command = worker(body);
    change(&mut command);
    finish(&mut command)
}

/// Runs a command, which must succeed, and returns what it wrote.
#[track_caller]
pub fn finish(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = text(&output);
    assert!(output.status.success(), "{}:\n{text}", output.status);
    text
}

/// The same for the variables of a process that uses the host device.
#[track_caller]
pub fn alone_on_host(body: &str, variables: &[(&str, &str)]) -> String {
    alone(body, |command| {
        command
            .env("RINGSIGHT_DEVICE", "host")
            .env("NCCL_SOCKET_IFNAME", "lo")
            .envs(variables.iter().copied());
    })
}

/// Runs `body` in `ranks` processes on `nodes` nodes and waits until all have succeeded. A body takes its part by
/// [`rank_of_process`].
#[track_caller]
pub fn run_processes(body: &str, ranks: usize, nodes: usize) {
    run_processes_with(body, ranks, nodes, &[]);
}

/// The same with environment variables.
#[track_caller]
pub fn run_processes_with(body: &str, ranks: usize, nodes: usize, variables: &[(&str, &str)]) {
    let outputs = outputs(start_processes(body, ranks, nodes, variables));
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}:\n{}", text(output));
    }
}

/// What processes write, until all have ended. All are read at the same time: a process whose output nobody reads waits.
pub fn outputs(processes: Vec<Child>) -> Vec<Output> {
    let readers: Vec<_> = processes
        .into_iter()
        .map(|child| thread::spawn(|| child.wait_with_output().unwrap()))
        .collect();
    readers.into_iter().map(|reader| reader.join().unwrap()).collect()
}

/// Starts the processes of [`run_processes_with`] and waits for none.
#[track_caller]
pub fn start_processes(body: &str, ranks: usize, nodes: usize, variables: &[(&str, &str)]) -> Vec<Child> {
    start_each(body, ranks, nodes, |_, command| {
        command.envs(variables.iter().copied());
    })
}

/// The same, where each rank's process may differ: `change` gets the rank and its command.
#[track_caller]
pub fn start_each(
    body: &str,
    ranks: usize,
    nodes: usize,
    change: impl Fn(usize, &mut Command),
) -> Vec<Child> {
    host();
    let id = to_hex(unique_id());
    let start = |rank| {
        let mut command = worker(body);
        command
            .env(ID, &id)
            .env(PLACE, format!("{rank} {ranks}"))
            .env("RINGSIGHT_DEVICE", "host")
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("NCCL_HOSTID", format!("node{}", rank * nodes / ranks))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        change(rank, &mut command);
        command.spawn().unwrap()
    };
    (0..ranks).map(start).collect()
}

/// Joins the communicator as the rank that this process was started as.
pub fn rank_of_process() -> Rank {
    let (id, rank, ranks) = place_of_process();
    Rank::join(id, rank, ranks)
}

/// The unique id, rank and number of ranks that this process was started with.
pub fn place_of_process() -> (UniqueIdBytes, usize, usize) {
    let place = variable(PLACE);
    let (rank, ranks) = place.split_once(' ').expect("a rank and how many there are");
    (
        from_hex(&variable(ID)),
        rank.parse().unwrap(),
        ranks.parse().unwrap(),
    )
}

/// An environment variable that a body's test sets.
#[track_caller]
pub fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|error| panic!("{name}, which the test sets: {error}"))
}

/// A unique id in hexadecimal digits.
pub fn to_hex(id: UniqueIdBytes) -> String {
    id.0.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The unique id of [`to_hex`].
pub fn from_hex(text: &str) -> UniqueIdBytes {
    let mut bytes = [0; 128];
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(str::from_utf8(digits).unwrap(), 16).unwrap();
    }
    UniqueIdBytes(bytes)
}
