//! ringsight-comm
