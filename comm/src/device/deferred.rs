//! What is to be done later, handed over by threads that may neither wait, nor call the driver, nor free memory: the driver
//! calls back when a graph is gone.

#[cfg(loom)]
use loom::sync::atomic::{AtomicPtr, Ordering};

#[cfg(not(loom))]
use std::sync::atomic::{AtomicPtr, Ordering};

use std::{boxed::Box, ptr::null_mut, vec::Vec};

/// A list that any thread adds to without a lock, and one at a time takes all of. What nobody takes is never dropped.
pub(crate) struct Deferred<T> {
    head: AtomicPtr<Node<T>>,
}

/// An entry, allocated before it is handed over.
pub(crate) struct Node<T> {
    what: T,
    next: *mut Node<T>,
}

/// The orders of the two places where order counts. Others than [`Orders::RIGHT`] are for the model, which must catch them.
#[derive(Clone, Copy, Debug)]
struct Orders {
    /// Exchange that adds an entry: whoever takes the list sees what it holds, and all that the thread did before. Those that
    /// come later are read-modify-writes, and so go on with this release.
    add: Ordering,
    /// Exchange that takes the list, for those of all entries.
    take: Ordering,
}

impl Orders {
    const RIGHT: Self = Self {
        add: Ordering::Release,
        take: Ordering::Acquire,
    };
}

impl<T> Node<T> {
    pub(crate) fn new(what: T) -> Box<Self> {
        Box::new(Self {
            what,
            next: null_mut(),
        })
    }
}

// SAFETY: the link is followed by whoever has the list alone.
unsafe impl<T: Send> Send for Node<T> {}

impl<T> Default for Deferred<T> {
    fn default() -> Self {
        Self {
            head: AtomicPtr::new(null_mut()),
        }
    }
}

#[cfg(not(loom))]
impl<T> Deferred<T> {
    /// As [`Self::default`], for statics.
    pub(crate) const fn new() -> Self {
        Self {
            head: AtomicPtr::new(null_mut()),
        }
    }
}

impl<T: Send> Deferred<T> {
    /// Adds an entry: two or three instructions, and as many more for each thread that does so at the same time.
    pub(crate) fn add(&self, node: Box<Node<T>>) {
        self.add_with(Orders::RIGHT, node);
    }

    fn add_with(&self, orders: Orders, node: Box<Node<T>>) {
        let node = Box::into_raw(node);
        // Relaxed: the exchange below finds out whether it is still so.
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: this thread's alone until it is in the list.
            unsafe { (*node).next = head };
            match self
                .head
                .compare_exchange_weak(head, node, orders.add, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Takes everything, the latest first.
    pub(crate) fn take(&self) -> Vec<T> {
        self.take_with(Orders::RIGHT)
    }

    fn take_with(&self, orders: Orders) -> Vec<T> {
        // As a whole: no entry is ever taken out of the middle, so that none can be taken for one that was there before.
        let mut at = self.head.swap(null_mut(), orders.take);
        let mut all = Vec::new();
        while !at.is_null() {
            // SAFETY: a box of `add`; whoever took the list has it alone.
            let node = *unsafe { Box::from_raw(at) };
            at = node.next;
            all.push(node.what);
        }
        all
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{sync::Arc, thread};

    use super::*;

    #[test]
    fn everything_is_taken_once_whoever_adds_at_the_same_time() {
        const EACH: usize = 1000;
        let list: Arc<Deferred<usize>> = Arc::default();
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let list = list.clone();
                thread::spawn(move || {
                    (0..EACH).for_each(|index| list.add(Node::new(thread * EACH + index)));
                })
            })
            .collect();
        let mut all = Vec::new();
        while !threads.iter().all(thread::JoinHandle::is_finished) {
            all.extend(list.take());
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        all.extend(list.take());
        all.sort_unstable();
        assert_eq!(all, (0..4 * EACH).collect::<Vec<_>>());
    }
}

/// `loom` tries every order that the memory model allows; built with the models of `ringsight-records`.
#[cfg(all(test, loom))]
mod model {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;

    /// A counter that a graph writes until it is gone; then the memory is given to somebody else.
    struct Counter(UnsafeCell<u32>);
    // SAFETY: what the model is about; loom says where two threads are in it at once.
    unsafe impl Sync for Counter {}
    // SAFETY: as above.
    unsafe impl Send for Counter {}

    /// Two graphs go at the same time, and somebody looks twice meanwhile and once at the end.
    fn graphs_go(orders: Orders) {
        loom::model(move || {
            let list: Arc<Deferred<Arc<Counter>>> = Arc::default();
            let graphs: Vec<_> = (0..2)
                .map(|_| {
                    let list = list.clone();
                    let counter = Arc::new(Counter(UnsafeCell::new(0)));
                    thread::spawn(move || {
                        let node = Node::new(counter.clone());
                        // SAFETY: nobody else has it yet.
                        counter.0.with_mut(|count| unsafe { *count += 1 });
                        drop(counter);
                        list.add_with(orders, node);
                    })
                })
                .collect();
            let mut gone = 0;
            let mut sweep = || {
                for counter in list.take_with(orders) {
                    // SAFETY: it was handed over: the graph does not write any more.
                    counter.0.with_mut(|count| unsafe {
                        assert_eq!(*count, 1);
                        *count = 0;
                    });
                    gone += 1;
                }
            };
            sweep();
            for graph in graphs {
                graph.join().unwrap();
            }
            sweep();
            assert_eq!(gone, 2);
        });
    }

    #[test]
    fn what_a_graph_wrote_is_over_when_it_is_reused() {
        graphs_go(Orders::RIGHT);
    }

    #[test]
    fn weaker_orders_are_caught() {
        let weak = [
            Orders {
                add: Ordering::Relaxed,
                ..Orders::RIGHT
            },
            Orders {
                take: Ordering::Relaxed,
                ..Orders::RIGHT
            },
        ];
        for orders in weak {
            let caught = catch_unwind(AssertUnwindSafe(|| graphs_go(orders)));
            assert!(caught.is_err(), "{orders:?}");
        }
    }
}
