//! `ringsight explain`: which algorithm a library takes for an operation, and why not another.

mod search;

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use clap::{Args, ValueEnum};
use ringsight_collector::explain::{Done, Explained, Operation, Question, Terms, ask, of_process, of_spans};
use ringsight_probes::{look, target};
use ringsight_records::{DataType, Function, Protocol, ReduceOp, pages::APART_BYTES};
use tracing::error;

use super::{Exit, print, print_json};

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
        Ok(all) if arguments.json => print_json(&all.iter().map(Explained::json).collect::<Vec<_>>().into()),
        Ok(all) => print(&all.iter().map(Explained::text).collect::<Vec<_>>().join("\n")),
        Err(error) => {
            error!("{error}");
            Exit::Error
        }
    }
}

fn explain(arguments: &ExplainArguments) -> Result<Vec<Explained>, String> {
    let library = arguments.library.as_deref();
    let (library, seen) = match (arguments.pid, &arguments.spans) {
        (Some(pid), _) => {
            let looked = look(pid).map_err(|error| error.to_string())?;
            let seen = of_process(&looked.communicators, &looked.operations);
            let library = match library {
                Some(_) => Library::named(library)?,
                None => Library::of_process(pid)?,
            };
            (library, seen)
        }
        (None, Some(file)) => {
            let text = std::fs::read_to_string(file)
                .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
            let seen = of_spans(&text).map_err(|error| format!("{}: {error}", file.display()))?;
            (Library::named(library)?, seen)
        }
        (None, None) => {
            let (operation, terms) = (arguments.operation(), arguments.terms()?);
            let asked = Asked {
                operation,
                terms,
                done: None,
                in_window: Some(arguments.window),
            };
            return Library::named(library)?.explain(vec![asked]);
        }
    };
    if seen.is_empty() {
        return Err("no operation is described there".to_owned());
    }
    let asked = seen.into_iter().map(|((operation, terms, done), times)| {
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
        Ok(Asked {
            operation,
            terms,
            done: Some((done, times)),
            // Of what went otherwise nothing says whether it was in a window, but the user may.
            in_window: (is_by_engines || arguments.window).then_some(true),
        })
    });
    library.explain(asked.collect::<Result<_, String>>()?)
}

/// An operation that the library is asked about.
struct Asked {
    operation: Operation,
    terms: Terms,
    done: Option<(Done, u64)>,
    in_window: Option<bool>,
}

/// A library, whoever wrote it: only a process without rights runs its code.
struct Library {
    file: File,
    path: PathBuf,
}

impl Library {
    /// The library that the user names; without one, that of the system.
    fn named(library: Option<&Path>) -> Result<Self, String> {
        let name = library.unwrap_or(Path::new("libnccl.so.2"));
        let path = match search::library(name) {
            Some(path) => path,
            None if library.is_some() => return Err(format!("{}: there is no such library", name.display())),
            None => {
                return Err(format!(
                    "the system has no {}: name the library with --library",
                    name.display()
                ));
            }
        };
        let opened = path.metadata().and_then(|about| {
            if about.is_file() {
                File::open(&path)
            } else {
                Err(io::Error::other("it is not a regular file"))
            }
        });
        match opened {
            Ok(file) => Ok(Self { file, path }),
            Err(error) => Err(format!("{}: {error}", path.display())),
        }
    }

    /// What a process has mapped, whatever its path means here.
    fn of_process(pid: u32) -> Result<Self, String> {
        let found = target::find(pid).map_err(|error| error.to_string())?;
        Ok(Self {
            file: found.file,
            path: found.path,
        })
    }

    fn explain(self, all: Vec<Asked>) -> Result<Vec<Explained>, String> {
        let questions = all
            .iter()
            .map(|asked| Question::new(&asked.operation, &asked.terms, asked.in_window))
            .collect::<Result<Vec<_>, String>>()?;
        let rows = ask(self.file, &questions).map_err(|error| format!("{}: {error}", self.path.display()))?;
        let explained = all.into_iter().zip(rows).map(|(asked, rows)| Explained {
            operation: asked.operation,
            terms: asked.terms,
            done: asked.done,
            rows,
        });
        Ok(explained.collect())
    }
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
}
