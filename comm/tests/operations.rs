//! What operations do beyond moving the right bytes: reductions that callers make, simulated groups, groups that fail.
//! Some look at the process's records, so all take turns.

mod common;

mod operations {
    mod calls;
    mod collectives;
    mod groups;
    mod reductions;
}
