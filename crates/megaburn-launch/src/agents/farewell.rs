//! The end of a job of several hosts, and launchers that are asked to stop before.

use std::time::{Duration, Instant};

use super::{
    attempts::{Attempts, Phase},
    listener::Incoming,
    wire::FromCoordinator,
};
use crate::verdict::{EndedBy, Outcome, RankEnd};

/// How long the coordinator waits at the end for launchers that have not hung up.
const FAREWELL: Duration = Duration::from_secs(5);

impl Attempts {
    /// A launcher that runs no ranks was asked to stop. If others run ranks, it leaves alone if it is
    /// a spare; else its ranks have ended, or are just being started and get the signal.
    pub(super) fn leave(&mut self, id: usize, signal: i32, phase: &Phase) {
        let attempt_runs = matches!(phase, Phase::Ranks { .. });
        let Some(member) = self.members.by_id(id) else {
            return;
        };
        match (attempt_runs, member.seat) {
            (true, Some(_)) if member.ended.is_none() => {
                member.send(&FromCoordinator::Signal { signal });
            }
            (true, None) => {
                let outcome = of_signal(signal);
                member.send(&FromCoordinator::End { outcome });
                let name = member.name();
                self.members.remove(id);
                self.say(&format!("{name} has left: it was asked to stop"));
            }
            _ => self.signal = Some(signal),
        }
    }

    pub(super) fn say_outcome(&mut self) {
        if self.outcome.cause().is_some() || self.outcome.signal.is_some() {
            let text = self.outcome.to_string();
            self.say(&text);
        }
    }

    /// Ends a job that has no ranks now, because a launcher was asked to stop.
    pub(super) fn stop(&mut self) {
        self.outcome.signal = self.signal;
        if self.outcome.ends.is_empty() {
            self.outcome = of_signal(self.signal.unwrap_or_default());
        }
        self.say_outcome();
    }

    /// Sends how the job ended to all launchers, also to those that come now, and waits until they
    /// have hung up.
    pub(super) fn part(mut self) {
        let cause = self.outcome.cause().cloned();
        let outcome = Outcome {
            ends: cause.into_iter().collect(),
            signal: self.outcome.signal,
        };
        let end = FromCoordinator::End { outcome };
        self.send_all(&end);
        let until = Instant::now() + FAREWELL;
        while !self.members.all.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            match self.incoming.recv_timeout(left) {
                Ok((id, Incoming::Lost { .. })) => drop(self.members.remove(id)),
                Ok((_, Incoming::Hello(_, connection))) => {
                    // If this fails, it has gone.
                    let _ = connection.send(&end);
                }
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }
}

/// How a launcher ends that a signal stopped before its ranks were started.
fn of_signal(signal: i32) -> Outcome {
    Outcome {
        ends: vec![RankEnd {
            rank: 0,
            by: EndedBy::Signal(signal),
            told: true,
            last_words: Vec::new(),
        }],
        signal: Some(signal),
    }
}
