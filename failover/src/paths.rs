//! The paths of an end, by index.

use std::{
    ops::{Index, IndexMut},
    time::Duration,
};

use crate::{
    links::{Link, LinkState, MAX_PATHS, PathSet, PathView},
    message::{Address, Message},
    protocol::Action,
    settings::Settings,
};

/// A path as its end sees it. `Extra` is what only the sender, or only the receiver, keeps of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Path<Extra> {
    /// Generation of the newest queue pair at this end.
    pub(crate) generation: u32,
    pub(crate) state: LinkState,
    pub(crate) port_up: bool,
    /// Address of the newest queue pair at this end, kept to be sent again.
    pub(crate) own: Option<Address>,
    pub(crate) extra: Extra,
}

/// The [`Paths::count`] paths of an end, indexed from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Paths<Extra> {
    pub(crate) count: u8,
    paths: [Path<Extra>; MAX_PATHS],
}

impl<Extra: Copy> Paths<Extra> {
    /// `count` paths, and the queue pair that steps begin on: that of the first path in `ready`. The paths in `ready` are connected as
    /// generation 1. `None` if there are no paths, more than [`MAX_PATHS`], or none is ready.
    pub(crate) fn new(count: usize, ready: PathSet, extra: Extra) -> Option<(Self, Link)> {
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
            extra,
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

    /// How long work requests on the active path may neither complete nor fail.
    pub(crate) fn timeout(&self, settings: &Settings) -> Duration {
        match self.count {
            // As long as a connection with one path waits, which would rebuild that path first.
            _ if !settings.enabled => settings.timeout_alone + settings.give_up,
            1 => settings.timeout_alone,
            _ => settings.timeout,
        }
    }

    pub(crate) fn indices(&self) -> impl Iterator<Item = u8> + use<Extra> {
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

    /// The paths that can carry a message.
    fn ready(&self) -> PathSet {
        let ready = self
            .indices()
            .filter(|path| self[*path].state == LinkState::Ready);
        ready.fold(PathSet::EMPTY, PathSet::with)
    }

    /// Sends `message` over every path that can carry it.
    pub(crate) fn send(&self, message: Message, out: &mut Vec<Action>) {
        let over = self.ready();
        out.push(Action::Send { message, over });
    }

    /// By path: the newest generation that this end has given up.
    pub(crate) fn given_up_generations(&self) -> [u32; MAX_PATHS] {
        let mut generations = [0; MAX_PATHS];
        for (path, given_up) in self.indices().zip(&mut generations) {
            *given_up = self[path].generation - u32::from(self[path].state.is_live());
        }
        generations
    }

    /// The public view of each path.
    pub(crate) fn views(&self, active: Link) -> impl Iterator<Item = PathView> {
        self.indices().map(move |path| PathView {
            link: self.link(path),
            state: self[path].state,
            port_up: self[path].port_up,
            active: self.link(path) == active,
        })
    }
}

impl<Extra> Index<u8> for Paths<Extra> {
    type Output = Path<Extra>;

    fn index(&self, path: u8) -> &Path<Extra> {
        &self.paths[usize::from(path)]
    }
}

impl<Extra> IndexMut<u8> for Paths<Extra> {
    fn index_mut(&mut self, path: u8) -> &mut Path<Extra> {
        &mut self.paths[usize::from(path)]
    }
}
