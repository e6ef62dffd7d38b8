//! Span names: few, and the same for every operation of a function.

use ringsight_records::Function;

use crate::identity::{Direction, TraceKind};

/// Name of a root span and of an operation.
pub(crate) fn operation(function: Option<Function>, kind: TraceKind) -> &'static str {
    match (kind, function) {
        (TraceKind::PointToPoint, _) => "send_recv",
        (_, function) => self::function(function),
    }
}

/// Name of a function; of one that is not known a word that is true of all.
pub(super) fn function(function: Option<Function>) -> &'static str {
    function.map_or("collective", Function::name)
}

/// Name of a rank span.
pub(super) fn rank(function: Option<Function>, direction: Direction) -> &'static str {
    match (direction, function) {
        (Direction::Send, _) => "send rank",
        (Direction::Recv, _) => "recv rank",
        (Direction::None, None) => "collective rank",
        (Direction::None, Some(function)) => match function {
            Function::AllReduce => "all_reduce rank",
            Function::AllGather => "all_gather rank",
            Function::ReduceScatter => "reduce_scatter rank",
            Function::Broadcast => "broadcast rank",
            Function::Reduce => "reduce rank",
            Function::AlltoAll => "alltoall rank",
            Function::Gather => "gather rank",
            Function::Scatter => "scatter rank",
            Function::Send => "send rank",
            Function::Recv => "recv rank",
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_span_is_named_after_its_function() {
        for &function in Function::ALL {
            assert_eq!(
                rank(Some(function), Direction::None),
                format!("{} rank", function.name())
            );
        }
        assert_eq!(
            operation(Some(Function::Recv), TraceKind::PointToPoint),
            "send_recv"
        );
    }
}
