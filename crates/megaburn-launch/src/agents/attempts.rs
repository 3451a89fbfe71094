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
    formation::Formation,
    listener::Incoming,
    members::{Member, Members},
    wire::{BEAT, Connection, FromAgent, FromCoordinator, Hello, Shape, Start},
};
use crate::{
    launched::Launch,
    options::LaunchOptions,
    restart::Restarts,
    verdict::{EndedBy, Outcome, RankEnd},
};

/// How long a job that begins waits for a host before a spare takes its place.
const SPARE_PATIENCE: Duration = Duration::from_secs(30);
/// Once the ranks of one host have stopped on purpose, the other hosts have this long to follow.
const STOPPING: Duration = Duration::from_secs(10);

/// What the coordinator waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Phase {
    /// Hosts for all seats.
    Hosts { since: Instant },
    /// The end of the ranks.
    Ranks {
        since: Instant,
        /// When those that still run are ended.
        end_at: Option<Instant>,
    },
    /// The end of the pause before a restart.
    Pause { until: Instant },
}

/// The hosts of a job and the attempt that they make.
pub(super) struct Attempts {
    pub(super) options: LaunchOptions,
    pub(super) shape: Shape,
    pub(super) addr: String,
    pub(super) port: u16,
    /// The job's token; each attempt derives its own from it.
    pub(super) token: JobToken,
    pub(super) launch: Launch,
    pub(super) incoming: Receiver<(usize, Incoming)>,
    pub(super) members: Members,
    pub(super) restarts: Restarts,
    pub(super) attempt: usize,
    /// The hosts of this attempt, or of the last one.
    pub(super) formation: Formation,
    /// How the ranks of this attempt, or of the last one, ended.
    pub(super) outcome: Outcome,
    /// Why the attempt before this one ended.
    pub(super) cause: Option<String>,
    /// A signal that asked a launcher without ranks to stop.
    pub(super) signal: Option<i32>,
    /// Whether this host's launcher has left.
    pub(super) is_over: Arc<AtomicBool>,
    /// Whether ranks have been started.
    pub(super) has_started: bool,
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
                self.ask_again(phase);
            }
            match self.step(phase) {
                Some(next) => phase = next,
                None => break,
            }
        }
        self.part();
    }

    /// Takes note of what a launcher sent.
    fn take(&mut self, id: usize, incoming: Incoming, phase: &mut Phase) {
        match incoming {
            Incoming::Hello(hello, connection) => self.admit(id, &hello, connection, phase),
            Incoming::Lost { why, is_silent } => {
                self.note_silence(id, is_silent);
                self.lose(id, &why, phase);
            }
            Incoming::Said(said) => {
                if let Some(member) = self.members.by_id(id) {
                    member.last_sign = Instant::now();
                }
                match said {
                    FromAgent::Beat => {}
                    FromAgent::Leaves { signal } => self.leave(id, signal, phase),
                    FromAgent::Ended {
                        attempt,
                        outcome,
                        not_started,
                    } => self.ended(id, attempt, outcome, not_started, phase),
                }
            }
        }
    }

    fn admit(&mut self, id: usize, hello: &Hello, connection: Connection, phase: &mut Phase) {
        let connection = Arc::new(connection);
        if let Some(replaced) = self.members.replaced_by(hello, Instant::now()) {
            self.lose(replaced, "its launcher has connected again", phase);
        }
        self.continue_launch(hello);
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
                if matches!(phase, Phase::Ranks { .. }) && self.runs_on_all_hosts() {
                    self.free_others();
                }
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
                rank: self.formation.first_rank(seat, nproc),
                by: EndedBy::Code(1),
                told: false,
                last_words: vec![why],
            });
        }
        member.is_unfit |= outcome.held().is_some();
        member.ended = Some(outcome.clone());
        self.add(outcome, phase);
    }

    /// Continues the launch of hosts that ran ranks under an earlier coordinator, if this one was
    /// started again.
    fn continue_launch(&mut self, hello: &Hello) {
        if let (Some((launch, attempt)), false) = (&hello.started, self.has_started)
            && *attempt >= self.attempt
        {
            self.launch = launch.clone();
            self.attempt = attempt + 1;
            self.cause = Some("the launcher of node 0 was lost".into());
        }
    }

    /// Records how the ranks of a host ended. After a failure the coordinator ends the other hosts'
    /// ranks at once; after a stop on purpose it waits for [`STOPPING`] first.
    fn add(&mut self, outcome: Outcome, phase: &mut Phase) {
        let is_failure = outcome.is_failure();
        let has_stopped = outcome.signal.is_none() && outcome.cause().is_some();
        self.outcome.ends.extend(outcome.ends);
        self.outcome.signal = self.outcome.signal.or(outcome.signal);
        if let Phase::Ranks { end_at, .. } = phase
            && has_stopped
        {
            let patience = if is_failure { Duration::ZERO } else { STOPPING };
            let at = Instant::now() + patience;
            *end_at = Some(end_at.map_or(at, |before| before.min(at)));
        }
    }

    /// A launcher's connection has ended, or it is silent.
    pub(super) fn lose(&mut self, id: usize, why: &str, phase: &mut Phase) {
        let Some(member) = self.members.remove(id) else {
            return;
        };
        let name = member.name();
        self.say(&format!("{name} was lost: {why}"));
        if let (Phase::Ranks { .. }, Some(seat), None) = (*phase, member.seat, member.ended) {
            let end = RankEnd {
                rank: self.formation.first_rank(seat, self.options.nproc),
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

    /// What follows, or `None` at the end of the job.
    fn step(&mut self, phase: Phase) -> Option<Phase> {
        let now = Instant::now();
        if let (Some(_), Phase::Hosts { .. } | Phase::Pause { .. }) = (self.signal, phase) {
            self.stop();
            return None;
        }
        match phase {
            Phase::Ranks {
                since,
                end_at: Some(at),
            } if now >= at && !self.have_ended() => {
                let attempt = self.attempt;
                self.send_all(&FromCoordinator::EndRanks { attempt });
                // Again until they have ended: a launcher obeys the first one.
                let end_at = Some(now + STOPPING);
                Some(Phase::Ranks { since, end_at })
            }
            Phase::Pause { until } if now >= until => Some(Phase::Hosts { since: now }),
            Phase::Hosts { since } => self.start(since),
            Phase::Ranks { since, .. } if self.have_ended() => self.decide(now - since),
            Phase::Ranks { end_at: None, .. } => {
                self.regroup_if_more();
                Some(phase)
            }
            same => Some(same),
        }
    }

    /// Starts the ranks if there is a host for each seat.
    fn start(&mut self, since: Instant) -> Option<Phase> {
        let waited = since.elapsed();
        let may_use_spares = self.attempt > 0 || waited > SPARE_PATIENCE;
        let free = self.members.seat(may_use_spares);
        let Some(seats) = self.seats_to_start(&free, waited) else {
            let is_hopeless = |member: &Member| member.node == 0 && member.is_unfit;
            let is_hopeless = self.members.all.iter().any(is_hopeless);
            if waited < self.options.host_timeout && !is_hopeless {
                return Some(Phase::Hosts { since });
            }
            let why = match is_hopeless {
                true => "node 0 has a process that does not end".to_string(),
                false => format!(
                    "none came within {} s; launchers meet if all have `--restarts`, `--spares` or \
                    `--topology`",
                    waited.as_secs()
                ),
            };
            let ends = free.iter().map(|seat| RankEnd {
                rank: self.formation.first_rank(*seat, self.options.nproc),
                by: EndedBy::LostHost,
                told: false,
                last_words: Vec::new(),
            });
            self.outcome.ends.extend(ends);
            let seats: Vec<_> = free.iter().map(usize::to_string).collect();
            self.say(&format!("no host for node {}: {why}", seats.join(", ")));
            return None;
        };
        self.has_started = true;
        self.outcome = Outcome::default();
        let nnodes = seats.len();
        // A host that has a seat may be left out: it then has no ranks to wait for.
        let seated = self.members.all.iter_mut();
        let seated = seated.filter(|member| member.seat.is_some());
        seated.for_each(|member| member.ended = Some(Outcome::default()));
        for (node_rank, &seat) in seats.iter().enumerate() {
            let start = FromCoordinator::Start(Start {
                attempt: self.attempt,
                node_rank,
                nnodes,
                master_addr: self.addr.clone(),
                master_port: self.port,
                token: self.token.of_attempt(self.attempt).text().into(),
                launch: self.launch.clone(),
                cause: self.cause.clone(),
            });
            let members = self.members.all.iter_mut();
            for member in members.filter(|member| member.seat == Some(seat)) {
                member.ended = None;
                member.send(&start);
            }
        }
        let replaced = self.members.all.iter().filter_map(|member| {
            let seat = member.seat.filter(|seat| *seat != member.node)?;
            Some(format!("{} runs the ranks of node {seat}", member.name()))
        });
        let mut news: Vec<_> = replaced.collect();
        news.extend(self.members.order.take_news());
        if nnodes < self.options.nnodes {
            let all = self.options.nnodes;
            news.push(format!("{nnodes} of {all} hosts train until others come"));
        }
        self.formation = Formation {
            seats,
            ..Formation::default()
        };
        self.free_others();
        news.iter().for_each(|text| self.say(text));
        Some(Phase::Ranks {
            since: Instant::now(),
            end_at: None,
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
        if self.has_regrouped() {
            return Some(self.begin_regrouped());
        }
        self.say_outcome();
        if !self.outcome.is_failure() || self.signal.is_some() {
            self.outcome.signal = self.outcome.signal.or(self.signal);
            return None;
        }
        if let Some(rank) = self.outcome.culprit() {
            let seat = self.formation.seat_of(rank, self.options.nproc);
            let members = &mut self.members.all;
            let of_cause = members.iter_mut().find(|member| member.seat == Some(seat));
            of_cause.into_iter().for_each(|member| member.failures += 1);
        }
        let nproc = self.options.nproc;
        let host_of = |rank| self.members.seated(self.formation.seat_of(rank, nproc));
        self.cause = self.outcome.reason(|rank| host_of(rank).map(Member::name));
        let mut said = Vec::new();
        let say = |text: &str| said.push(text.to_string());
        let restart = self.restarts.after(&self.outcome, lasted, say);
        said.iter().for_each(|text| self.say(text));
        self.attempt += 1;
        restart.map(|restart| Phase::Pause {
            until: Instant::now() + restart.pause,
        })
    }

    /// Lets all launchers print a text.
    pub(super) fn say(&mut self, text: &str) {
        let text = text.to_string();
        self.send_all(&FromCoordinator::Say { text });
    }

    pub(super) fn send_all(&mut self, message: &FromCoordinator) {
        let members = self.members.all.iter_mut();
        members.for_each(|member| member.send(message));
    }
}
