//! The launchers of several hosts, which start the ranks together, and again after a failure.
//!
//! Each launcher is an agent ([`run`]). The one of node 0 also coordinates ([`coordinator`]): it says
//! when to start, collects how the ranks ended, and decides whether and on which hosts they are
//! started again. Both give a sign of life every second. The connections show the token of the job
//! and are not encrypted: use a network whose readers you trust.

mod attempts;
mod coordinator;
mod listener;
mod members;
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
    host::{Attempt, Host},
    job::Job,
    signals::StopRequests,
    supervise::Event,
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
    let agent = Agent {
        addr,
        port,
        token: job.token_of_hosts(),
    };
    loop {
        let connection = agent.connect(host)?;
        let why = match agent.serve(host, &connection)? {
            Served::Ended(outcome) => return Ok(outcome),
            Served::Lost { why } => why,
        };
        host.say(&format!(
            "lost the launcher of node 0 at {agent}: {why}; this one waits up to {} s for it",
            options.host_timeout.as_secs()
        ));
    }
}

/// How the service of a connection ended.
enum Served {
    Ended(Outcome),
    Lost { why: String },
}

/// The launcher of a host as the coordinator sees it.
struct Agent {
    addr: String,
    port: u16,
    token: JobToken,
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

    /// Connects to the coordinator, and tries again until the host's timeout.
    fn connect(&self, host: &Host<'_>) -> Result<Arc<Connection>, LaunchError> {
        let limit = host.options.host_timeout;
        let begin = Instant::now();
        let connection = loop {
            match self.try_connect(host) {
                Ok(connection) => break Arc::new(connection),
                Err(error) if begin.elapsed() > limit => {
                    let seconds = limit.as_secs();
                    return self.fail(format!("no answer for {seconds} s: {error}"));
                }
                Err(_) => {}
            }
            if let Some(Event::Signal(number)) = host.next(RETRY) {
                return self.fail(format!("stopped by signal {number}"));
            }
        };
        listen(&connection, host.sender())
            .and_then(|()| beat(&connection))
            .map_err(LaunchError::Watch)?;
        Ok(connection)
    }

    fn try_connect(&self, host: &Host<'_>) -> io::Result<Connection> {
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
    fn serve(&self, host: &mut Host<'_>, connection: &Connection) -> Result<Served, LaunchError> {
        let mut waiting = None;
        let mut requests = StopRequests::default();
        loop {
            let event = match waiting.take() {
                Some(message) => Some(Event::Coordinator(message)),
                None => host.next(SILENCE),
            };
            match event {
                Some(Event::Signal(signal)) if requests.is_requested() => {
                    if requests.is_repeated(Instant::now()) {
                        return self.fail(format!("stopped by signal {signal}"));
                    }
                }
                Some(Event::Signal(signal)) => {
                    let _ = requests.is_repeated(Instant::now());
                    // The coordinator ends the job; if it is lost, the reader says so.
                    let _ = connection.send(&FromAgent::Leaves { signal });
                }
                Some(Event::Coordinator(message)) => match message {
                    FromCoordinator::Start(start) => {
                        waiting = self.start(host, connection, &start)?;
                    }
                    FromCoordinator::Say { text } => host.say(&text),
                    FromCoordinator::End { outcome } => return Ok(Served::Ended(outcome)),
                    FromCoordinator::Lost { why } => return Ok(Served::Lost { why }),
                    FromCoordinator::Refused { why } => return self.fail(why),
                    FromCoordinator::Beat | FromCoordinator::EndRanks { .. } => {}
                },
                _ => {}
            }
        }
    }

    /// Runs the ranks of an attempt and reports how they ended. Returns what the coordinator sent
    /// meanwhile.
    fn start(
        &self,
        host: &mut Host<'_>,
        connection: &Connection,
        start: &Start,
    ) -> Result<Option<FromCoordinator>, LaunchError> {
        let job = Job::new(
            start.master_addr.clone(),
            start.master_port,
            JobToken::secret(&start.token),
            start.launch.clone(),
        );
        let ended = host.attempt(start.node_rank, start.attempt, &job);
        let (outcome, not_started, message) = match ended {
            Ok(Attempt { outcome, message }) => (outcome, None, message),
            Err(error) => (Outcome::default(), Some(error.to_string()), None),
        };
        let report = FromAgent::Ended {
            attempt: start.attempt,
            outcome,
            not_started,
        };
        // A coordinator that is lost sees the connection end; the reader says so here.
        let _ = connection.send(&report);
        Ok(message)
    }
}

/// Starts the thread that turns the coordinator's messages into events.
fn listen(connection: &Arc<Connection>, events: Sender<Event>) -> io::Result<()> {
    let mut reader = connection.reader()?;
    let work = move || {
        loop {
            let message = reader.read::<FromCoordinator>();
            let is_lost = message.is_err();
            let message = message.unwrap_or_else(|error| FromCoordinator::Lost {
                why: describe(&error),
            });
            let is_beat = matches!(message, FromCoordinator::Beat);
            if !is_beat && events.send(Event::Coordinator(message)).is_err() || is_lost {
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
