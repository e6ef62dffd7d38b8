//! The environment that a process was started with.

use super::Read;
use crate::limits::VARIABLE_BYTES;

/// `NAME=value` entries, each ended by a zero. The process may have written anything in their place.
#[derive(Debug, Default)]
pub(crate) struct Environment(Read);

/// A variable's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Variable<'a> {
    pub(crate) value: &'a [u8],
    /// It goes on past [`VARIABLE_BYTES`].
    pub(crate) is_cut: bool,
}

impl Environment {
    pub(crate) fn new(read: Read) -> Self {
        Self(read)
    }

    /// Whether it goes on past its limit.
    pub(crate) fn is_cut(&self) -> bool {
        self.0.is_cut
    }

    /// The values of `names`, in their order, by one pass; `None` for a variable that it does not have. Of two entries of one name
    /// the first counts, as for `getenv`.
    pub(crate) fn variables<const N: usize>(&self, names: &[&str; N]) -> [Option<Variable<'_>>; N] {
        let mut found = [None; N];
        for entry in self.0.bytes.split(|byte| *byte == 0) {
            for (name, found) in names.iter().zip(&mut found) {
                let value = entry
                    .strip_prefix(name.as_bytes())
                    .and_then(|rest| rest.strip_prefix(b"="));
                if let (Some(value), None) = (value, &found) {
                    *found = Some(Variable {
                        value: &value[..value.len().min(VARIABLE_BYTES)],
                        is_cut: value.len() > VARIABLE_BYTES,
                    });
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(bytes: &[u8]) -> Environment {
        Environment(Read {
            bytes: bytes.to_vec(),
            is_cut: false,
        })
    }

    #[test]
    fn any_variable_is_found() {
        let environment = environment(b"A=1\0MYJOB=seven\0MYJOB_ID=8\0EMPTY=\0rubbish\0X=a=b\0MYJOB=eight\0");
        let names = ["MYJOB", "EMPTY", "X", "MYJO", "rubbish"];
        let found = environment
            .variables(&names)
            .map(|found| found.map(|found| found.value));
        assert_eq!(found, [Some(&b"seven"[..]), Some(b""), Some(b"a=b"), None, None]);
    }

    #[test]
    fn a_long_value_is_cut() {
        let environment = environment(&[b"A=", &[b'x'; VARIABLE_BYTES + 1][..]].concat());
        let [Some(found)] = environment.variables(&["A"]) else {
            panic!("it is there")
        };
        assert!(found.is_cut && found.value.len() == VARIABLE_BYTES);
    }
}
