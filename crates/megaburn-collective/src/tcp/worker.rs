//! The rendezvous on all ranks but 0: the rank introduces itself to rank 0, learns the addresses of
//! the others, and connects to each.

use std::{
    net::{IpAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use subtle::ConstantTimeEq;

use super::{
    ConnectOptions, RankEnv, build,
    coordinator::OTHERS_COME,
    ended::Ended,
    introductions::{Introduction, Introductions},
    socket::{self, Pending, TICK, Until, rendezvous},
    wire::{ControlMessage, Frame, Hello, StartFailure, Table, VERSION, read_frame, write_frame},
};
use crate::{clock, error::CollectiveError, host_name};

/// A rank that does not send an expected message within this time is stopped.
const SHORT: Duration = Duration::from_secs(5);
/// Rank 0 reports every second; if it is silent for this long, it is stopped. The limit is not
/// shorter because rank 0 may be slow.
const SILENT: Duration = Duration::from_secs(5);
/// The other ranks give up this much later than rank 0, so that its reason reaches them.
const AFTER_RANK_0: Duration = Duration::from_secs(2);

/// The connections to all other ranks.
pub(super) fn join(options: &ConnectOptions) -> Result<Vec<Option<TcpStream>>, CollectiveError> {
    let env = &options.env;
    let at = |why: String| {
        rendezvous(format!(
            "rank {} of {} at {}: {why}",
            env.rank,
            env.world_size,
            env.master()
        ))
    };
    let ended = |ended: Ended| match ended {
        Ended::Because(why) => at(why),
        failed => failed.into(),
    };
    let (master, listener, table) = introduce(options, None).map_err(ended)?;
    let deadline = clock::now() + options.meshing() + AFTER_RANK_0;
    let guest = Worker {
        env,
        deadline,
        master,
        listener,
        nonce: table.nonce,
    };
    let meshed = guest.mesh(&table);
    if let Err((why, tell)) = &meshed
        && *tell
    {
        // Rank 0 forwards this to all ranks.
        let why = format!("rank {}: {why}", env.rank);
        let until = Until::new(&guest.master, clock::now() + SHORT);
        let _ = write_frame(until, &ControlMessage::Refused { why }, 0, None);
    }
    let mut streams = meshed.map_err(|(why, _)| at(why))?;
    write_frame(
        Until::new(&guest.master, deadline),
        &ControlMessage::Ready,
        0,
        None,
    )
    .map_err(|(_, error)| at(format!("rank 0 disconnected: {error}")))?;
    match read_frame(Until::new(&guest.master, deadline)) {
        Ok(Some(Frame {
            word: ControlMessage::Go,
            ..
        })) => {}
        other => return Err(at(refusal(other))),
    }
    streams[0] = Some(guest.master);
    Ok(streams)
}

/// Reports to rank 0, which notifies all others, that this rank cannot start.
pub(super) fn tell_failure(options: &ConnectOptions, why: StartFailure) {
    // If rank 0 never arrives there is no rank to notify.
    let _ = introduce(options, Some(why));
}

/// Connects to rank 0 and waits for its table, or reports why this rank cannot start.
fn introduce(
    options: &ConnectOptions,
    failure: Option<StartFailure>,
) -> Result<(TcpStream, TcpListener, Table), Ended> {
    let env = &options.env;
    let begin = clock::now();
    let end = begin + options.rendezvous_timeout;
    let silence = options.group.timeout.max(SILENT);
    // A rank 0 on the same host was started together with this rank.
    let reach = if env.is_with_rank_0() {
        end.min(begin + silence)
    } else {
        end
    };
    let mut missing = None;
    loop {
        let master = socket::dial(&env.master_addr, env.master_port, reach)
            .map_err(|error| format!("rank 0 cannot be reached in time: {error}"))?;
        let listener = socket::listen(env.master_addr_for_peers(), 0).map_err(|e| e.to_string())?;
        let port = listener
            .local_addr()
            .map_err(|error| error.to_string())?
            .port();
        let hello = Hello {
            version: VERSION,
            token: env.job_token.clone(),
            build: build::name().into(),
            rank: env.rank,
            world_size: env.world_size,
            seed: options.group.seed,
            port,
            host: host_name(),
            on_host: env.is_local_world_known.then_some(env.local_world_size),
            failure: failure.clone(),
        };
        let until = || end.min(clock::now() + silence);
        let said = write_frame(
            Until::new(&master, until()),
            &ControlMessage::Hello(hello),
            0,
            None,
        );
        while said.is_ok() {
            let until = until();
            match read_frame(Until::new(&master, until)) {
                Ok(Some(Frame {
                    word: ControlMessage::Table(table),
                    ..
                })) => {
                    return Ok((master, listener, table));
                }
                Ok(Some(Frame {
                    word: ControlMessage::Waiting,
                    ..
                })) => {}
                Ok(Some(Frame {
                    word: ControlMessage::Missing { ranks },
                    ..
                })) => missing = Some(ranks),
                Ok(Some(Frame {
                    word: ControlMessage::Refused { why },
                    ..
                })) => return Err(why.into()),
                Ok(Some(Frame {
                    word: ControlMessage::CannotStart(failure),
                    ..
                })) => {
                    if env.is_with_rank_0() {
                        outlast(&master, end.min(clock::now() + OTHERS_COME));
                    }
                    return Err(Ended::CannotStart(failure));
                }
                Ok(Some(_)) => return Err("rank 0 sent an unexpected message".to_string().into()),
                Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                    return Err(format!("what listens there is not rank 0: {error}").into());
                }
                Err(_) if clock::now() >= until && until < end => {
                    let seconds = silence.as_secs_f64();
                    return Err(format!(
                        "rank 0 has been silent for {seconds:.0} s: it is stopped or hangs"
                    )
                    .into());
                }
                // This may be an earlier run's rank 0 that has just ended.
                Ok(None) | Err(_) => break,
            }
        }
        if clock::now() + TICK >= reach {
            let why = match missing {
                Some(missing) => format!("ranks {missing:?} did not connect in time"),
                None => "rank 0 did not answer in time".to_string(),
            };
            return Err(why.into());
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Waits until rank 0 has notified all ranks and leaves. It shares its launcher with this rank, and
/// the launcher would end rank 0 as soon as this rank ends.
fn outlast(master: &TcpStream, until: Instant) {
    while let Ok(Some(_)) = read_frame(Until::new(master, until)) {}
}

/// A rank that has received the table.
#[derive(Debug)]
struct Worker<'a> {
    env: &'a RankEnv,
    deadline: Instant,
    master: TcpStream,
    listener: TcpListener,
    nonce: u64,
}

impl Worker<'_> {
    /// Connects to the lower ranks and accepts the connections of the higher ones. The `bool` of an
    /// error says whether rank 0 still has to be notified.
    fn mesh(&self, table: &Table) -> Result<Vec<Option<TcpStream>>, (String, bool)> {
        let mut streams: Vec<Option<TcpStream>> = table.peers.iter().map(|_| None).collect();
        for (to, &peer) in table.peers.iter().enumerate().take(self.env.rank).skip(1) {
            streams[to] = Some(self.call(to, peer).map_err(|why| (why, true))?);
        }
        let mut introductions = Introductions::new();
        loop {
            let missing: Vec<_> = (self.env.rank + 1..streams.len())
                .filter(|&i| streams[i].is_none())
                .collect();
            if missing.is_empty() {
                return Ok(streams);
            }
            introductions
                .accept(&self.listener)
                .map_err(|why| (why, true))?;
            while let Some(Introduction { stream, from, said }) = introductions.next() {
                match self.identify(&said) {
                    Some(rank) if missing.contains(&rank) => streams[rank] = Some(stream),
                    _ => tracing::warn!(
                        "rank {}: refused an unknown connection from {from}",
                        self.env.rank
                    ),
                }
            }
            // From here on, rank 0 sends a message only if the rendezvous failed.
            if socket::pending(&self.master) != Pending::Nothing {
                let said = read_frame(Until::new(&self.master, clock::now() + SHORT));
                return Err((refusal(said), false));
            }
            if clock::now() >= self.deadline {
                return Err((
                    format!("ranks {missing:?} did not connect to it in time"),
                    true,
                ));
            }
            thread::sleep(TICK);
        }
    }

    fn call(&self, to: usize, (host, port): (Option<IpAddr>, u16)) -> Result<TcpStream, String> {
        let host = match host {
            Some(host) => host,
            None => self
                .master
                .peer_addr()
                .map_err(|error| error.to_string())?
                .ip(),
        };
        let failed = |why: String| format!("cannot connect to rank {to} at {host} {port}: {why}");
        let stream = socket::dial(&host.to_string(), port, self.deadline).map_err(failed)?;
        let word = ControlMessage::Peer {
            nonce: self.nonce,
            from: self.env.rank,
            to,
        };
        write_frame(Until::new(&stream, self.deadline), &word, 0, None)
            .map_err(|(_, error)| failed(error.to_string()))?;
        Ok(stream)
    }

    /// Identifies the calling rank; `None` for a stranger.
    fn identify(&self, said: &Result<ControlMessage, String>) -> Option<usize> {
        let Ok(ControlMessage::Peer { nonce, from, to }) = said else {
            return None;
        };
        let is_ours: bool = nonce.ct_eq(&self.nonce).into();
        (is_ours && *to == self.env.rank).then_some(*from)
    }
}

fn refusal(said: std::io::Result<Option<Frame>>) -> String {
    match said {
        Ok(Some(Frame {
            word: ControlMessage::Refused { why },
            ..
        })) => why,
        Ok(_) => "rank 0 left the rendezvous".to_string(),
        Err(error) => format!("rank 0 left the rendezvous: {error}"),
    }
}
