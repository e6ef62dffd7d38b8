//! ringsight-tests
