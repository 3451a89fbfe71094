//! Rank 0's side of the rendezvous: it gathers all ranks, gives each its place in the tree of ranks,
//! and starts the run when all are connected to the ranks next to them.

use std::{
    borrow::Borrow,
    net::{IpAddr, Ipv4Addr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use super::{
    ConnectOptions, RankEnv,
    acceptor::Acceptor,
    admission::{self, Refusal},
    ended::Ended,
    endpoint::{Endpoint, Pass},
    hosts::Hosts,
    introductions::{Introduction, Introductions},
    refusals::Refusals,
    socket::{self, Pending, TICK, Until},
    transport::TcpTransport,
    wire::{ControlMessage, Frame, Hello, Place, StartFailure, read_frame, write_frame},
};
use crate::{clock, error::CollectiveError, host_name, tree};

/// A rank that does not accept a short message within this time is stopped.
const SHORT: Duration = Duration::from_secs(2);
/// The interval at which rank 0 reports that it is still waiting.
const SIGN: Duration = Duration::from_secs(1);
/// The least time between two reports of the missing ranks, and between two looks for ranks that
/// have left.
const REPORT: Duration = Duration::from_millis(100);
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

/// Gathers all ranks and starts the run.
pub(super) fn gather(
    listener: &TcpListener,
    options: &ConnectOptions,
) -> Result<TcpTransport, CollectiveError> {
    let mut host = Coordinator::new(options, None);
    let gathered = host.await_all(listener);
    if let Some(failure) = host.failure {
        return Err(Ended::CannotStart(failure).into());
    }
    let started = gathered.and_then(|()| host.start());
    started.map_err(|ended| {
        // A rank that receives this fails with the same reason; any other rank sees its connection
        // end.
        let _ = host.tell_all(&match &ended {
            Ended::Because(why) => ControlMessage::Refused { why: why.clone() },
            Ended::CannotStart(failure) => ControlMessage::CannotStart(failure.clone()),
        });
        ended.into()
    })
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
        let mut reported = signed;
        loop {
            introductions.accept(listener)?;
            while let Some(introduction) = introductions.next() {
                self.admit(introduction)?;
            }
            let is_due = clock::now() - reported >= REPORT;
            if is_due || self.missing().is_empty() {
                self.drop_those_that_left();
            }
            let missing = self.missing();
            if missing.is_empty() {
                return Ok(());
            }
            // A rank that has left meanwhile is noticed above.
            if is_due && missing != told {
                let _ = self.tell_all(&ControlMessage::Missing {
                    ranks: missing.clone(),
                });
                told = missing;
            }
            if is_due {
                reported = clock::now();
            }
            if clock::now() - signed >= SIGN {
                signed = clock::now();
                let _ = self.tell_all(&ControlMessage::Waiting);
            }
            self.check_time()?;
            thread::sleep(TICK);
        }
    }

    /// Ranks that were notified of a failure leave and do not come back.
    fn drop_those_that_left(&mut self) {
        if self.failure.is_some() {
            return;
        }
        for guest in &mut self.guests {
            let has_left =
                |guest: &ConnectedWorker| socket::pending(&guest.stream) == Pending::Closed;
            if guest.as_ref().is_some_and(has_left) {
                *guest = None;
            }
        }
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

    /// Starts the run with all ranks.
    fn start(&mut self) -> Result<TcpTransport, Ended> {
        // All ranks have arrived: the rest takes no longer than a collective.
        self.deadline = self.deadline.min(clock::now() + self.options.meshing());
        let nonce = random().map_err(|error| format!("cannot read random bytes: {error}"))?;
        // Once the run has started, another job may use the port at which ranks meet.
        let listener = socket::listen(self.env.master_addr_for_peers(), 0)
            .map_err(|error| error.to_string())?;
        let port = listener.local_addr().map_err(|error| error.to_string())?;
        let guests = self.guests.iter().flatten();
        let mut here = guests.map(|guest| guest.host).filter(IpAddr::is_loopback);
        let home = here.next().unwrap_or(Ipv4Addr::LOCALHOST.into());
        let pass = Pass {
            token: self.env.job_token.clone(),
            nonce,
        };
        let world = (0, self.env.world_size);
        let endpoint = Endpoint::new(world, self.options.group, pass, home);
        let address = |guest: &Option<ConnectedWorker>| match guest {
            Some(guest) if guest.host.is_loopback() => (None, guest.port),
            Some(guest) => (Some(guest.host), guest.port),
            None => (None, port.port()),
        };
        let addresses: Vec<_> = self.guests.iter().map(address).collect();
        endpoint.learn(addresses.clone());
        let acceptor = Acceptor::start(listener, &endpoint)
            .map_err(|error| format!("cannot start a thread: {error}"))?;
        let transport = TcpTransport::new(endpoint.clone(), Some(acceptor));
        let place = |rank: usize| {
            let above = tree::parent(rank).unwrap_or_default();
            let above = addresses[above];
            ControlMessage::Place(Place { nonce, above })
        };
        let started = self
            .tell_each(place)
            .map_err(Ended::from)
            .and_then(|()| self.await_ready(&endpoint))
            .and_then(|()| Ok(self.tell_all(&ControlMessage::Go)?));
        match started {
            Ok(()) => Ok(transport),
            Err(ended) => {
                transport.give_up("the run did not start");
                Err(ended)
            }
        }
    }

    /// Waits until every rank is connected to those next to it.
    fn await_ready(&mut self, endpoint: &Endpoint) -> Result<(), Ended> {
        let mut waiting = self.missing_of(|_| true);
        let mut has_passed_on = false;
        while !waiting.is_empty() {
            has_passed_on = has_passed_on || endpoint.pass_on_addresses()?.is_none();
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
        self.tell_each(|_| word)
    }

    fn tell_each<W: Borrow<ControlMessage>>(
        &self,
        word: impl Fn(usize) -> W,
    ) -> Result<(), String> {
        let mut result = Ok(());
        for (rank, guest) in self.guests.iter().enumerate() {
            if let Some(guest) = guest
                && let Err(why) = say(&guest.stream, word(rank).borrow())
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
