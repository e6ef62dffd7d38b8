//! The kernel's type information (BTF, Documentation/bpf/btf.rst): where the fields of its structures are in the running kernel.
//!
//! Only what finding fields needs is read. A module's information continues that of the kernel: ids of types and offsets of names go on
//! where the kernel's end.

use std::{io, sync::Arc};

use crate::host;

/// Magic number at the begin, in the byte order of the machine.
const MAGIC: u16 = 0xeb9f;
/// Types that may lead to a type before something is wrong (typedef of const of …).
const DEPTH: usize = 32;

/// Kinds of types, `BTF_KIND_*`.
mod kind {
    pub(super) const INT: u32 = 1;
    pub(super) const PTR: u32 = 2;
    pub(super) const ARRAY: u32 = 3;
    pub(super) const STRUCT: u32 = 4;
    pub(super) const UNION: u32 = 5;
    pub(super) const ENUM: u32 = 6;
    pub(super) const TYPEDEF: u32 = 8;
    pub(super) const VOLATILE: u32 = 9;
    pub(super) const CONST: u32 = 10;
    pub(super) const RESTRICT: u32 = 11;
    pub(super) const FUNC: u32 = 12;
    pub(super) const FUNC_PROTO: u32 = 13;
    pub(super) const VAR: u32 = 14;
    pub(super) const DATASEC: u32 = 15;
    pub(super) const DECL_TAG: u32 = 17;
    pub(super) const TYPE_TAG: u32 = 18;
    pub(super) const ENUM64: u32 = 19;
    pub(super) const LAST: u32 = 19;
}

/// A type by its number; 0 is `void`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TypeId(pub(super) u32);

/// What a type is, as far as reading a field needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// A number of so many bytes.
    Number(u32),
    /// A pointer to this.
    Pointer(TypeId),
    /// An array of this.
    Array(TypeId),
    /// A structure or union.
    Structure,
    /// Something else.
    Other,
}

/// Type information of the kernel, or of one of its modules.
#[derive(Debug)]
pub(super) struct Btf {
    base: Option<Arc<Self>>,
    bytes: Vec<u8>,
    /// Where the names begin in `bytes`, and how many bytes of them there are.
    names: (usize, usize),
    /// Where each type begins in `bytes`.
    types: Vec<usize>,
    /// Number of the first type in here.
    first: u32,
    /// Offset of the first name in here.
    first_name: u32,
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(
        bytes.get(at..at.checked_add(4)?)?.try_into().ok()?,
    ))
}

impl Btf {
    /// That of the kernel itself (`vmlinux`), or of a module on top of it.
    pub(super) fn of(module: &str, base: Option<Arc<Self>>) -> io::Result<Self> {
        let bytes = host::bytes(&format!("/sys/kernel/btf/{module}"))?;
        Self::parse(bytes, base)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "malformed type information"))
    }

    /// Reads it; `None` if it is malformed.
    pub(super) fn parse(bytes: Vec<u8>, base: Option<Arc<Self>>) -> Option<Self> {
        let magic = u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?);
        if magic != MAGIC {
            return None;
        }
        let header = word(&bytes, 4)? as usize;
        let section = |offset: usize, length: usize| -> Option<(usize, usize)> {
            let begin = header.checked_add(word(&bytes, offset)? as usize)?;
            let length = word(&bytes, length)? as usize;
            (begin.checked_add(length)? <= bytes.len()).then_some((begin, length))
        };
        let (begin, length) = section(8, 12)?;
        let names = section(16, 20)?;
        let mut types = Vec::new();
        let mut at = begin;
        while at < begin + length {
            types.push(at);
            let info = word(&bytes, at + 4)?;
            let count = (info & 0xffff) as usize;
            at += 12
                + match info >> 24 & 0x1f {
                    kind::INT | kind::VAR | kind::DECL_TAG => 4,
                    kind::ARRAY => 12,
                    kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 12 * count,
                    kind::ENUM | kind::FUNC_PROTO => 8 * count,
                    1..=kind::LAST => 0,
                    _ => return None,
                };
        }
        if at != begin + length {
            return None;
        }
        let (first, first_name) = match &base {
            Some(base) => (base.end(), base.first_name + u32::try_from(base.names.1).ok()?),
            // Number 0 is `void`, which is written nowhere.
            None => (1, 0),
        };
        Some(Self {
            base,
            bytes,
            names,
            types,
            first,
            first_name,
        })
    }

    fn end(&self) -> u32 {
        self.first + self.types.len() as u32
    }

    /// The information that holds a type, and where.
    fn find(&self, id: TypeId) -> Option<(&Self, usize)> {
        match id.0.checked_sub(self.first) {
            Some(index) => Some((self, *self.types.get(index as usize)?)),
            None => self.base.as_ref()?.find(id),
        }
    }

    fn name(&self, offset: u32) -> Option<&[u8]> {
        let Some(own) = offset.checked_sub(self.first_name) else {
            return self.base.as_ref()?.name(offset);
        };
        let (begin, length) = self.names;
        let names = &self.bytes[begin..begin + length];
        let rest = names.get(own as usize..)?;
        rest.split(|byte| *byte == 0).next()
    }

    /// A type's three words: (holder, position, name, info, size or type).
    fn words(&self, id: TypeId) -> Option<(&Self, usize, u32, u32, u32)> {
        let (holder, at) = self.find(id)?;
        let word = |offset| word(&holder.bytes, at + offset);
        Some((holder, at, word(0)?, word(4)?, word(8)?))
    }

    /// The type of this kind and name, in here or, unless it is a function, in the kernel's.
    fn named(&self, wanted: &[u32], name: &str) -> Option<TypeId> {
        for (index, at) in self.types.iter().enumerate() {
            let info = word(&self.bytes, at + 4)?;
            if wanted.contains(&(info >> 24 & 0x1f))
                && self.name(word(&self.bytes, *at)?) == Some(name.as_bytes())
            {
                return Some(TypeId(self.first + index as u32));
            }
        }
        if wanted.contains(&kind::FUNC) {
            return None;
        }
        self.base.as_ref()?.named(wanted, name)
    }

    /// A structure or union by its name.
    pub(super) fn structure(&self, name: &str) -> Option<TypeId> {
        self.named(&[kind::STRUCT, kind::UNION], name)
    }

    /// A function of this module by its name: its parameters (name, type) and what it returns.
    pub(super) fn function(&self, name: &str) -> Option<(Vec<(String, TypeId)>, TypeId)> {
        let id = self.named(&[kind::FUNC], name)?;
        let (_, _, _, _, prototype) = self.words(id)?;
        let (holder, at, _, info, returned) = self.words(TypeId(prototype))?;
        if info >> 24 & 0x1f != kind::FUNC_PROTO {
            return None;
        }
        let parameters = (0..(info & 0xffff) as usize)
            .map(|index| {
                let at = at + 12 + 8 * index;
                let name = holder.name(word(&holder.bytes, at)?)?;
                let name = String::from_utf8_lossy(name).into_owned();
                Some((name, TypeId(word(&holder.bytes, at + 4)?)))
            })
            .collect::<Option<Vec<_>>>()?;
        Some((parameters, TypeId(returned)))
    }

    /// The type behind other names for it (`typedef`, `const`, …).
    pub(super) fn plain(&self, mut id: TypeId) -> Option<TypeId> {
        for _ in 0..DEPTH {
            if id.0 == 0 {
                return Some(id);
            }
            let (_, _, _, info, next) = self.words(id)?;
            match info >> 24 & 0x1f {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    id = TypeId(next);
                }
                _ => return Some(id),
            }
        }
        None
    }

    /// What a type is.
    pub(super) fn shape(&self, id: TypeId) -> Option<Shape> {
        let id = self.plain(id)?;
        if id.0 == 0 {
            return Some(Shape::Other);
        }
        let (holder, at, _, info, size) = self.words(id)?;
        Some(match info >> 24 & 0x1f {
            kind::INT | kind::ENUM | kind::ENUM64 => Shape::Number(size),
            kind::PTR => Shape::Pointer(TypeId(size)),
            kind::ARRAY => Shape::Array(TypeId(word(&holder.bytes, at + 12)?)),
            kind::STRUCT | kind::UNION => Shape::Structure,
            _ => Shape::Other,
        })
    }

    /// A member of a structure, also of an unnamed one in it: its type and its offset in bytes. `None` for parts of bytes.
    pub(super) fn member(&self, structure: TypeId, name: &str) -> Option<(TypeId, u32)> {
        self.member_in(structure, name, 0)
    }

    fn member_in(&self, structure: TypeId, name: &str, depth: usize) -> Option<(TypeId, u32)> {
        let (holder, at, _, info, _) = self.words(self.plain(structure)?)?;
        if !matches!(info >> 24 & 0x1f, kind::STRUCT | kind::UNION) || depth > DEPTH {
            return None;
        }
        for index in 0..(info & 0xffff) as usize {
            let at = at + 12 + 12 * index;
            let member = holder.name(word(&holder.bytes, at)?)?;
            let id = TypeId(word(&holder.bytes, at + 4)?);
            let place = word(&holder.bytes, at + 8)?;
            // With the flag, the upper byte is a bit field's length.
            let (bits, field) = if info >> 31 == 1 {
                (place & 0xff_ffff, place >> 24 != 0)
            } else {
                (place, false)
            };
            if member == name.as_bytes() {
                return (!field && bits % 8 == 0).then_some((id, bits / 8));
            }
            if member.is_empty()
                && let Some((id, inner)) = self.member_in(id, name, depth + 1)
            {
                return Some((id, bits / 8 + inner));
            }
        }
        None
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Writes type information.
    #[derive(Default)]
    pub(in super::super) struct Writer {
        types: Vec<u8>,
        names: Vec<u8>,
        count: u32,
        first: u32,
        first_name: u32,
    }

    impl Writer {
        pub(in super::super) fn new(base: Option<&Btf>) -> Self {
            Self {
                first: base.map_or(1, Btf::end),
                first_name: base.map_or(0, |base| base.first_name + base.names.1 as u32),
                // Offset 0 is the empty name in the kernel's; a module's refers to it.
                names: if base.is_none() { vec![0] } else { Vec::new() },
                ..Self::default()
            }
        }

        fn name(&mut self, name: &str) -> u32 {
            if name.is_empty() {
                return 0;
            }
            let offset = self.first_name + self.names.len() as u32;
            self.names.extend(name.bytes());
            self.names.push(0);
            offset
        }

        pub(in super::super) fn put(
            &mut self,
            kind: u32,
            name: &str,
            count: usize,
            size: u32,
            more: &[u32],
        ) -> u32 {
            let name = self.name(name);
            for word in [name, kind << 24 | count as u32, size].iter().chain(more) {
                self.types.extend(word.to_ne_bytes());
            }
            self.count += 1;
            self.first + self.count - 1
        }

        pub(in super::super) fn int(&mut self, name: &str, bytes: u32) -> u32 {
            self.put(kind::INT, name, 0, bytes, &[bytes * 8])
        }

        pub(in super::super) fn pointer(&mut self, to: u32) -> u32 {
            self.put(kind::PTR, "", 0, to, &[])
        }

        pub(in super::super) fn structure(&mut self, name: &str, members: &[(&str, u32, u32)]) -> u32 {
            let more: Vec<u32> = members
                .iter()
                .flat_map(|(name, id, bytes)| [self.name(name), *id, bytes * 8])
                .collect();
            self.put(kind::STRUCT, name, members.len(), 64, &more)
        }

        pub(in super::super) fn array(&mut self, of: u32) -> u32 {
            self.put(kind::ARRAY, "", 0, 0, &[of, of, 64])
        }

        pub(in super::super) fn function(
            &mut self,
            name: &str,
            returned: u32,
            parameters: &[(&str, u32)],
        ) -> u32 {
            let more: Vec<u32> = parameters
                .iter()
                .flat_map(|(name, id)| [self.name(name), *id])
                .collect();
            let prototype = self.put(kind::FUNC_PROTO, "", parameters.len(), returned, &more);
            self.put(kind::FUNC, name, 0, prototype, &[])
        }

        pub(in super::super) fn bytes(&self) -> Vec<u8> {
            let mut bytes = MAGIC.to_ne_bytes().to_vec();
            bytes.extend([1, 0]);
            let types = self.types.len() as u32;
            for word in [24, 0, types, types, self.names.len() as u32] {
                bytes.extend(word.to_ne_bytes());
            }
            bytes.extend(&self.types);
            bytes.extend(&self.names);
            bytes
        }
    }

    #[test]
    fn fields_are_found_across_a_module_and_the_kernel() {
        let mut kernel = Writer::new(None);
        let number = kernel.int("unsigned int", 4);
        let inner = kernel.structure("inner", &[("x", number, 8)]);
        let kernel = Arc::new(Btf::parse(kernel.bytes(), None).unwrap());

        let mut module = Writer::new(Some(&kernel));
        let unnamed = module.structure("", &[("y", number, 4)]);
        let other = module.put(kind::TYPEDEF, "other_name", 0, inner, &[]);
        let outer = module.structure("outer", &[("in", other, 16), ("", unnamed, 32)]);
        let pointer = module.pointer(outer);
        module.function("work", 0, &[("self", pointer), ("count", number)]);
        let module = Btf::parse(module.bytes(), Some(kernel)).unwrap();

        let (parameters, returned) = module.function("work").unwrap();
        assert_eq!(returned, TypeId(0));
        assert_eq!(parameters[1], ("count".to_owned(), TypeId(number)));
        let Some(Shape::Pointer(outer)) = module.shape(parameters[0].1) else {
            panic!("a pointer")
        };
        let (inner, offset) = module.member(outer, "in").unwrap();
        assert_eq!((offset, module.shape(inner)), (16, Some(Shape::Structure)));
        assert_eq!(module.member(inner, "x"), Some((TypeId(number), 8)));
        // A member of an unnamed structure counts as the outer one's.
        assert_eq!(module.member(outer, "y"), Some((TypeId(number), 36)));
        assert_eq!(module.member(outer, "z"), None);
        assert_eq!(module.structure("inner"), Some(TypeId(2)));
        assert_eq!(module.function("rest"), None);
    }

    proptest! {
        #[test]
        fn rubbish_is_refused_without_a_panic(mut bytes: Vec<u8>, header: bool, at: usize, byte: u8) {
            if header {
                let mut writer = Writer::new(None);
                let number = writer.int("int", 4);
                let outer = writer.structure("outer", &[("a", number, 0)]);
                let pointer = writer.pointer(outer);
                writer.function("work", number, &[("a", pointer)]);
                bytes = writer.bytes();
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            if let Some(btf) = Btf::parse(bytes, None) {
                let _ = btf.function("work");
                for id in 0..8 {
                    let _ = btf.shape(TypeId(id));
                    let _ = btf.member(TypeId(id), "a");
                }
                let _ = btf.structure("outer");
            }
        }
    }
}
