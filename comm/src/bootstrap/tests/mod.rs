//! Tests of the bootstrap, over ranks that are threads.

mod hostile;
mod network;
mod rendezvous;
mod roots;

use super::*;

const SHORT: Duration = Duration::from_millis(400);
const LONG: Duration = Duration::from_secs(30);
/// How soon the abort word ends a wait: within 100 ms, and more on a machine that is busy with something else.
const RELEASED: Duration = Duration::from_secs(2);

fn root() -> UniqueId {
    // On loopback, whatever interfaces the machine has and whatever other tests do to the environment.
    let id = root::create([127, 0, 0, 1].into()).unwrap();
    UniqueId::from_bytes(&id.to_bytes()).unwrap()
}

fn join(id: &UniqueId, rank: u32, ranks: u32, timeout: Duration) -> Result<Bootstrap> {
    Bootstrap::init(id, rank, ranks, Arc::default(), timeout)
}

/// Runs `body` on every rank, each on a thread of its own.
fn all<T: Send>(id: &UniqueId, ranks: u32, body: impl Fn(Bootstrap) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let body = &body;
        let start = move |rank| scope.spawn(move || body(join(id, rank, ranks, LONG).unwrap()));
        let threads: Vec<_> = (0..ranks).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A rank that meets the others however long it takes, and waits for them no longer than `timeout` afterwards.
fn join_patiently(id: &UniqueId, rank: u32, ranks: u32, timeout: Duration) -> Bootstrap {
    let ids = std::slice::from_ref(id);
    let joined = super::rendezvous::join(ids, rank, ranks, &AbortWord::default(), LONG).unwrap();
    let ours = (rank, joined.cookie, joined.table);
    let bootstrap = Bootstrap::open(ours, joined.listener, joined.local, Arc::default(), timeout);
    bootstrap.unwrap()
}
