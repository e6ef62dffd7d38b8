//! Where a site's numbers and names are, and how programs get there: a path of names becomes a chain of offsets in the running kernel.

use ringsight_records::network::{ARGUMENTS, Chain, RESULT, STEPS, UPPER};

use super::btf::{Btf, Shape, TypeId};

/// Where a number, or a name, is: an argument, or what a function returns, and fields from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Path {
    /// Name of the argument; empty for nothing.
    pub(super) argument: &'static str,
    /// The structure that an untyped argument points to.
    cast: &'static str,
    /// The structure that holds what the argument points to, and as which of its members.
    within: Option<(&'static str, &'static str)>,
    /// Fields, with dots between them; pointers are followed.
    pub(super) fields: &'static str,
    upper: bool,
}

/// Stands for what the function returns.
const RETURNED: &str = "return";

impl Path {
    pub(super) const NONE: Self = argument("");

    pub(super) const fn cast(mut self, structure: &'static str) -> Self {
        self.cast = structure;
        self
    }

    pub(super) const fn within(mut self, structure: &'static str, member: &'static str) -> Self {
        self.within = Some((structure, member));
        self
    }

    pub(super) const fn at(mut self, fields: &'static str) -> Self {
        self.fields = fields;
        self
    }

    pub(super) const fn upper(mut self) -> Self {
        self.upper = true;
        self
    }
}

pub(super) const fn argument(name: &'static str) -> Path {
    Path {
        argument: name,
        cast: "",
        within: None,
        fields: "",
        upper: false,
    }
}

pub(super) const fn returned() -> Path {
    argument(RETURNED)
}

/// The chain that leads along a path; `text` says that it is to end at the text's first byte.
pub(super) fn chain(
    path: &Path,
    types: &Btf,
    parameters: &[(String, TypeId)],
    returned: TypeId,
    text: bool,
) -> Option<Chain> {
    if path.argument.is_empty() {
        return Some(Chain::NONE);
    }
    let (source, mut current) = if path.argument == RETURNED {
        (RESULT, returned)
    } else {
        let place = parameters.iter().position(|(name, _)| name == path.argument)?;
        if place >= ARGUMENTS {
            return None;
        }
        (u8::try_from(place).ok()?, parameters[place].1)
    };
    let mut chain = Chain {
        source,
        size: if path.upper { UPPER } else { 4 },
        ..Chain::NONE
    };
    if path.fields.is_empty() {
        return match types.shape(current)? {
            Shape::Number(bytes @ (1 | 2)) => {
                chain.size = bytes as u8;
                Some(chain)
            }
            Shape::Number(4 | 8) => Some(chain),
            _ => None,
        };
    }
    // The argument is a pointer: its fields are one offset away, those behind a further pointer one more.
    let Shape::Pointer(target) = types.shape(current)? else {
        return None;
    };
    current = target;
    if !path.cast.is_empty() {
        current = types.structure(path.cast)?;
    }
    let mut offset = 0_i32;
    if let Some((structure, member)) = path.within {
        current = types.structure(structure)?;
        offset = -i32::try_from(types.member(current, member)?.1).ok()?;
    }
    let mut step = 0;
    let mut end = |chain: &mut Chain, offset: &mut i32| {
        *chain.offsets.get_mut(step)? = std::mem::take(offset);
        step += 1;
        chain.steps = u8::try_from(step).ok()?;
        Some(())
    };
    for field in path.fields.split('.') {
        if let Shape::Pointer(target) = types.shape(current)? {
            end(&mut chain, &mut offset)?;
            current = target;
        }
        let (id, place) = types.member(current, field)?;
        offset = offset.checked_add(i32::try_from(place).ok()?)?;
        current = id;
    }
    match (types.shape(current)?, text) {
        (Shape::Number(bytes), false) => {
            chain.size = u8::try_from(bytes.min(4)).ok()?;
            end(&mut chain, &mut offset)?;
        }
        (Shape::Array(_), true) => end(&mut chain, &mut offset)?,
        (Shape::Pointer(_), true) => {
            end(&mut chain, &mut offset)?;
            end(&mut chain, &mut offset)?;
        }
        _ => return None,
    }
    Some(chain)
}

const _: () = assert!(
    STEPS >= 4,
    "a device behind three pointers, whose name is one more"
);

#[cfg(test)]
pub(super) mod tests {
    use super::{super::btf::tests::Writer, *};

    /// A module with `work(int mask, struct outer *outer, void *data)` that returns a `struct inner *`.
    pub(in super::super) fn module() -> Btf {
        let mut types = Writer::new(None);
        let byte = types.int("char", 1);
        let number = types.int("int", 4);
        let long = types.int("long", 8);
        let name = types.array(byte);
        let text = types.pointer(byte);
        let inner = types.structure(
            "inner",
            &[("number", number, 4), ("name", name, 8), ("text", text, 72)],
        );
        let to_inner = types.pointer(inner);
        let outer = types.structure(
            "outer",
            &[("flag", byte, 3), ("inner", to_inner, 16), ("part", inner, 24)],
        );
        let to_outer = types.pointer(outer);
        let untyped = types.pointer(0);
        let parameters = [
            ("mask", number),
            ("outer", to_outer),
            ("data", untyped),
            ("length", long),
        ];
        types.function("work", to_inner, &parameters);
        Btf::parse(types.bytes(), None).unwrap()
    }

    fn look(path: Path, text: bool) -> Option<(u8, u8, Vec<i32>)> {
        let types = module();
        let (parameters, returned) = types.function("work").unwrap();
        let chain = chain(&path, &types, &parameters, returned, text)?;
        Some((
            chain.source,
            chain.size,
            chain.offsets[..chain.steps.into()].to_vec(),
        ))
    }

    #[test]
    fn paths_become_chains_of_offsets() {
        assert_eq!(look(argument("mask"), false), Some((0, 4, vec![])));
        assert_eq!(look(argument("length"), false), Some((3, 4, vec![])));
        assert_eq!(look(argument("length").upper(), false), Some((3, UPPER, vec![])));
        assert_eq!(look(argument("outer").at("flag"), false), Some((1, 1, vec![3])));
        // In a structure that is part of the first, and in one behind a pointer.
        assert_eq!(
            look(argument("outer").at("part.number"), false),
            Some((1, 4, vec![28]))
        );
        assert_eq!(
            look(argument("outer").at("inner.number"), false),
            Some((1, 4, vec![16, 4]))
        );
        assert_eq!(look(returned().at("number"), false), Some((RESULT, 4, vec![4])));
        assert_eq!(
            look(argument("data").cast("inner").at("number"), false),
            Some((2, 4, vec![4]))
        );
        // From a part to the whole: `part` lies 24 into it.
        let whole = argument("data").within("outer", "part");
        assert_eq!(look(whole.at("flag"), false), Some((2, 1, vec![-21])));
        // Texts in place, and behind a pointer.
        assert_eq!(
            look(argument("outer").at("inner.name"), true),
            Some((1, 4, vec![16, 8]))
        );
        assert_eq!(
            look(argument("outer").at("inner.text"), true),
            Some((1, 4, vec![16, 72, 0]))
        );
    }

    #[test]
    fn what_is_not_there_is_no_chain() {
        for path in [
            argument("none"),
            argument("outer"),
            argument("outer").at("none"),
            argument("mask").at("flag"),
            argument("data").at("number"),
            argument("data").cast("none").at("x"),
            argument("data").within("outer", "none").at("flag"),
            // A structure is no number.
            argument("outer").at("part"),
        ] {
            assert_eq!(look(path, false), None, "{path:?}");
        }
        assert_eq!(
            look(argument("outer").at("flag"), true),
            None,
            "a number is no text"
        );
    }
}
