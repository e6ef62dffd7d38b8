//! Environment variables by which a test says something to the bodies that it starts.

/// The unique id that a rank joins by, in hexadecimal digits.
pub const ID: &str = "RINGSIGHT_TEST_ID";
/// The rank and the number of ranks.
pub const PLACE: &str = "RINGSIGHT_TEST_PLACE";
/// What a body is to do, where it can do several things.
pub const WHAT: &str = "RINGSIGHT_TEST_WHAT";
/// The rank that is late.
pub const LATE_RANK: &str = "RINGSIGHT_TEST_LATE_RANK";
/// What a body expects: a list of CPUs, a part of an error's text.
pub const EXPECTED: &str = "RINGSIGHT_TEST_EXPECTED";
/// Folder, or file, in which processes show each other how far they are.
pub const FOLDER: &str = "RINGSIGHT_TEST_FOLDER";
