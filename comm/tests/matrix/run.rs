//! Worlds as processes: each is this test binary again, running one world's share of ranks.

use std::{
    io::Read,
    process::{Child, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use ringsight_records::Function;

use super::cases::{World, of_world, sample};
use crate::common::{
    host,
    processes::{to_hex, worker},
    unique_id,
    variables::{ID, PLACE, WHAT},
};

/// Longer than the slowest world takes on a machine that does other things too.
const LIMIT: Duration = Duration::from_secs(900);

/// Runs `wanted` cases of a world; returns for each case the hashes of the ranks' results, or says what went wrong.
pub fn world(number: usize, wanted: usize, seed: u64) -> Result<Vec<(usize, Vec<u64>)>, String> {
    host();
    let world = World::all()[number];
    let id = to_hex(unique_id());
    let (results, ended) = mpsc::channel();
    let mut children: Vec<Child> = Vec::new();
    for ranks in world.processes() {
        let list: Vec<String> = ranks.iter().map(ToString::to_string).collect();
        let mut command = worker("matrix::ranks");
        command
            .env(WHAT, format!("{number} {wanted} {seed}"))
            .env(PLACE, list.join(" "))
            .env(ID, &id)
            .env("RINGSIGHT_DEVICE", "host")
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("NCCL_HOSTID", format!("node{}", world.node(ranks[0])))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(bytes) = world.buffer_bytes() {
            command.env("NCCL_BUFFSIZE", bytes);
        }
        let mut child = command.spawn().unwrap();
        let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let (results, index) = (results.clone(), children.len());
        thread::spawn(move || {
            let errors = thread::spawn(move || {
                let mut text = String::new();
                let _ = err.read_to_string(&mut text);
                text
            });
            let mut text = String::new();
            let _ = out.read_to_string(&mut text);
            // The world may have failed already, and nobody listens.
            let _ = results.send((index, text, errors.join().unwrap_or_default()));
        });
        children.push(child);
    }
    let mut outputs = Vec::new();
    let end = Instant::now() + LIMIT;
    let mut failed = None;
    while outputs.len() < children.len() && failed.is_none() {
        match ended.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok((index, out, err)) => {
                let status = children[index].wait().unwrap();
                if !status.success() {
                    let is_result = |line: &&str| line.starts_with("case ");
                    let out: Vec<&str> = out.lines().filter(|line| !is_result(line)).collect();
                    let out = out.join("\n");
                    failed = Some(format!("{world:?}, process {index}: {status}\n{out}\n{err}"));
                }
                outputs.push(out);
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                failed = Some(format!("{world:?}: not done after {LIMIT:?}"));
            }
        }
    }
    if let Some(why) = failed {
        // The others wait for what will not come.
        for child in &mut children {
            let _ = child.kill();
            let _ = child.wait();
        }
        return Err(why);
    }
    collect(world, number, wanted, seed, &outputs)
}

/// Reads what the ranks printed: `case <index> <hash>` lines; every rank must have done every case, and results that all
/// ranks share must be the same.
fn collect(
    world: World,
    number: usize,
    wanted: usize,
    seed: u64,
    outputs: &[String],
) -> Result<Vec<(usize, Vec<u64>)>, String> {
    let cases = of_world(world, number, seed);
    let mut hashes: Vec<(usize, Vec<u64>)> = sample(cases.len(), wanted, seed)
        .into_iter()
        .map(|index| (index, Vec::new()))
        .collect();
    for line in outputs.iter().flat_map(|output| output.lines()) {
        let mut words = line.split(' ');
        if words.next() != Some("case") {
            continue;
        }
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
        let (Some(index), Some(hash)) = (number(), number()) else {
            return Err(format!("{world:?}: {line:?} cannot be read"));
        };
        let place = hashes
            .binary_search_by_key(&(index as usize), |(index, _)| *index)
            .map_err(|_| format!("{world:?}: case {index} was not asked for"))?;
        hashes[place].1.push(hash);
    }
    for (index, hashes) in &mut hashes {
        let case = cases[*index];
        if hashes.len() != world.ranks {
            return Err(format!("{world:?} {case:?}: {} ranks did it", hashes.len()));
        }
        let shared = matches!(
            case.function,
            Function::AllReduce | Function::AllGather | Function::Broadcast
        );
        if shared && hashes.iter().any(|hash| *hash != hashes[0]) {
            return Err(format!("{world:?} {case:?}: ranks have different bits"));
        }
        // Processes end in any order.
        hashes.sort_unstable();
    }
    Ok(hashes)
}
