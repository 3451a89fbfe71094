//! Starts the ranks of all hosts, and decides after their end whether they are started again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use megaburn_collective::JobToken;

use super::{
    listener::Incoming,
    members::{Member, Members},
    wire::{BEAT, Connection, FromAgent, FromCoordinator, Hello, SILENCE, Shape, Start},
};
use crate::{
    launched::Launch,
    options::LaunchOptions,
    restart::Restarts,
    verdict::{EndedBy, Outcome, RankEnd},
};

/// How long a job that begins waits for a host before a spare takes its place.
const SPARE_PATIENCE: Duration = Duration::from_secs(30);
/// How long the coordinator waits at the end for launchers that have not hung up.
const FAREWELL: Duration = Duration::from_secs(5);

/// What the coordinator waits for.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Hosts for all seats.
    Hosts { since: Instant },
    /// The end of the ranks.
    Ranks { since: Instant, ends_all: bool },
    /// The end of the pause before a restart.
    Pause { until: Instant },
}

/// The hosts of a job and the attempt that they make.
pub(super) struct Attempts {
    pub(super) options: LaunchOptions,
    pub(super) shape: Shape,
    pub(super) addr: String,
    pub(super) port: u16,
    /// The token from which those of the attempts are made.
    pub(super) token: JobToken,
    pub(super) launch: Launch,
    pub(super) incoming: Receiver<(usize, Incoming)>,
    pub(super) members: Members,
    pub(super) restarts: Restarts,
    pub(super) attempt: usize,
    /// How the ranks of this attempt, or of the last one, ended.
    pub(super) outcome: Outcome,
    /// A signal that asked a launcher without ranks to stop.
    pub(super) signal: Option<i32>,
    /// Whether this host's launcher has left.
    pub(super) is_over: Arc<AtomicBool>,
}

impl Attempts {
    /// Conducts the launchers until the job has ended.
    pub(super) fn run(mut self) {
        let mut phase = Phase::Hosts {
            since: Instant::now(),
        };
        let mut next_beat = Instant::now();
        loop {
            match self.incoming.recv_timeout(BEAT / 10) {
                Ok((id, incoming)) => self.take(id, incoming, &mut phase),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
            if Instant::now() >= next_beat {
                next_beat = Instant::now() + BEAT;
                self.send_all(&FromCoordinator::Beat);
                self.drop_silent(&mut phase);
            }
            match self.step(phase) {
                Some(next) => phase = next,
                None => break,
            }
        }
        let outcome = self.outcome.clone();
        self.send_all(&FromCoordinator::End { outcome });
        self.part();
    }

    /// Takes note of what a launcher sent.
    fn take(&mut self, id: usize, incoming: Incoming, phase: &mut Phase) {
        match incoming {
            Incoming::Hello(hello, connection) => self.admit(id, &hello, connection),
            Incoming::Lost(why) => self.lose(id, &why, phase),
            Incoming::Said(said) => {
                if let Some(member) = self.members.by_id(id) {
                    member.last_sign = Instant::now();
                }
                match said {
                    FromAgent::Beat => {}
                    FromAgent::Leaves { signal } => self.signal = Some(signal),
                    FromAgent::Ended {
                        attempt,
                        outcome,
                        not_started,
                    } => self.ended(id, attempt, outcome, not_started, phase),
                }
            }
        }
    }

    fn admit(&mut self, id: usize, hello: &Hello, connection: Connection) {
        let connection = Arc::new(connection);
        let joined = match self.shape.difference(&hello.shape) {
            Some(why) => Err(why),
            None => {
                let shared = Some(connection.clone());
                self.members.join(id, hello, shared, Instant::now())
            }
        };
        match joined {
            Ok(()) if self.attempt > 0 || hello.node >= self.options.nnodes => {
                let name = self.members.all.last().map(Member::name);
                self.say(&format!("{} has joined", name.unwrap_or_default()));
            }
            Ok(()) => {}
            Err(why) => {
                // If this fails, it sees the connection end.
                let _ = connection.send(&FromCoordinator::Refused { why });
            }
        }
    }

    /// The ranks of a host have ended.
    fn ended(
        &mut self,
        id: usize,
        attempt: usize,
        mut outcome: Outcome,
        not_started: Option<String>,
        phase: &mut Phase,
    ) {
        let nproc = self.options.nproc;
        if attempt != self.attempt {
            return;
        }
        let Some(member) = self.members.by_id(id) else {
            return;
        };
        let Some(seat) = member.seat else { return };
        if let Some(why) = not_started {
            outcome.ends.push(RankEnd {
                rank: seat * nproc,
                by: EndedBy::Code(1),
                told: false,
                last_words: vec![why],
            });
        }
        member.is_unfit |= outcome.held().is_some();
        member.ended = Some(outcome.clone());
        self.add(outcome, phase);
    }

    /// Adds how the ranks of a host ended, and ends those of the other hosts after a failure.
    fn add(&mut self, outcome: Outcome, phase: &mut Phase) {
        let is_failure = outcome.is_failure();
        self.outcome.ends.extend(outcome.ends);
        self.outcome.signal = self.outcome.signal.or(outcome.signal);
        if let Phase::Ranks { ends_all, .. } = phase
            && is_failure
            && !*ends_all
        {
            *ends_all = true;
            let attempt = self.attempt;
            self.send_all(&FromCoordinator::EndRanks { attempt });
        }
    }

    /// A launcher's connection has ended, or it is silent.
    fn lose(&mut self, id: usize, why: &str, phase: &mut Phase) {
        let Some(member) = self.members.remove(id) else {
            return;
        };
        let name = member.name();
        self.say(&format!("{name} was lost: {why}"));
        if let (Phase::Ranks { .. }, Some(seat), None) = (*phase, member.seat, member.ended) {
            let end = RankEnd {
                rank: seat * self.options.nproc,
                by: EndedBy::LostHost,
                told: false,
                last_words: vec![format!("{name}: {why}")],
            };
            let outcome = Outcome {
                ends: vec![end],
                signal: None,
            };
            self.add(outcome, phase);
        }
    }

    fn drop_silent(&mut self, phase: &mut Phase) {
        let is_silent = |member: &&Member| member.last_sign.elapsed() > SILENCE;
        let silent: Vec<_> = self
            .members
            .all
            .iter()
            .filter(is_silent)
            .map(|member| member.id)
            .collect();
        for id in silent {
            let why = format!("no sign of life for {} s", SILENCE.as_secs());
            self.lose(id, &why, phase);
        }
    }

    /// What follows, or `None` at the end of the job.
    fn step(&mut self, phase: Phase) -> Option<Phase> {
        let now = Instant::now();
        if let (Some(_), Phase::Hosts { .. } | Phase::Pause { .. }) = (self.signal, phase) {
            self.stop();
            return None;
        }
        match phase {
            Phase::Pause { until } if now >= until => Some(Phase::Hosts { since: now }),
            Phase::Hosts { since } => self.start(since),
            Phase::Ranks { since, .. } if self.have_ended() => self.decide(now - since),
            same => Some(same),
        }
    }

    /// Starts the ranks if there is a host for each seat.
    fn start(&mut self, since: Instant) -> Option<Phase> {
        let waited = since.elapsed();
        let may_use_spares = self.attempt > 0 || waited > SPARE_PATIENCE;
        let free = self.members.seat(may_use_spares);
        if !free.is_empty() {
            if waited < self.options.host_timeout {
                return Some(Phase::Hosts { since });
            }
            let seconds = self.options.host_timeout.as_secs();
            self.outcome.ends.extend(free.iter().map(|seat| RankEnd {
                rank: seat * self.options.nproc,
                by: EndedBy::LostHost,
                told: false,
                last_words: vec![format!("no host came for node {seat} within {seconds} s")],
            }));
            self.say_outcome();
            return None;
        }
        self.outcome = Outcome::default();
        for seat in 0..self.options.nnodes {
            let start = FromCoordinator::Start(Start {
                attempt: self.attempt,
                node_rank: seat,
                master_addr: self.addr.clone(),
                master_port: self.port,
                token: self.token.of_attempt(self.attempt).text().into(),
                launch: self.launch.clone(),
            });
            let members = self.members.all.iter_mut();
            for member in members.filter(|member| member.seat == Some(seat)) {
                member.ended = None;
                send(member, &start);
            }
        }
        let replaced = self.members.all.iter().filter_map(|member| {
            let seat = member.seat.filter(|seat| *seat != member.node)?;
            Some(format!("{} runs the ranks of node {seat}", member.name()))
        });
        let replaced: Vec<_> = replaced.collect();
        replaced.iter().for_each(|text| self.say(text));
        Some(Phase::Ranks {
            since: Instant::now(),
            ends_all: false,
        })
    }

    /// Whether the ranks of all hosts have ended, or are lost with them.
    fn have_ended(&self) -> bool {
        let runs = |seat| {
            let member = self.members.seated(seat);
            member.is_some_and(|member| member.ended.is_none())
        };
        !(0..self.options.nnodes).any(runs)
    }

    /// Decides after the end of all ranks whether they are started again.
    fn decide(&mut self, lasted: Duration) -> Option<Phase> {
        self.say_outcome();
        if !self.outcome.is_failure() || self.signal.is_some() {
            self.outcome.signal = self.outcome.signal.or(self.signal);
            return None;
        }
        if let Some(cause) = self.outcome.cause() {
            let seat = cause.rank / self.options.nproc;
            let members = &mut self.members.all;
            let of_cause = members.iter_mut().find(|member| member.seat == Some(seat));
            of_cause.into_iter().for_each(|member| member.failures += 1);
        }
        let mut said = Vec::new();
        let say = |text: &str| said.push(text.to_string());
        let restart = self.restarts.after(&self.outcome, lasted, say);
        said.iter().for_each(|text| self.say(text));
        self.attempt += 1;
        restart.map(|restart| Phase::Pause {
            until: Instant::now() + restart.pause,
        })
    }

    /// Ends a job that has no ranks now, because a launcher was asked to stop.
    fn stop(&mut self) {
        self.outcome.signal = self.signal;
        if self.outcome.ends.is_empty() {
            self.outcome.ends.push(RankEnd {
                rank: 0,
                by: EndedBy::Signal(self.signal.unwrap_or_default()),
                told: true,
                last_words: Vec::new(),
            });
        }
        self.say_outcome();
    }

    fn say_outcome(&mut self) {
        if self.outcome.cause().is_some() || self.outcome.signal.is_some() {
            let text = self.outcome.to_string();
            self.say(&text);
        }
    }

    /// Lets all launchers print a text.
    fn say(&mut self, text: &str) {
        let text = text.to_string();
        self.send_all(&FromCoordinator::Say { text });
    }

    fn send_all(&mut self, message: &FromCoordinator) {
        self.members
            .all
            .iter_mut()
            .for_each(|member| send(member, message));
    }

    /// Waits until all launchers have hung up, so that the last message reaches them.
    fn part(mut self) {
        let until = Instant::now() + FAREWELL;
        while !self.members.all.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            match self.incoming.recv_timeout(left) {
                Ok((id, Incoming::Lost(_))) => drop(self.members.remove(id)),
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }
}

/// Sends a message to a launcher. If that fails, its reader reports the end of the connection.
fn send(member: &mut Member, message: &FromCoordinator) {
    let failed = |connection: &Arc<Connection>| connection.send(message).is_err();
    if member.connection.as_ref().is_some_and(failed) {
        member.connection = None;
    }
}
