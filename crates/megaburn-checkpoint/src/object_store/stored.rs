use std::time::SystemTime;

use megaburn_store::ListedObject;

use super::file_names::{is_written, run_of_mark};
use crate::{folder::checkpoint_step, manifest::MANIFEST};

/// A checkpoint in a store, or what an upload or a deletion has left of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredCheckpoint {
    /// The step in its name.
    pub step: u64,
    /// The objects in its folder, with their names there.
    pub(crate) objects: Vec<ListedObject>,
}

impl StoredCheckpoint {
    /// Groups the objects of a store by step, oldest first. Those in no folder of a step are left
    /// out.
    pub(crate) fn all(listed: Vec<ListedObject>) -> Vec<Self> {
        let mut found: Vec<Self> = Vec::new();
        for object in listed {
            let Some((folder, name)) = object.name.split_once('/') else {
                continue;
            };
            let Some(step) = checkpoint_step(folder) else {
                continue;
            };
            let name = name.to_owned();
            let object = ListedObject { name, ..object };
            match found.iter_mut().find(|stored| stored.step == step) {
                Some(stored) => stored.objects.push(object),
                None => found.push(Self {
                    step,
                    objects: vec![object],
                }),
            }
        }
        found.sort_by_key(|stored| stored.step);
        found
    }

    /// Whether it has its manifest, which is written last.
    pub fn is_complete(&self) -> bool {
        self.object(MANIFEST).is_some()
    }

    /// The runs that have marked it; usually one.
    pub fn marks(&self) -> impl Iterator<Item = &str> {
        let names = self.objects.iter();
        names.filter_map(|object| run_of_mark(&object.name))
    }

    /// Whether only the run `run_id` has marked it.
    pub fn is_of(&self, run_id: &str) -> bool {
        self.marks().next().is_some() && self.marks().all(|id| id == run_id)
    }

    /// Bytes of its objects.
    pub fn num_bytes(&self) -> u64 {
        self.objects.iter().map(|object| object.num_bytes).sum()
    }

    /// When its manifest was written, or else the newest of its objects.
    pub fn saved(&self) -> Option<SystemTime> {
        let newest = || {
            self.objects
                .iter()
                .filter_map(|object| object.modified)
                .max()
        };
        let manifest = self.object(MANIFEST).and_then(|object| object.modified);
        manifest.or_else(newest)
    }

    pub(crate) fn object(&self, name: &str) -> Option<&ListedObject> {
        self.objects.iter().find(|object| object.name == name)
    }

    /// The objects that a deletion removes, in its order: the manifest, other files, the marks of
    /// `run_id`. Objects that megaburn did not write are left out.
    pub(crate) fn deleted(&self, run_id: &str) -> Vec<&str> {
        let mut names: Vec<_> = self
            .objects
            .iter()
            .map(|object| object.name.as_str())
            .collect();
        names.retain(|name| is_written(name) || run_of_mark(name) == Some(run_id));
        names.sort_by_key(|name| (*name != MANIFEST, run_of_mark(name).is_some()));
        names
    }
}
