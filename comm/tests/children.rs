//! Communicators that come of others: split, shrunk, revoked.

mod common;

mod children {
    mod processes;
    mod shrinks;
    mod splits;
    mod unfinished;
}
