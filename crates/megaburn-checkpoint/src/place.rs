//! Where the checkpoints of a run are.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use megaburn_collective::Group;

use crate::hosts::map::Hosts;

/// The folder of a run's checkpoints: one that all ranks see, or one of each host.
#[derive(Clone, Debug)]
pub struct Place {
    dir: PathBuf,
    hosts: Option<Arc<Hosts>>,
}

impl Place {
    /// A folder that all ranks see.
    pub fn shared(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            hosts: None,
        }
    }

    /// A folder of each host, which may have another path on each. A rank writes into the folder of
    /// its host, and other hosts keep copies of the rank's file.
    pub fn of_each_host(dir: impl Into<PathBuf>, hosts: Hosts) -> Self {
        Self {
            dir: dir.into(),
            hosts: Some(Arc::new(hosts)),
        }
    }

    /// The folder, as this rank sees it.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The hosts, if each has a folder of its own.
    pub fn hosts(&self) -> Option<&Hosts> {
        self.hosts.as_deref()
    }

    /// Whether this rank creates, renames and deletes checkpoints in its folder: rank 0, or the first
    /// rank of each host.
    pub fn is_keeper(&self, world: &Group) -> bool {
        match &self.hosts {
            None => world.rank() == 0,
            Some(hosts) => hosts.is_first(world.rank()),
        }
    }
}

impl From<&Path> for Place {
    fn from(dir: &Path) -> Self {
        Self::shared(dir)
    }
}

impl From<&PathBuf> for Place {
    fn from(dir: &PathBuf) -> Self {
        Self::shared(dir)
    }
}

impl From<&Place> for Place {
    fn from(place: &Place) -> Self {
        place.clone()
    }
}
