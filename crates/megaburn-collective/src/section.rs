//! The sections of a rank's work: where it is now, and how long it worked and waited in each.

use std::{
    collections::BTreeMap,
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use crate::clock;

/// How long a rank was in sections of one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SectionTime {
    /// The time of its own work: without the sections inside it and without waits.
    pub work: Duration,
    /// The time in collectives that its thread made in it.
    pub waiting: Duration,
}

/// The sections that a rank is in, and the times of those that have ended.
#[derive(Debug, Default)]
pub(crate) struct Sections {
    /// The innermost is the last.
    open: Vec<OpenSection>,
    next_id: u64,
    pub(crate) ended: BTreeMap<&'static str, SectionTime>,
}

#[derive(Debug)]
struct OpenSection {
    id: u64,
    name: &'static str,
    thread: ThreadId,
    start: Instant,
    waiting: Duration,
    /// The time of the sections inside it, with their waits.
    inside: Duration,
}

impl Sections {
    pub(crate) fn enter(&mut self, name: &'static str) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.open.push(OpenSection {
            id,
            name,
            thread: thread::current().id(),
            start: clock::now(),
            waiting: Duration::ZERO,
            inside: Duration::ZERO,
        });
        id
    }

    pub(crate) fn leave(&mut self, id: u64) {
        let Some(at) = self.open.iter().position(|open| open.id == id) else {
            return;
        };
        let section = self.open.remove(at);
        let elapsed = clock::now().saturating_duration_since(section.start);
        let time = self.ended.entry(section.name).or_default();
        time.waiting += section.waiting;
        time.work += elapsed.saturating_sub(section.waiting + section.inside);
        let outer = at.checked_sub(1).and_then(|at| self.open.get_mut(at));
        if let Some(outer) = outer.filter(|outer| outer.thread == section.thread) {
            outer.inside += elapsed;
        }
    }

    /// Counts a wait of this thread in the section that it is in.
    pub(crate) fn waited(&mut self, time: Duration) {
        let own = thread::current().id();
        let innermost = self.open.last_mut();
        if let Some(section) = innermost.filter(|section| section.thread == own) {
            section.waiting += time;
        }
    }

    /// The name of the innermost section that the rank is in.
    pub(crate) fn innermost(&self) -> Option<&'static str> {
        self.open.last().map(|section| section.name)
    }

    /// The names of the sections that the rank is in, the innermost last, and since when it is in
    /// the innermost.
    pub(crate) fn current(&self) -> (Vec<&'static str>, Option<Instant>) {
        let names = self.open.iter().map(|section| section.name).collect();
        (names, self.open.last().map(|section| section.start))
    }
}
