//! host programs
