//! The operations that a page keeps: the latest, within two bounds.

use std::collections::VecDeque;

use crate::model::Operation;

/// A queue of finished operations that forgets the oldest.
pub(super) struct Store {
    operations: VecDeque<Operation>,
    /// Ranks' parts in `operations`.
    parts: usize,
    max_operations: usize,
    max_parts: usize,
    seen: u64,
}

impl Store {
    /// Keeps at most `max_operations` operations, together of at most `max_parts` ranks' parts, but always one.
    pub(super) fn new(max_operations: usize, max_parts: usize) -> Self {
        Self {
            operations: VecDeque::new(),
            parts: 0,
            max_operations,
            max_parts,
            seen: 0,
        }
    }

    /// Takes an operation.
    pub(super) fn push(&mut self, operation: &Operation) {
        self.seen += 1;
        self.parts += operation.by_rank.len();
        self.operations.push_back(operation.clone());
        while self.operations.len() > 1
            && (self.operations.len() > self.max_operations || self.parts > self.max_parts)
        {
            self.parts -= self
                .operations
                .pop_front()
                .map_or(0, |oldest| oldest.by_rank.len());
        }
    }

    /// What is kept, in the order in which it finished.
    pub(super) fn operations(&self) -> impl ExactSizeIterator<Item = &Operation> {
        self.operations.iter()
    }

    /// How many were taken in all.
    pub(super) fn seen(&self) -> u64 {
        self.seen
    }
}
