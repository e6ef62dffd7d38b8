//! An end's paths, by their indices.

use std::{
    ops::{Index, IndexMut},
    time::Duration,
};

use crate::{Action, Address, Link, LinkState, MAX_PATHS, Message, PathSet, PathView, Settings};

/// A path as either end sees it, and what only this end keeps of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Path<More> {
    /// Of the newest queue pair here.
    pub(crate) generation: u32,
    pub(crate) state: LinkState,
    pub(crate) port_up: bool,
    /// Address of the newest queue pair here, to say again.
    pub(crate) own: Option<Address>,
    pub(crate) more: More,
}

/// An end's paths: [`Paths::count`] of them, indexed from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Paths<More> {
    pub(crate) count: u8,
    paths: [Path<More>; MAX_PATHS],
}

impl<More: Copy> Paths<More> {
    /// `count` paths, those in `ready` connected as generation 1, and where steps begin: on the first of these. `None` if there are
    /// no paths, more than [`MAX_PATHS`], or none ready.
    pub(crate) fn new(count: usize, ready: PathSet, more: More) -> Option<(Self, Link)> {
        let active = Link {
            path: ready.first()?,
            generation: 1,
        };
        if count > MAX_PATHS || ready.iter().any(|path| usize::from(path) >= count) {
            return None;
        }
        let fenced = Path {
            generation: 1,
            state: LinkState::Fenced,
            port_up: true,
            own: None,
            more,
        };
        let mut paths = Self {
            count: count as u8,
            paths: [fenced; MAX_PATHS],
        };
        for path in ready.iter() {
            paths[path].state = LinkState::Ready;
        }
        Some((paths, active))
    }

    /// How long what is posted over the path in use may neither end nor fail.
    pub(crate) fn timeout(&self, settings: &Settings) -> Duration {
        match self.count {
            // As long as a connection with one path, which would make it anew first.
            _ if !settings.enabled => settings.timeout_alone + settings.give_up,
            1 => settings.timeout_alone,
            _ => settings.timeout,
        }
    }

    pub(crate) fn indices(&self) -> impl Iterator<Item = u8> + use<More> {
        0..self.count
    }

    pub(crate) fn knows(&self, path: u8) -> bool {
        path < self.count
    }

    pub(crate) fn is_newest(&self, link: Link) -> bool {
        self.knows(link.path) && self[link.path].generation == link.generation
    }

    /// Whether the queue pair is the newest of its path, in this state.
    pub(crate) fn is_in(&self, link: Link, state: LinkState) -> bool {
        self.is_newest(link) && self[link.path].state == state
    }

    /// The newest queue pair of a path.
    pub(crate) fn link(&self, path: u8) -> Link {
        Link {
            path,
            generation: self[path].generation,
        }
    }

    /// Those over which something can be said.
    fn ready(&self) -> PathSet {
        let ready = self
            .indices()
            .filter(|path| self[*path].state == LinkState::Ready);
        ready.fold(PathSet::EMPTY, PathSet::with)
    }

    /// Has `message` told over every path that can carry it.
    pub(crate) fn tell(&self, message: Message, out: &mut Vec<Action>) {
        let over = self.ready();
        out.push(Action::Tell { message, over });
    }

    /// By path: the newest generation given up here.
    pub(crate) fn given_up(&self) -> [u32; MAX_PATHS] {
        let mut generations = [0; MAX_PATHS];
        for (path, given_up) in self.indices().zip(&mut generations) {
            *given_up = self[path].generation - u32::from(self[path].state.is_live());
        }
        generations
    }

    /// What can be told of them.
    pub(crate) fn views(&self, active: Link) -> impl Iterator<Item = PathView> {
        self.indices().map(move |path| PathView {
            link: self.link(path),
            state: self[path].state,
            port_up: self[path].port_up,
            active: self.link(path) == active,
        })
    }
}

impl<More> Index<u8> for Paths<More> {
    type Output = Path<More>;

    fn index(&self, path: u8) -> &Path<More> {
        &self.paths[usize::from(path)]
    }
}

impl<More> IndexMut<u8> for Paths<More> {
    fn index_mut(&mut self, path: u8) -> &mut Path<More> {
        &mut self.paths[usize::from(path)]
    }
}
