//! Shared pages of a target.
