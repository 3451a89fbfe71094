//! Rank 0's side of the rendezvous: it gathers all ranks, sends each the addresses of the others,
//! and starts the run when all ranks are connected to each other.

use std::{
    net::{IpAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use super::{
    ConnectOptions, RankEnv,
    admission::{self, Refusal},
    ended::Ended,
    hosts::Hosts,
    introductions::{Introduction, Introductions},
    refusals::Refusals,
    socket::{self, Pending, TICK, Until},
    wire::{ControlMessage, Frame, Hello, StartFailure, Table, read_frame, write_frame},
};
use crate::{clock, error::CollectiveError, host_name};

/// A rank that does not accept a short message within this time is stopped.
const SHORT: Duration = Duration::from_secs(2);
/// The interval at which rank 0 reports that it is still waiting.
const SIGN: Duration = Duration::from_secs(1);
/// How long rank 0 waits for late ranks, to notify them that a rank cannot start.
pub(super) const OTHERS_COME: Duration = Duration::from_secs(30);

/// A rank that introduced itself.
#[derive(Debug)]
struct ConnectedWorker {
    stream: TcpStream,
    host: IpAddr,
    port: u16,
}

/// The state of a rendezvous at rank 0.
#[derive(Debug)]
struct Coordinator<'a> {
    env: &'a RankEnv,
    options: &'a ConnectOptions,
    deadline: Instant,
    guests: Vec<Option<ConnectedWorker>>,
    /// Ranks that have ever introduced themselves. They may give up and leave before rank 0 does.
    received: Vec<bool>,
    hosts: Hosts,
    refusals: Refusals,
    /// Why a rank (rank 0 or another) cannot start. All connected ranks have received it, and each
    /// rank that connects later receives it.
    failure: Option<StartFailure>,
}

/// The connections to ranks `1..world_size`, all of them ready.
pub(super) fn gather(
    listener: &TcpListener,
    options: &ConnectOptions,
) -> Result<Vec<Option<TcpStream>>, CollectiveError> {
    let mut host = Coordinator::new(options, None);
    let gathered = host.await_all(listener);
    if let Some(failure) = host.failure {
        return Err(Ended::CannotStart(failure).into());
    }
    let result = gathered
        .and_then(|()| host.hand_out_table())
        .and_then(|()| host.await_ready())
        .and_then(|()| Ok(host.tell_all(&ControlMessage::Go)?));
    if let Err(ended) = result {
        // A rank that receives this fails with the same reason; any other rank sees its connection
        // end.
        let _ = host.tell_all(&match &ended {
            Ended::Because(why) => ControlMessage::Refused { why: why.clone() },
            Ended::CannotStart(failure) => ControlMessage::CannotStart(failure.clone()),
        });
        return Err(ended.into());
    }
    Ok(host
        .guests
        .into_iter()
        .map(|guest| Some(guest?.stream))
        .collect())
}

/// Notifies every rank that connects that rank 0 cannot start, until all have received it.
pub(super) fn tell_failure(listener: &TcpListener, options: &ConnectOptions, why: StartFailure) {
    let mut host = Coordinator::new(options, Some(why));
    // Ranks that do not arrive in time are not notified.
    let _ = host.await_all(listener);
}

impl<'a> Coordinator<'a> {
    fn new(options: &'a ConnectOptions, failure: Option<StartFailure>) -> Self {
        let env = &options.env;
        let mut hosts = Hosts::new(options.group.timeout);
        hosts.joined(
            0,
            &host_name(),
            env.is_local_world_known.then_some(env.local_world_size),
        );
        Self {
            env,
            options,
            deadline: clock::now() + options.rendezvous_timeout,
            guests: (0..env.world_size).map(|_| None).collect(),
            received: vec![false; env.world_size],
            hosts,
            refusals: Refusals::default(),
            failure,
        }
    }

    fn await_all(&mut self, listener: &TcpListener) -> Result<(), Ended> {
        let mut introductions = Introductions::new();
        let mut told = self.missing();
        let mut signed = clock::now();
        while !told.is_empty() {
            introductions.accept(listener)?;
            while let Some(introduction) = introductions.next() {
                self.admit(introduction)?;
            }
            for guest in &mut self.guests {
                // Ranks that were notified of a failure leave and do not come back.
                if self.failure.is_none()
                    && guest
                        .as_ref()
                        .is_some_and(|g| socket::pending(&g.stream) == Pending::Closed)
                {
                    *guest = None;
                }
            }
            let missing = self.missing();
            // A rank that has left meanwhile is noticed above.
            if missing != told {
                let _ = self.tell_all(&ControlMessage::Missing {
                    ranks: missing.clone(),
                });
                told = missing;
            }
            if clock::now() - signed >= SIGN {
                signed = clock::now();
                let _ = self.tell_all(&ControlMessage::Waiting);
            }
            if !told.is_empty() {
                self.check_time()?;
                thread::sleep(TICK);
            }
        }
        Ok(())
    }

    fn admit(&mut self, introduction: Introduction) -> Result<(), Ended> {
        let Introduction { stream, from, said } = introduction;
        let hello = match said {
            Ok(ControlMessage::Hello(hello)) => self.check(hello),
            Ok(_) => Err(Refusal::of_stranger("it did not introduce itself".into())),
            Err(why) => Err(Refusal::of_stranger(why)),
        };
        let hello = match hello {
            Ok(hello) => hello,
            Err(refusal) => {
                let _ = say(
                    &stream,
                    &ControlMessage::Refused {
                        why: refusal.why.clone(),
                    },
                );
                if refusal.ends_all {
                    return Err(refusal.why.into());
                }
                self.refusals.note(from, refusal, &self.env.master());
                return Ok(());
            }
        };
        self.received[hello.rank] = true;
        self.hosts.joined(hello.rank, &hello.host, hello.on_host);
        let host = from.ip().to_canonical();
        let port = hello.port;
        if let Some(failure) = &self.failure {
            let _ = say(&stream, &ControlMessage::CannotStart(failure.clone()));
        }
        self.guests[hello.rank] = Some(ConnectedWorker { stream, host, port });
        if self.failure.is_none() {
            hello
                .failure
                .into_iter()
                .for_each(|failure| self.fail(failure));
        }
        Ok(())
    }

    /// From now on rank 0 only notifies ranks that a rank cannot start. It stays, because ranks of
    /// a host that arrives later would otherwise look for rank 0 until their own timeout.
    fn fail(&mut self, failure: StartFailure) {
        let _ = self.tell_all(&ControlMessage::CannotStart(failure.clone()));
        self.failure = Some(failure);
        self.deadline = self.deadline.min(clock::now() + OTHERS_COME);
    }

    fn check(&self, hello: Hello) -> Result<Hello, Refusal> {
        let has_seat = self.guests.get(hello.rank).is_some_and(Option::is_none);
        admission::check(
            &hello,
            self.env,
            self.options.group.seed,
            self.failure.is_some(),
        )?;
        admission::check_seat(&hello, self.env, has_seat)?;
        Ok(hello)
    }

    fn hand_out_table(&mut self) -> Result<(), Ended> {
        // All ranks have arrived: the rest takes no longer than a collective.
        self.deadline = self.deadline.min(clock::now() + self.options.meshing());
        let nonce = random().map_err(|error| format!("cannot read random bytes: {error}"))?;
        let peer = |guest: &Option<ConnectedWorker>| match guest {
            Some(guest) if guest.host.is_loopback() => (None, guest.port),
            Some(guest) => (Some(guest.host), guest.port),
            None => (None, 0),
        };
        let peers = self.guests.iter().map(peer).collect();
        Ok(self.tell_all(&ControlMessage::Table(Table { nonce, peers }))?)
    }

    fn await_ready(&mut self) -> Result<(), Ended> {
        let mut waiting = self.missing_of(|_| true);
        while !waiting.is_empty() {
            let mut still = Vec::new();
            for &rank in &waiting {
                let guest = self.guests[rank].as_ref().expect("all ranks are connected");
                let left = || Err(format!("rank {rank} left while connecting").into());
                match socket::pending(&guest.stream) {
                    Pending::Nothing => still.push(rank),
                    Pending::Closed => return left(),
                    Pending::Data => match read_frame(Until::new(&guest.stream, self.deadline)) {
                        Ok(Some(Frame {
                            word: ControlMessage::Ready,
                            ..
                        })) => {}
                        Ok(Some(Frame {
                            word: ControlMessage::Refused { why },
                            ..
                        })) => {
                            return Err(why.into());
                        }
                        Ok(_) => return left(),
                        Err(error) => return Err(format!("rank {rank}: {error}").into()),
                    },
                }
            }
            waiting = still;
            if !waiting.is_empty() {
                if clock::now() >= self.deadline {
                    let why = format!("ranks {waiting:?} did not connect to the others in time");
                    return Err(why.into());
                }
                thread::sleep(TICK);
            }
        }
        Ok(())
    }

    fn missing(&self) -> Vec<usize> {
        self.missing_of(Option::is_none)
    }

    fn missing_of(&self, which: impl Fn(&Option<ConnectedWorker>) -> bool) -> Vec<usize> {
        (1..self.guests.len())
            .filter(|&rank| which(&self.guests[rank]))
            .collect()
    }

    fn check_time(&mut self) -> Result<(), Ended> {
        let missing = self.missing();
        let late = self.hosts.late(&missing, self.env.world_size);
        let refused = || self.refusals.late(&missing, self.options.group.timeout);
        let late = match late.map(Ended::Because).or_else(refused) {
            Some(Ended::Because(why)) => Some(why),
            Some(failed) => return Err(failed),
            None => None,
        };
        if late.is_none() && clock::now() < self.deadline {
            return Ok(());
        }
        let (left, never): (Vec<usize>, Vec<usize>) =
            missing.into_iter().partition(|&rank| self.received[rank]);
        let world_size = self.env.world_size;
        let master = self.env.master();
        let mut why = match (late, never.is_empty()) {
            (Some(late), false) => late,
            (_, true) => format!(
                "ranks {left:?} of {world_size} disconnected from rank 0 at \
                                 {master}"
            ),
            (None, false) => {
                format!("ranks {never:?} of {world_size} did not reach rank 0 at {master} in time")
            }
        };
        if !(never.is_empty() || left.is_empty()) {
            why += &format!("; ranks {left:?} connected and disconnected");
        }
        why += &self.refusals.to_string();
        Err(why.into())
    }

    fn tell_all(&self, word: &ControlMessage) -> Result<(), String> {
        let mut result = Ok(());
        for (rank, guest) in self.guests.iter().enumerate() {
            if let Some(guest) = guest
                && let Err(why) = say(&guest.stream, word)
            {
                result = result.and(Err(format!("rank {rank} left while connecting: {why}")));
            }
        }
        result
    }
}

fn random() -> Result<u64, getrandom::Error> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn say(stream: &TcpStream, word: &ControlMessage) -> Result<(), String> {
    let until = Until::new(stream, clock::now() + SHORT);
    write_frame(until, word, 0, None).map_err(|(_, error)| error.to_string())
}
