//! What is to become of the links, and when.

use std::{collections::VecDeque, time::Duration};

use super::{case::mix, fabric::Port};

/// What is to be done to a port, and when: it comes up, or goes down.
pub(crate) type Plan = VecDeque<(Duration, Port, bool)>;

/// One link after the other down and up again at random, from `start` on; at last the primary's port of the first rank stays down.
pub(crate) fn chaos(seed: u64, start: Duration, times: u32) -> Plan {
    let mut plan = Plan::new();
    let (mut at, mut drawn) = (start, seed);
    for _ in 0..times {
        drawn = mix(drawn);
        let port = Port {
            rank: (drawn >> 1 & 1) as usize,
            link: (drawn & 1) as usize,
        };
        // Down for up to 128 ms, and the next from at once to 256 ms later: often before this one is up, and while ends recover.
        at += Duration::from_millis(drawn >> 8 & 0xff);
        let up = at + Duration::from_millis(1 + (drawn >> 16 & 0x7f));
        plan.push_back((at, port, false));
        plan.push_back((up, port, true));
    }
    let last = Port { rank: 0, link: 0 };
    plan.push_back((at + Duration::from_millis(200), last, false));
    plan.make_contiguous().sort_by_key(|(at, ..)| *at);
    plan
}
