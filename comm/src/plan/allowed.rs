//! Which rows of [the table](super::table) the environment allows: `RINGSIGHT_ALGO` and `RINGSIGHT_PROTO`, written as NCCL's
//! `NCCL_ALGO` and `NCCL_PROTO` are (user guide, since 2.24): `ring,direct`, `^ll128`, `two_shot;broadcast:ring`.

use ringsight_comm_base::error::{Error, Result};
use ringsight_records::{Algorithm, Function, Protocol};

use super::table::{Row, TABLE};
use crate::op::DataPath;

const FUNCTIONS: usize = Function::ALL.len();

/// The algorithms and protocols that may be chosen, by function: one bit each, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allowed {
    algorithms: [u8; FUNCTIONS],
    protocols: [u8; FUNCTIONS],
}

/// All of them.
impl Default for Allowed {
    fn default() -> Self {
        Self {
            algorithms: [u8::MAX; FUNCTIONS],
            protocols: [u8::MAX; FUNCTIONS],
        }
    }
}

impl Allowed {
    /// Bytes of [`Allowed::to_bytes`].
    pub(crate) const BYTES: usize = 2 * FUNCTIONS;

    /// The environment's choice.
    ///
    /// # Errors
    /// A name that nothing in the table has; it is said which there are.
    pub(crate) fn from_environment() -> Result<Self> {
        let in_table = |is: &dyn Fn(&Row) -> bool| TABLE.iter().any(is);
        let algorithms = Algorithm::ALL
            .iter()
            .filter(|each| in_table(&|row| row.algorithm == **each));
        let protocols = Protocol::ALL
            .iter()
            .filter(|each| in_table(&|row| row.path.protocol() == **each));
        let algorithms: Vec<_> = algorithms.map(|each| (each.name(), each.code())).collect();
        let protocols: Vec<_> = protocols.map(|each| (each.name(), each.code())).collect();
        Ok(Self {
            algorithms: read("RINGSIGHT_ALGO", &algorithms)?,
            protocols: read("RINGSIGHT_PROTO", &protocols)?,
        })
    }

    /// Whether a function may be done so.
    #[must_use]
    pub(crate) fn has(&self, function: Function, algorithm: Algorithm, path: DataPath) -> bool {
        let at = usize::from(function.code());
        self.algorithms[at] & 1 << algorithm.code() != 0
            && self.protocols[at] & 1 << path.protocol().code() != 0
    }

    /// What both allow.
    #[must_use]
    pub(crate) fn and(&self, other: &Self) -> Self {
        let both = |a: &[u8; FUNCTIONS], b: &[u8; FUNCTIONS]| std::array::from_fn(|at| a[at] & b[at]);
        Self {
            algorithms: both(&self.algorithms, &other.algorithms),
            protocols: both(&self.protocols, &other.protocols),
        }
    }

    /// As sent to the other ranks.
    #[must_use]
    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..FUNCTIONS].copy_from_slice(&self.algorithms);
        bytes[FUNCTIONS..].copy_from_slice(&self.protocols);
        bytes
    }

    /// What [`Allowed::to_bytes`] gave.
    #[must_use]
    pub(crate) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            algorithms: std::array::from_fn(|at| bytes[at]),
            protocols: std::array::from_fn(|at| bytes[FUNCTIONS + at]),
        }
    }
}

/// The variable's value for each function.
fn read(variable: &str, names: &[(&str, u8)]) -> Result<[u8; FUNCTIONS]> {
    match ringsight_comm_base::env::text(variable) {
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
    // Both ends of a message come to the same choice.
    let ends = [Function::Send, Function::Recv].map(|end| usize::from(end.code()));
    let both = bits[ends[0]] & bits[ends[1]];
    ends.iter().for_each(|end| bits[*end] = both);
    Ok(bits)
}

/// Names between commas; behind `^` those that are left out.
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

/// In whatever case, and with or without underscores: NCCL writes `AllReduce` and `allreduce`.
fn is_same(name: &str, wanted: &str) -> bool {
    let letters = |text: &str| text.trim().replace('_', "").to_ascii_lowercase();
    letters(name) == letters(wanted)
}

// The numbers have bits.
const _: () = {
    let mut at = 0;
    while at < Algorithm::ALL.len() {
        assert!((Algorithm::ALL[at] as u8) < 8);
        at += 1;
    }
    let mut at = 0;
    while at < Protocol::ALL.len() {
        assert!((Protocol::ALL[at] as u8) < 8);
        at += 1;
    }
    let mut at = 0;
    while at < FUNCTIONS {
        assert!(Function::ALL[at] as usize == at);
        at += 1;
    }
};

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

    #[test]
    fn ranks_leave_what_all_of_them_leave() {
        let of = |algorithms, protocols| Allowed {
            algorithms: [algorithms; FUNCTIONS],
            protocols: [protocols; FUNCTIONS],
        };
        let both = of(0b0110, u8::MAX).and(&of(0b0011, 0b100));
        assert_eq!(both, of(0b0010, 0b100));
        assert_eq!(Allowed::from_bytes(&both.to_bytes()), both);
        assert_eq!(Allowed::default().and(&both), both);
    }
}
