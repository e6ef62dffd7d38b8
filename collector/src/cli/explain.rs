//! `ringsight explain`: which algorithm a library takes for an operation, and why not another.

use std::{
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use clap::{Args, ValueEnum};
use ringsight_collector::explain::{Explained, Operation, Seen, Table, Terms, of_process, of_spans};
use ringsight_probes::{look, target};
use ringsight_records::{DataType, Function, Protocol, ReduceOp, pages::APART_BYTES};
use tracing::error;

use super::{Exit, print};

/// What is to be explained.
#[derive(Args, Debug)]
#[command(
    after_help = "Without PID and --spans: the operation that the options describe, which need not exist."
)]
pub(crate) struct ExplainArguments {
    /// Process whose operations are explained: those on their way, the last finished ones, captured ones
    #[arg(conflicts_with_all = ["spans", "op"])]
    pid: Option<u32>,
    /// Recorded spans whose operations are explained: what `attach --out` has written
    #[arg(long, value_name = "FILE", conflicts_with = "op")]
    spans: Option<PathBuf>,
    /// Operation
    #[arg(long, value_name = "NAME", default_value = "all_reduce", value_parser = function)]
    op: Function,
    /// Message bytes as nccl-tests count them: of all ranks for gathers, scatters and alltoall; 64K, 16M, 1G
    #[arg(long, value_name = "BYTES", default_value = "1M", value_parser = bytes)]
    bytes: u64,
    /// Type of the elements
    #[arg(long = "type", value_name = "NAME", default_value = "float32", value_parser = data_type)]
    data_type: DataType,
    /// Reduction
    #[arg(long, value_name = "NAME", default_value = "sum", value_parser = reduction)]
    reduction: ReduceOp,
    /// Ranks of the communicator
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: u32,
    /// Channels of the communicator [default: 8; 2 on the host device]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    channels: Option<u32>,
    /// Bytes of a FIFO's slot: an eighth of NCCL_BUFFSIZE
    #[arg(long, value_name = "BYTES", default_value = "128K", value_parser = bytes)]
    slot: u64,
    /// What the ranks run on
    #[arg(long, value_enum, default_value_t = On::Peers)]
    on: On,
    /// The receive buffer, of a reduce_scatter the send buffer, is in a window that all ranks registered as symmetric
    #[arg(long)]
    window: bool,
    /// All ranks' CTAPolicy is zero (NCCL_CTA_POLICY=2)
    #[arg(long)]
    zero_cta: bool,
    /// Library whose table it is [default: the process's own, else libnccl.so.2 where the system finds it]
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// Write JSON
    #[arg(long)]
    json: bool,
}

/// What ranks run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum On {
    /// GPUs that reach each other's memory
    Peers,
    /// GPUs that do not: of several nodes, or kept apart
    Gpus,
    /// CPU memory
    Host,
}

fn function(name: &str) -> Result<Function, String> {
    find(name, Function::ALL, Function::name)
}

fn data_type(name: &str) -> Result<DataType, String> {
    find(name, DataType::ALL, DataType::name)
}

fn reduction(name: &str) -> Result<ReduceOp, String> {
    find(name, ReduceOp::ALL, ReduceOp::name)
}

fn find<T: Copy>(name: &str, all: &[T], named: impl Fn(T) -> &'static str) -> Result<T, String> {
    all.iter()
        .copied()
        .find(|one| named(*one) == name)
        .ok_or_else(|| {
            let names: Vec<_> = all.iter().map(|one| named(*one)).collect();
            format!("it is none of {}", names.join(", "))
        })
}

/// A number of bytes with K, M or G behind it.
fn bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(digits) if text.ends_with('K') => (digits, 10),
        Some(digits) if text.ends_with('M') => (digits, 20),
        Some(digits) => (digits, 30),
        None => (text, 0),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| "it is no number of bytes such as 8, 64K or 1G".to_owned())?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| "it is too large".to_owned())
}

impl ExplainArguments {
    /// The terms that the options name.
    fn terms(&self) -> Result<Terms, String> {
        Ok(Terms {
            channels: self.channels.unwrap_or(if self.on == On::Host { 2 } else { 8 }),
            slot_bytes: u32::try_from(self.slot).map_err(|_| "--slot is too large".to_owned())?,
            one_shot: true,
            peers: self.on == On::Peers,
            apart: [0; APART_BYTES],
            zero_cta: self.zero_cta,
        })
    }

    fn operation(&self) -> Operation {
        let reduces = self.op.reduces();
        Operation {
            function: self.op,
            bytes: self.bytes,
            data_type: self.data_type,
            reduce_op: if reduces { self.reduction } else { ReduceOp::None },
            ranks: self.ranks,
            registered: None,
            captured: None,
        }
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &ExplainArguments) -> Exit {
    match explain(arguments) {
        Ok(text) => print(&text),
        Err(error) => {
            error!("{error}");
            Exit::Error
        }
    }
}

fn explain(arguments: &ExplainArguments) -> Result<String, String> {
    let (table, seen) = match (arguments.pid, &arguments.spans) {
        (Some(pid), _) => of_pid(pid, arguments.library.as_deref())?,
        (None, Some(file)) => {
            let text = std::fs::read_to_string(file)
                .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
            let seen = of_spans(&text).map_err(|error| format!("{}: {error}", file.display()))?;
            (named(arguments.library.as_deref())?, seen)
        }
        (None, None) => {
            let (operation, terms) = (arguments.operation(), arguments.terms()?);
            let rows =
                named(arguments.library.as_deref())?.explain(&operation, &terms, Some(arguments.window))?;
            let explained = Explained {
                operation,
                terms,
                done: None,
                rows,
            };
            return Ok(written(&[explained], arguments.json));
        }
    };
    if seen.is_empty() {
        return Err("no operation is described there".to_owned());
    }
    let mut all = Vec::new();
    for ((operation, terms, done), times) in seen {
        let is_by_engines = done.protocol == Protocol::Ce;
        // Of a communicator that is gone, or of a record that does not have them: those of the options.
        let terms = match terms {
            Some(terms) => terms,
            None => {
                let told = arguments.terms()?;
                // Long ones may be by copy engines whatever the policy: it is no other choice then.
                let zero_cta = told.zero_cta || is_by_engines;
                Terms { zero_cta, ..told }
            }
        };
        all.push(Explained {
            operation,
            terms,
            done: Some((done, times)),
            // Of what went otherwise nothing says whether it was in a window, but the user may.
            rows: table.explain(
                &operation,
                &terms,
                (is_by_engines || arguments.window).then_some(true),
            )?,
        });
    }
    Ok(written(&all, arguments.json))
}

fn written(all: &[Explained], json: bool) -> String {
    if json {
        let values: Vec<_> = all.iter().map(Explained::json).collect();
        format!("{:#}\n", serde_json::Value::from(values))
    } else {
        all.iter().map(Explained::text).collect::<Vec<_>>().join("\n")
    }
}

/// The library that the user names.
fn named(library: Option<&Path>) -> Result<Table, String> {
    let file = library.unwrap_or(Path::new("libnccl.so.2"));
    // SAFETY: the user's choice, as with any program that they start.
    unsafe { Table::load(file) }.map_err(|error| match library {
        Some(_) => error,
        None => format!("{error}; name the library with --library"),
    })
}

/// The operations that a process describes, and its library's table.
fn of_pid(pid: u32, library: Option<&Path>) -> Result<(Table, Seen), String> {
    let looked = look(pid).map_err(|error| error.to_string())?;
    let seen = of_process(&looked.communicators, &looked.operations);
    if let Some(file) = library {
        return Ok((named(Some(file))?, seen));
    }
    let found = target::find(pid).map_err(|error| error.to_string())?;
    let about = found.file.metadata().map_err(|error| error.to_string())?;
    // SAFETY: asks for a number.
    let own = unsafe { libc::geteuid() };
    if !trusts(own, about.uid(), about.mode()) {
        return Err(format!(
            "{} could have been changed by others than user {own}, so it is not loaded: name a library that you trust with \
             --library",
            found.path.display()
        ));
    }
    // What the process has mapped, whatever its path means here.
    let file = PathBuf::from(format!("/proc/self/fd/{}", found.file.as_raw_fd()));
    // SAFETY: only the user, or the superuser, can have put anything into it.
    let table = unsafe { Table::load(&file) }
        .map_err(|error| error.replace(&file.display().to_string(), &found.path.display().to_string()))?;
    Ok((table, seen))
}

/// Whether a file may be loaded by user `own`: nobody else but the superuser may write to it.
fn trusts(own: u32, owner: u32, mode: u32) -> bool {
    const OTHERS_MAY_WRITE: u32 = 0o022;
    (owner == own || owner == 0) && mode & OTHERS_MAY_WRITE == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(bytes("8"), Ok(8));
        assert_eq!(bytes("64K"), Ok(64 << 10));
        assert_eq!(bytes("16M"), Ok(16 << 20));
        assert_eq!(bytes("1G"), Ok(1 << 30));
        for wrong in ["", "K", "-1", "1k", "1.5M", "99999999999G"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        assert!(function("allreduce").unwrap_err().contains("all_reduce"));
    }

    #[test]
    fn a_library_that_others_can_change_is_not_loaded() {
        assert!(trusts(1000, 1000, 0o100_755) && trusts(1000, 0, 0o100_644) && trusts(0, 0, 0o100_644));
        assert!(
            !trusts(0, 1000, 0o100_755),
            "a user's file, and the superuser is to run it"
        );
        assert!(!trusts(1000, 1000, 0o100_775) && !trusts(1000, 0, 0o100_666));
    }
}
