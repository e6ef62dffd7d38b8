//! What a plan's channels have to do, in the making.

use ringsight_kernels::{ChannelWork, Work};

/// The work of a plan's channels in the making.
#[derive(Default)]
pub(super) struct ChannelWorks {
    /// Those with work, in channel order; then what is left of a plan that is over.
    all: Vec<ChannelWork>,
    used: usize,
}

impl ChannelWorks {
    /// None yet, in the memory of others.
    pub(super) fn within(mut all: Vec<ChannelWork>) -> Self {
        all.iter_mut().for_each(|channel| channel.work.clear());
        Self { all, used: 0 }
    }

    /// That of one channel.
    pub(super) fn of(&mut self, number: u8) -> &mut Vec<Work> {
        let used = &self.all[..self.used];
        let place = used.partition_point(|channel| channel.channel < number);
        if used.get(place).is_none_or(|channel| channel.channel != number) {
            if self.used == self.all.len() {
                self.all.push(ChannelWork {
                    channel: number,
                    work: Vec::new(),
                });
            }
            self.all[self.used].channel = number;
            self.all[place..=self.used].rotate_right(1);
            self.used += 1;
        }
        &mut self.all[place].work
    }

    pub(super) fn finish(mut self) -> Vec<ChannelWork> {
        self.all.truncate(self.used);
        self.all
    }
}
