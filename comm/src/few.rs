//! A list that nearly always has one entry: that one is not allocated.

use std::{
    ops::{Deref, DerefMut},
    slice, vec,
};

/// A list, without an allocation as long as it has at most one entry. A slice to all who only look at it.
#[derive(Clone, Debug, Default)]
pub(crate) enum Few<T> {
    #[default]
    None,
    One(T),
    Many(Vec<T>),
}

impl<T> Few<T> {
    #[inline]
    pub(crate) fn push(&mut self, next: T) {
        match self {
            Self::None => *self = Self::One(next),
            Self::Many(all) => all.push(next),
            Self::One(_) => {
                if let Self::One(first) = std::mem::take(self) {
                    *self = Self::Many(vec![first, next]);
                }
            }
        }
    }

    /// The same; gives what has been pushed.
    #[inline]
    pub(crate) fn push_mut(&mut self, next: T) -> &mut T {
        self.push(next);
        let last = self.len() - 1;
        &mut self[last]
    }
}

impl<T> Deref for Few<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::None => &[],
            Self::One(one) => slice::from_ref(one),
            Self::Many(all) => all,
        }
    }
}

impl<T> DerefMut for Few<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::None => &mut [],
            Self::One(one) => slice::from_mut(one),
            Self::Many(all) => all,
        }
    }
}

impl<T> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(all: I) -> Self {
        let mut few = Self::None;
        all.into_iter().for_each(|one| few.push(one));
        few
    }
}

impl<T> From<Vec<T>> for Few<T> {
    fn from(all: Vec<T>) -> Self {
        Self::Many(all)
    }
}

/// The entries of a [`Few`].
pub(crate) enum Entries<T> {
    Few(Option<T>),
    Many(vec::IntoIter<T>),
}

impl<T> Iterator for Entries<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        match self {
            Self::Few(one) => one.take(),
            Self::Many(all) => all.next(),
        }
    }
}

impl<T> IntoIterator for Few<T> {
    type Item = T;
    type IntoIter = Entries<T>;

    fn into_iter(self) -> Entries<T> {
        match self {
            Self::None => Entries::Few(None),
            Self::One(one) => Entries::Few(Some(one)),
            Self::Many(all) => Entries::Many(all.into_iter()),
        }
    }
}

impl<'a, T> IntoIterator for &'a Few<T> {
    type Item = &'a T;
    type IntoIter = slice::Iter<'a, T>;

    fn into_iter(self) -> slice::Iter<'a, T> {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_list() {
        let mut few = Few::default();
        for count in 0..4 {
            assert_eq!(few[..], (0..count).collect::<Vec<_>>());
            assert_eq!(few.clone().into_iter().count(), count);
            assert_eq!(matches!(few, Few::Many(_)), count > 1, "one is not allocated");
            few.push(count);
        }
        few.reverse();
        assert_eq!(few.into_iter().collect::<Few<_>>()[..], [3, 2, 1, 0]);
    }
}
