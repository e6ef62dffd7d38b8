//! A lock-free list of work for another thread. The thread that adds may neither wait, nor call the driver, nor free memory: the driver calls it
//! back when a graph is gone.

#[cfg(loom)]
use loom::sync::atomic::{AtomicPtr, Ordering};

#[cfg(not(loom))]
use std::sync::atomic::{AtomicPtr, Ordering};

use std::{boxed::Box, ptr::null_mut, vec::Vec};

/// A list. Any thread adds to it without a lock; one thread at a time takes everything. Entries that nobody takes are never dropped.
pub(crate) struct Deferred<T> {
    head: AtomicPtr<Node<T>>,
}

/// An entry. It is allocated before it is added.
pub(crate) struct Node<T> {
    what: T,
    next: *mut Node<T>,
}

/// The memory orderings of the two exchanges. The model must catch every ordering but [`Orders::RIGHT`].
#[derive(Clone, Copy, Debug)]
struct Orders {
    /// Of the exchange that adds an entry. A thread that takes the list sees the entry, and everything that the adding thread did before. Later
    /// additions are read-modify-writes, so they continue this release sequence.
    add: Ordering,
    /// Of the exchange that takes the list. It pairs with the additions of all entries.
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

// SAFETY: only a thread that has the whole list follows the link.
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
    /// An empty list, for statics.
    pub(crate) const fn new() -> Self {
        Self {
            head: AtomicPtr::new(null_mut()),
        }
    }
}

impl<T: Send> Deferred<T> {
    /// Adds an entry: a few instructions, and as many again for each thread that adds at the same time.
    pub(crate) fn add(&self, node: Box<Node<T>>) {
        self.add_with(Orders::RIGHT, node);
    }

    fn add_with(&self, orders: Orders, node: Box<Node<T>>) {
        let node = Box::into_raw(node);
        // Relaxed: the exchange below checks that it is still the head.
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: only this thread has the node until it is in the list.
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

    /// Takes all entries, the latest first.
    pub(crate) fn take(&self) -> Vec<T> {
        self.take_with(Orders::RIGHT)
    }

    fn take_with(&self, orders: Orders) -> Vec<T> {
        // All at once: no entry is ever removed from the middle, so the ABA problem cannot occur.
        let mut at = self.head.swap(null_mut(), orders.take);
        let mut all = Vec::new();
        while !at.is_null() {
            // SAFETY: a box of `add`; this thread alone has the list that it took.
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
