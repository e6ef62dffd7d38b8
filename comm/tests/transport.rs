//! Ranks as threads and as processes, on one node and on several, moving data through real proxies.

mod common;

mod transport {
    mod faults;
    mod leftovers;
    mod moving;
    mod offers;
    mod processes;
    mod ranks;
    mod requests;
    mod steps;
}
