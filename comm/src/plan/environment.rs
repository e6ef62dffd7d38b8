//! The [`Limits`] that this rank's environment sets.
//!
//! `RINGSIGHT_ALGO` and `RINGSIGHT_PROTO` are written as NCCL's `NCCL_ALGO` and `NCCL_PROTO` (user guide, since 2.24): `ring,direct`, `^ll128`,
//! `two_shot;broadcast:ring`. They may name what some row of [the table](super::table) has.

use ringsight_comm_base::{
    env,
    error::{Error, Result},
};
use ringsight_records::{Algorithm, Function, Protocol};

use super::{
    allowed::{Allowed, FUNCTIONS},
    limits::{COPY_ENGINE_BYTES, Limits, PUSH_BYTES, TILE_BYTES},
    table::{Row, TABLE},
};

/// The limits that this rank's environment sets. `zero_cta`: the rank's `CTAPolicy` is zero.
///
/// # Errors
/// A variable with an impossible value.
pub(crate) fn limits(zero_cta: bool) -> Result<Limits> {
    let may_zero_copy = !env::switch("NCCL_P2P_DIRECT_DISABLE", false);
    let zero_copy_bytes = env::number("RINGSIGHT_STRAIGHT_BYTES")?;
    // Copy engines, too, write into callers' buffers.
    let copy_engine_bytes = |name| -> Result<Option<u64>> {
        let bytes: Option<u64> = env::number(name)?;
        Ok(bytes.or((!may_zero_copy).then_some(u64::MAX)))
    };
    let limits = Limits {
        zero_copy_bytes: if may_zero_copy {
            zero_copy_bytes
        } else {
            Some(u64::MAX)
        },
        push_bytes: env::number("RINGSIGHT_PUSH_BYTES")?.unwrap_or(PUSH_BYTES),
        copy_engine_bytes: copy_engine_bytes("RINGSIGHT_ENGINE_BYTES")?.unwrap_or(COPY_ENGINE_BYTES),
        copy_engine_reduce_bytes: copy_engine_bytes("RINGSIGHT_ENGINE_REDUCE_BYTES")?,
        tile_bytes: env::number("RINGSIGHT_ENGINE_PIECE_BYTES")?.unwrap_or(TILE_BYTES),
        allowed: allowed()?,
    };
    Ok(if zero_cta { limits.with_zero_cta() } else { limits })
}

/// The algorithms and protocols that `RINGSIGHT_ALGO` and `RINGSIGHT_PROTO` allow.
///
/// # Errors
/// A name that no row of the table has. The error lists the names that rows have.
fn allowed() -> Result<Allowed> {
    let in_table = |is: &dyn Fn(&Row) -> bool| TABLE.iter().any(is);
    let algorithms = Algorithm::ALL
        .iter()
        .filter(|each| in_table(&|row| row.algorithm == **each));
    let protocols = Protocol::ALL
        .iter()
        .filter(|each| in_table(&|row| row.path.protocol() == **each));
    let algorithms: Vec<_> = algorithms.map(|each| (each.name(), each.code())).collect();
    let protocols: Vec<_> = protocols.map(|each| (each.name(), each.code())).collect();
    Ok(Allowed {
        algorithms: read("RINGSIGHT_ALGO", &algorithms)?,
        protocols: read("RINGSIGHT_PROTO", &protocols)?,
    })
}

/// Value of `variable` for each function.
fn read(variable: &str, names: &[(&str, u8)]) -> Result<[u8; FUNCTIONS]> {
    match env::text(variable) {
        None => Ok([u8::MAX; FUNCTIONS]),
        Some(text) => parse(&text, names)
            .map_err(|why| Error::argument(format!("environment variable {variable}={text}: {why}"))),
    }
}

/// A list for all functions, lists for one each (`function:list`), or one after the other, between semicolons.
fn parse(text: &str, names: &[(&str, u8)]) -> std::result::Result<[u8; FUNCTIONS], String> {
    let mut bits = [u8::MAX; FUNCTIONS];
    for (number, part) in text.split(';').enumerate() {
        match part.split_once(':') {
            Some((function, list)) => {
                let found = Function::ALL.iter().find(|each| is_same(each.name(), function));
                let function = found.ok_or_else(|| {
                    let all: Vec<_> = Function::ALL.iter().map(|each| each.name()).collect();
                    format!("{} is none of {}", function.trim(), all.join(", "))
                })?;
                bits[usize::from(function.code())] = parse_list(list, names)?;
            }
            None if number == 0 => bits = [parse_list(part, names)?; FUNCTIONS],
            None => return Err(format!("{} is for no function: FUNCTION:LIST", part.trim())),
        }
    }
    // Both ends of a message must come to the same choice.
    let ends = [Function::Send, Function::Recv].map(|end| usize::from(end.code()));
    let both = bits[ends[0]] & bits[ends[1]];
    ends.iter().for_each(|end| bits[*end] = both);
    Ok(bits)
}

/// A list of names between commas. A leading `^` makes it the list of names that are left out.
fn parse_list(text: &str, names: &[(&str, u8)]) -> std::result::Result<u8, String> {
    let text = text.trim();
    let (without, list) = text.strip_prefix('^').map_or((false, text), |list| (true, list));
    let mut bits = 0;
    for wanted in list.split(',') {
        let found = names.iter().find(|(name, _)| is_same(name, wanted));
        let (_, code) = found.ok_or_else(|| {
            let all: Vec<_> = names.iter().map(|(name, _)| *name).collect();
            format!("{} is none of {}", wanted.trim(), all.join(", "))
        })?;
        bits |= 1 << code;
    }
    Ok(if without { !bits } else { bits })
}

/// Compares without case and underscores: NCCL writes `AllReduce` and `allreduce`.
fn is_same(name: &str, wanted: &str) -> bool {
    let letters = |text: &str| text.trim().replace('_', "").to_ascii_lowercase();
    letters(name) == letters(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [(&str, u8); 3] = [("ring", 1), ("direct", 2), ("one_shot", 3)];

    #[test]
    fn lists_are_for_all_functions_or_for_one() {
        let bits = |text| parse(text, &NAMES).unwrap();
        assert_eq!(bits("ring"), [0b10; FUNCTIONS]);
        assert_eq!(bits(" Ring , OneShot "), [0b1010; FUNCTIONS]);
        assert_eq!(bits("^ring,direct"), [!0b110; FUNCTIONS]);
        let some = bits("ring;allreduce:one_shot;Broadcast:^direct");
        assert_eq!(some[Function::AllReduce as usize], 0b1000);
        assert_eq!(some[Function::Broadcast as usize], !0b100);
        assert_eq!(some[Function::Send as usize], 0b10);
        let message = bits("send:ring,direct;recv:direct");
        assert_eq!(
            [Function::Send, Function::Recv].map(|end| message[end as usize]),
            [0b100; 2]
        );
        // The others are as they were.
        let one = bits("all_reduce:ring");
        assert_eq!((one[0], one[1]), (0b10, u8::MAX));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let why = |text| parse(text, &NAMES).unwrap_err();
        assert_eq!(why("tree"), "tree is none of ring, direct, one_shot");
        assert!(why("ring,").contains(" is none of ring"));
        assert!(why("").contains("none of"));
        assert!(why("ring;direct").contains("direct is for no function"));
        assert!(why("allreduces:ring").starts_with("allreduces is none of all_reduce, "));
    }
}
