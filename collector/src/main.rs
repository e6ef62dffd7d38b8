//! ringsight
fn main() {}
