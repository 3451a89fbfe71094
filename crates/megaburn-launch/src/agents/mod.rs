//! The launchers of several hosts, which start the ranks together, and again after a failure.
//!
//! Each launcher is an agent ([`run`]). The one of node 0 also coordinates ([`coordinator`]): it says
//! when to start, collects how the ranks ended, and decides whether and on which hosts they are
//! started again. Both give a sign of life every second. The connections show the token of the job
//! and are not encrypted: use a network whose readers you trust.

mod attempts;
mod coordinator;
mod farewell;
mod formation;
mod listener;
mod members;
mod order;
mod regrouping;
pub(crate) mod wire;

use std::{
    io,
    net::{TcpStream, ToSocketAddrs},
    sync::{Arc, mpsc::Sender},
    thread,
    time::{Duration, Instant},
};

use megaburn_collective::{JobToken, host_name};

use crate::{
    error::LaunchError,
    event::Event,
    host::{Attempt, Host},
    job::Job,
    launched::Launch,
    signals::StopRequests,
    topology::Topology,
    verdict::Outcome,
};
use coordinator::Coordinator;
use wire::{BEAT, Connection, FromAgent, FromCoordinator, Hello, SILENCE, Shape, Start, describe};

/// How long a launcher pauses before it tries to connect again.
const RETRY: Duration = Duration::from_millis(250);

/// Runs the ranks of this host when the coordinator says so, until it says that the job has ended.
///
/// # Errors
/// The coordinator refuses this launcher or does not answer for [`LaunchOptions::host_timeout`].
///
/// [`LaunchOptions::host_timeout`]: crate::LaunchOptions::host_timeout
pub(crate) fn run(host: &mut Host<'_>, job: &Job) -> Result<Outcome, LaunchError> {
    let options = host.options;
    let port = options.agents_port(job.port)?;
    let (addr, _coordinator) = if options.node_rank == 0 {
        let coordinator = Coordinator::start(options, job, port)?;
        (coordinator.own_addr(), Some(coordinator))
    } else {
        (job.addr.clone(), None)
    };
    let launcher = JobToken::draw().map_err(LaunchError::NoToken)?;
    let mut agent = Agent {
        addr,
        port,
        token: job.token_of_hosts(),
        launcher: launcher.text().into(),
        topology: Topology::of(options)?,
        started: None,
        requests: StopRequests::default(),
    };
    let mut since = Instant::now();
    loop {
        let connection = agent.connect(host, since)?;
        let why = match agent.serve(host, &connection)? {
            Served::Ended(outcome) => return Ok(outcome),
            // It was no coordinator, or one that is about to end.
            Served::NotJoined => {
                pause(host)?;
                continue;
            }
            Served::Lost { why } => why,
        };
        since = Instant::now();
        host.say(&format!(
            "lost the launcher of node 0 at {agent}: {why}; this one waits up to {} s for it",
            options.host_timeout.as_secs()
        ));
    }
}

/// How the service of a connection ended.
enum Served {
    Ended(Outcome),
    /// The other side hung up before it sent anything.
    NotJoined,
    Lost {
        why: String,
    },
}

/// The launcher of a host as the coordinator sees it.
struct Agent {
    addr: String,
    port: u16,
    token: JobToken,
    /// Random digits.
    launcher: String,
    topology: Topology,
    /// The launch and the last attempt of which it has started ranks.
    started: Option<(Launch, usize)>,
    /// The signals that it received while it had no ranks.
    requests: StopRequests,
}

impl std::fmt::Display for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.addr, self.port)
    }
}

impl Agent {
    fn fail<T>(&self, why: String) -> Result<T, LaunchError> {
        Err(LaunchError::Join {
            coordinator: self.to_string(),
            why,
        })
    }

    /// Connects to the coordinator, and tries again until the host's timeout has passed since `since`.
    fn connect(&self, host: &Host<'_>, since: Instant) -> Result<Arc<Connection>, LaunchError> {
        let limit = host.options.host_timeout;
        let connection = loop {
            match self.try_connect(host, since) {
                Ok(connection) => break Arc::new(connection),
                Err(error) if since.elapsed() > limit => {
                    let seconds = limit.as_secs();
                    return self.fail(format!("no answer for {seconds} s: {error}"));
                }
                Err(_) => {}
            }
            pause(host)?;
        };
        listen(&connection, host.sender(), host.speaker())
            .and_then(|()| beat(&connection))
            .map_err(LaunchError::Watch)?;
        Ok(connection)
    }

    fn try_connect(&self, host: &Host<'_>, since: Instant) -> io::Result<Connection> {
        if since.elapsed() > host.options.host_timeout {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for addr in (self.addr.as_str(), self.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&addr, SILENCE) {
                Ok(stream) => {
                    let connection = Connection::new(stream)?;
                    let hello = Hello {
                        token: self.token.clone(),
                        node: host.options.node_rank,
                        host: host_name(),
                        shape: Shape::of(host.options),
                        launcher: self.launcher.clone(),
                        topology: self.topology.clone(),
                        started: self.started.clone(),
                    };
                    connection.send(&hello)?;
                    return Ok(connection);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Does what the coordinator says.
    fn serve(
        &mut self,
        host: &mut Host<'_>,
        connection: &Connection,
    ) -> Result<Served, LaunchError> {
        let mut waiting = None;
        let mut has_joined = false;
        loop {
            let event = match waiting.take() {
                Some(message) => Some(Event::Coordinator(message)),
                None => host.next(SILENCE),
            };
            match event {
                Some(Event::Signal(signal)) => {
                    if self.requests.is_repeated(Instant::now()) {
                        return Err(LaunchError::Stopped { signal });
                    }
                    // The coordinator ends the job; if it is lost, the reader says so.
                    let _ = connection.send(&FromAgent::Leaves { signal });
                }
                Some(Event::Coordinator(message)) => match message {
                    FromCoordinator::Start(start) => {
                        waiting = self.start(host, connection, &start)?;
                        has_joined = true;
                    }
                    FromCoordinator::End { outcome } => return Ok(Served::Ended(outcome)),
                    FromCoordinator::Lost { .. } if !has_joined => return Ok(Served::NotJoined),
                    FromCoordinator::Lost { why } => return Ok(Served::Lost { why }),
                    FromCoordinator::Refused { why } => {
                        return Err(LaunchError::Refused {
                            coordinator: self.to_string(),
                            why,
                        });
                    }
                    FromCoordinator::Beat => has_joined = true,
                    FromCoordinator::LeftOut => {
                        host.free();
                        has_joined = true;
                    }
                    FromCoordinator::Say { .. }
                    | FromCoordinator::Regroup { .. }
                    | FromCoordinator::Signal { .. }
                    | FromCoordinator::EndRanks { .. } => {}
                },
                _ => {}
            }
        }
    }

    /// Runs the ranks of an attempt and reports how they ended. Returns what the coordinator sent
    /// meanwhile.
    fn start(
        &mut self,
        host: &mut Host<'_>,
        connection: &Connection,
        start: &Start,
    ) -> Result<Option<FromCoordinator>, LaunchError> {
        let job = Job::new(
            host.options,
            start.master_addr.clone(),
            start.master_port,
            JobToken::secret(&start.token),
            start.launch.clone(),
        )
        .with_cause(start.cause.clone());
        self.started = Some((start.launch.clone(), start.attempt));
        let Attempt {
            mut outcome,
            message,
            error,
        } = host.attempt(start.node_rank, start.nnodes, start.attempt, &job)?;
        let lines = outcome.ends.iter_mut().flat_map(|end| &mut end.last_words);
        lines.for_each(shorten);
        let report = FromAgent::Ended {
            attempt: start.attempt,
            outcome,
            not_started: error.map(|error| error.to_string()),
        };
        // A coordinator that is lost sees the connection end; the reader says so here.
        let _ = connection.send(&report);
        Ok(message)
    }
}

/// Waits before the next try to connect.
///
/// # Errors
/// A signal asked this launcher to stop.
fn pause(host: &Host<'_>) -> Result<(), LaunchError> {
    match host.next(RETRY) {
        Some(Event::Signal(signal)) => Err(LaunchError::Stopped { signal }),
        _ => Ok(()),
    }
}

/// Cuts a line that is too long to be sent to all hosts.
fn shorten(line: &mut String) {
    const LONGEST: usize = 1000;
    if let Some((end, _)) = line.char_indices().nth(LONGEST) {
        line.truncate(end);
        line.push_str(" ...");
    }
}

/// Starts the thread that prints what the coordinator says, and turns its other messages into events.
/// Of the signs of life only the first one is passed on.
fn listen(
    connection: &Arc<Connection>,
    events: Sender<Event>,
    say: impl Fn(&str) + Send + 'static,
) -> io::Result<()> {
    let mut reader = connection.reader(false)?;
    let work = move || {
        let mut is_first = true;
        loop {
            let message = reader.read::<FromCoordinator>();
            let is_lost = message.is_err();
            let message = match message {
                Ok(FromCoordinator::Say { text }) => {
                    say(&text);
                    Ok(FromCoordinator::Beat)
                }
                other => other,
            };
            let message = message.unwrap_or_else(|error| FromCoordinator::Lost {
                why: describe(&error),
            });
            let is_left_out = matches!(message, FromCoordinator::Beat) && !is_first;
            is_first = false;
            if !is_left_out && events.send(Event::Coordinator(message)).is_err() || is_lost {
                return;
            }
        }
    };
    thread::Builder::new()
        .name("coordinator".into())
        .spawn(work)
        .map(drop)
}

/// Starts the thread that gives signs of life as long as the connection is used.
fn beat(connection: &Arc<Connection>) -> io::Result<()> {
    let connection = Arc::downgrade(connection);
    let work = move || {
        while let Some(connection) = connection.upgrade() {
            if connection.send(&FromAgent::Beat).is_err() {
                return;
            }
            drop(connection);
            thread::sleep(BEAT);
        }
    };
    thread::Builder::new()
        .name("beat".into())
        .spawn(work)
        .map(drop)
}
