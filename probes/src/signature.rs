//! The exported functions of `nccl.h` (2.28) and what their arguments mean: decoding a call by its signature.

use ringsight_records::{
    DataType, Function, ReduceOp,
    probed::{ARGUMENTS, STACK_ARGUMENTS},
};

use crate::sample::Call;

/// Arguments that registers hold; the rest lies on the stack (System V x86-64).
const REGISTER_ARGUMENTS: usize = 6;

/// Meaning of one argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Argument {
    Send,
    Recv,
    /// One buffer, sent by the root and received by the others (`ncclBcast`).
    Both,
    Count,
    Type,
    Reduction,
    /// Root or peer.
    Peer,
    Comm,
    Stream,
}

use Argument::{Both, Comm, Count, Peer, Recv, Reduction, Send, Stream, Type};

struct Signature {
    name: &'static str,
    function: Option<Function>,
    arguments: &'static [Argument],
}

const fn operation(name: &'static str, function: Function, arguments: &'static [Argument]) -> Signature {
    Signature {
        name,
        function: Some(function),
        arguments,
    }
}

const SIGNATURES: [Signature; 13] = [
    operation(
        "ncclAllReduce",
        Function::AllReduce,
        &[Send, Recv, Count, Type, Reduction, Comm, Stream],
    ),
    operation(
        "ncclAllGather",
        Function::AllGather,
        &[Send, Recv, Count, Type, Comm, Stream],
    ),
    operation(
        "ncclReduceScatter",
        Function::ReduceScatter,
        &[Send, Recv, Count, Type, Reduction, Comm, Stream],
    ),
    operation(
        "ncclBroadcast",
        Function::Broadcast,
        &[Send, Recv, Count, Type, Peer, Comm, Stream],
    ),
    operation(
        "ncclBcast",
        Function::Broadcast,
        &[Both, Count, Type, Peer, Comm, Stream],
    ),
    operation(
        "ncclReduce",
        Function::Reduce,
        &[Send, Recv, Count, Type, Reduction, Peer, Comm, Stream],
    ),
    operation(
        "ncclSend",
        Function::Send,
        &[Send, Count, Type, Peer, Comm, Stream],
    ),
    operation(
        "ncclRecv",
        Function::Recv,
        &[Recv, Count, Type, Peer, Comm, Stream],
    ),
    operation(
        "ncclAlltoAll",
        Function::AlltoAll,
        &[Send, Recv, Count, Type, Comm, Stream],
    ),
    operation(
        "ncclGather",
        Function::Gather,
        &[Send, Recv, Count, Type, Peer, Comm, Stream],
    ),
    operation(
        "ncclScatter",
        Function::Scatter,
        &[Send, Recv, Count, Type, Peer, Comm, Stream],
    ),
    Signature {
        name: "ncclGroupStart",
        function: None,
        arguments: &[],
    },
    Signature {
        name: "ncclGroupEnd",
        function: None,
        arguments: &[],
    },
];

/// Exported functions whose calls are decoded; a function's place is its number in an attach cookie.
pub const NAMES: [&str; SIGNATURES.len()] = {
    let mut names = [""; SIGNATURES.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = SIGNATURES[i].name;
        i += 1;
    }
    names
};

/// The cookie bits of a function: its number, and whether it has arguments on the stack. `None` for unknown names.
pub(crate) fn cookie(name: &str) -> Option<u64> {
    let index = SIGNATURES.iter().position(|signature| signature.name == name)?;
    let stack = if SIGNATURES[index].arguments.len() > REGISTER_ARGUMENTS {
        STACK_ARGUMENTS
    } else {
        0
    };
    Some(index as u64 | stack)
}

/// What was called, by function number and raw arguments; `None` if there is no such function.
pub(crate) fn decode(function: usize, raw: &[u64; ARGUMENTS]) -> Option<Call> {
    let signature = SIGNATURES.get(function)?;
    let Some(function) = signature.function else {
        return Some(if signature.name == "ncclGroupStart" {
            Call::GroupStart
        } else {
            Call::GroupEnd
        });
    };
    let value = |wanted: Argument| {
        signature
            .arguments
            .iter()
            .position(|argument| *argument == wanted)
            .map(|index| raw[index])
    };
    // Enumerations are 32-bit: the upper half of their register is whatever the caller left there.
    let code = |wanted| value(wanted).and_then(|raw| u8::try_from(raw as u32).ok());
    Some(Call::Operation {
        function,
        send: value(Send).or(value(Both)).unwrap_or(0),
        recv: value(Recv).or(value(Both)).unwrap_or(0),
        count: value(Count).unwrap_or(0),
        data_type: code(Type).and_then(DataType::from_code),
        reduce_op: code(Reduction)
            .and_then(ReduceOp::from_code)
            .filter(|op| *op != ReduceOp::None),
        peer: value(Peer).map_or(-1, |raw| raw as i32),
        comm: value(Comm).unwrap_or(0),
        stream: value(Stream).unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_fit_the_event() {
        for (signature, name) in SIGNATURES.iter().zip(NAMES) {
            assert_eq!(signature.name, name);
            assert!(signature.arguments.len() <= ARGUMENTS, "{name}");
        }
    }

    #[test]
    fn stack_arguments_are_asked_for_where_there_are_any() {
        assert_eq!(cookie("ncclAllReduce"), Some(STACK_ARGUMENTS));
        assert_eq!(cookie("ncclAllGather"), Some(1));
        assert_eq!(cookie("ncclCommInitRank"), None);
    }

    #[test]
    fn a_reduce_is_decoded_with_garbage_in_the_upper_halves() {
        let high = 0xdead_beef_0000_0000;
        let raw = [0x1000, 0x2000, 77, high | 7, high | 2, high | 3, 0xc0, 0x57];
        let expected = Call::Operation {
            function: Function::Reduce,
            send: 0x1000,
            recv: 0x2000,
            count: 77,
            data_type: Some(DataType::Float32),
            reduce_op: Some(ReduceOp::Max),
            peer: 3,
            comm: 0xc0,
            stream: 0x57,
        };
        assert_eq!(decode(5, &raw), Some(expected));
        // A reduction made by ncclRedOpCreatePreMulSum has a number of its own and is no built-in one.
        let raw = [0x1000, 0x2000, 77, 99, 4096, 3, 0xc0, 0x57];
        let Some(Call::Operation {
            data_type: None,
            reduce_op: None,
            ..
        }) = decode(5, &raw)
        else {
            panic!("numbers that mean nothing must not be given a meaning")
        };
        assert_eq!(decode(99, &raw), None);
    }
}
