//! chrome
