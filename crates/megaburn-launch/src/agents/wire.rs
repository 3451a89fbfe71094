//! The messages between the launchers of several hosts: one line of JSON each.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpStream},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use megaburn_collective::JobToken;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{launched::Launch, options::LaunchOptions, topology::Topology, verdict::Outcome};

/// How often each side gives a sign of life.
pub(super) const BEAT: Duration = Duration::from_secs(1);
/// A side that gives no sign of life for so long is lost.
pub(super) const SILENCE: Duration = Duration::from_secs(7);
/// The longest message: the last lines of all ranks of a host fit.
const LONGEST: u64 = 1 << 24;
/// The longest first message, from a program that has not shown the token of the job yet.
const LONGEST_FIRST: u64 = 1 << 12;

/// What the launchers of a job must have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Shape {
    nnodes: usize,
    nproc: usize,
    min_nnodes: Option<usize>,
    nnodes_per_replica: Option<usize>,
    spares: usize,
    restarts: usize,
    restart_window_seconds: Option<u64>,
}

impl Shape {
    pub(super) fn of(options: &LaunchOptions) -> Self {
        Self {
            nnodes: options.nnodes,
            nproc: options.nproc,
            min_nnodes: options.min_nnodes,
            nnodes_per_replica: Some(options.nnodes_per_replica).filter(|hosts| *hosts > 1),
            spares: options.spares,
            restarts: options.restart.restarts,
            restart_window_seconds: options.restart.window.map(|window| window.as_secs()),
        }
    }

    /// The first option in which another launcher differs.
    pub(super) fn difference(&self, other: &Self) -> Option<String> {
        let numbers = |shape: &Self| {
            [
                ("--nnodes", Some(shape.nnodes as u64)),
                ("--nproc", Some(shape.nproc as u64)),
                ("--min-nnodes", shape.min_nnodes.map(|nnodes| nnodes as u64)),
                (
                    "--nnodes-per-replica",
                    shape.nnodes_per_replica.map(|hosts| hosts as u64),
                ),
                ("--spares", Some(shape.spares as u64)),
                ("--restarts", Some(shape.restarts as u64)),
                ("--restart-window", shape.restart_window_seconds),
            ]
        };
        let differs = numbers(self).into_iter().zip(numbers(other));
        let text = |value: Option<u64>| value.map_or("unset".into(), |value| value.to_string());
        differs.into_iter().find_map(|((name, own), (_, others))| {
            (own != others).then(|| {
                let (own, others) = (text(own), text(others));
                format!(
                    "`{name}` is {others} there and {own} on node 0; give all launchers the same"
                )
            })
        })
    }
}

/// The first message of a launcher.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) token: JobToken,
    /// The number that the launcher was started with.
    pub(super) node: usize,
    /// The name of its host, for messages.
    pub(super) host: String,
    pub(super) shape: Shape,
    /// Random digits of this launcher, by which a connection replaces its last one.
    pub(super) launcher: String,
    /// Where its host is in the network.
    #[serde(default)]
    pub(super) topology: Topology,
    /// The launch and the last attempt of which it has started ranks.
    pub(super) started: Option<(Launch, usize)>,
}

/// What launchers send to the coordinator.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromAgent {
    /// A sign of life.
    Beat,
    /// The ranks of an attempt have ended, or could not be started.
    Ended {
        attempt: usize,
        outcome: Outcome,
        not_started: Option<String>,
    },
    /// A signal asked this launcher to stop while it had no ranks.
    Leaves { signal: i32 },
}

/// What the coordinator sends to launchers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromCoordinator {
    /// A sign of life.
    Beat,
    /// Start the ranks.
    Start(Start),
    /// End the ranks of this attempt, because others have failed.
    EndRanks {
        /// The attempt.
        attempt: usize,
    },
    /// Ask the ranks of this attempt to save and to wait, because there are more hosts now.
    Regroup {
        /// The attempt.
        attempt: usize,
    },
    /// The ranks of an attempt run without this host.
    LeftOut,
    /// A signal that a launcher received while its ranks were started.
    Signal {
        /// Its number.
        signal: i32,
    },
    /// Print this.
    Say {
        /// The text.
        text: String,
    },
    /// The job has ended.
    End {
        /// How the ranks of all hosts ended.
        outcome: Outcome,
    },
    /// This launcher cannot take part.
    Refused {
        /// Why.
        why: String,
    },
    /// Not sent: the connection is lost.
    Lost {
        /// Why.
        why: String,
    },
}

/// How to start the ranks of a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(super) attempt: usize,
    /// The host's number in this attempt.
    pub(super) node_rank: usize,
    /// The number of hosts in this attempt.
    pub(super) nnodes: usize,
    pub(super) master_addr: String,
    pub(super) master_port: u16,
    pub(super) token: String,
    pub(super) launch: Launch,
    /// Why the attempt before this one ended.
    #[serde(default)]
    pub(super) cause: Option<String>,
}

/// A connection that several threads write to.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    writing: Mutex<()>,
}

impl Connection {
    /// Sets the time limits of a stream.
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        Ok(Self {
            stream,
            writing: Mutex::new(()),
        })
    }

    /// Sends a message.
    pub(super) fn send(&self, message: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        (&self.stream).write_all(&line)
    }

    /// The messages from the other side, whose first one is short if it `is_stranger`.
    pub(super) fn reader(&self, is_stranger: bool) -> io::Result<Reader> {
        Ok(Reader {
            stream: BufReader::new(self.stream.try_clone()?),
            is_stranger,
        })
    }
}

impl Drop for Connection {
    /// Ends the reader's clone too.
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Reads messages from a connection.
pub(super) struct Reader {
    stream: BufReader<TcpStream>,
    is_stranger: bool,
}

impl Reader {
    /// The next message.
    ///
    /// # Errors
    /// The connection has ended or is silent, or this is no message.
    pub(super) fn read<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let mut line = Vec::new();
        let most = if self.is_stranger {
            LONGEST_FIRST
        } else {
            LONGEST
        };
        self.is_stranger = false;
        let mut part = self.stream.by_ref().take(most);
        part.read_until(b'\n', &mut line)?;
        if line.last() != Some(&b'\n') {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&line)?)
    }
}

/// Whether a connection is lost because its other side gave no sign of life.
pub(super) fn is_silence(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

/// Why a connection is lost, in plain words.
pub(super) fn describe(error: &io::Error) -> String {
    match error.kind() {
        _ if is_silence(error) => format!("no sign of life for {} s", SILENCE.as_secs()),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            "it closed the connection".into()
        }
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::restart::RestartPolicy;

    #[test]
    fn launchers_with_other_options_are_named() {
        let options = LaunchOptions::new(4, vec!["true".into()]).with_nodes(2, 0);
        let own = Shape::of(&options);
        assert_eq!(own.difference(&own), None);
        let window = Some(Duration::from_secs(60));
        let policy = RestartPolicy::new(0).with_window(window);
        for (other, name) in [
            (options.clone().with_nodes(3, 1), "`--nnodes` is 3"),
            (options.clone().with_spares(1), "`--spares` is 1"),
            (options.with_restart(policy), "`--restart-window` is 60"),
        ] {
            let difference = own.difference(&Shape::of(&other)).unwrap();
            assert!(difference.contains(name), "{difference}");
        }
    }
}
