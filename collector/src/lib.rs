//! ringsight-collector
