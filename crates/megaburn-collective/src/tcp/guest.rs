//! The side of every other rank: introduce itself to rank 0, learn where the others are, and
//! connect to each.

use std::{
    net::{IpAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use super::{
    RankEnv,
    socket::{self, Pending, TICK, Until, rendezvous},
    wire::{Frame, Hello, Table, VERSION, Word, read_frame, write_frame},
};
use crate::CollectiveError;

/// A word that another rank owes takes no longer unless it is stopped.
const SHORT: Duration = Duration::from_secs(5);

/// The connections to all other ranks.
pub(super) fn join(
    env: &RankEnv,
    seed: u64,
    deadline: Instant,
) -> Result<Vec<Option<TcpStream>>, CollectiveError> {
    let at = |why: String| {
        rendezvous(format!("rank {} of {} at {}: {why}", env.rank, env.world_size, env.master()))
    };
    let (master, listener, table) = introduce(env, seed, deadline).map_err(at)?;
    let guest = Guest { env, deadline, master, listener, nonce: table.nonce };
    let meshed = guest.mesh(&table);
    if let Err((why, tell)) = &meshed
        && *tell
    {
        // Rank 0 hands it on to everybody.
        let why = format!("rank {}: {why}", env.rank);
        let until = Until::new(&guest.master, Instant::now() + SHORT);
        let _ = write_frame(until, &Word::Refused { why }, 0, None);
    }
    let mut streams = meshed.map_err(|(why, _)| at(why))?;
    write_frame(Until::new(&guest.master, deadline), &Word::Ready, 0, None)
        .map_err(|(_, error)| at(format!("rank 0 is gone: {error}")))?;
    match read_frame(Until::new(&guest.master, deadline)) {
        Ok(Some(Frame { word: Word::Go, .. })) => {}
        other => return Err(at(refusal(other))),
    }
    streams[0] = Some(guest.master);
    Ok(streams)
}

/// Connects to rank 0 and waits for its table.
fn introduce(
    env: &RankEnv,
    seed: u64,
    deadline: Instant,
) -> Result<(TcpStream, TcpListener, Table), String> {
    let mut missing = None;
    loop {
        let master = socket::dial(&env.master_addr, env.master_port, deadline)
            .map_err(|error| format!("rank 0 cannot be reached in time: {error}"))?;
        let listener = socket::listen(env.master_addr_for_peers(), 0).map_err(|e| e.to_string())?;
        let port = listener.local_addr().map_err(|error| error.to_string())?.port();
        let (rank, world_size, run_id) = (env.rank, env.world_size, env.run_id.clone());
        let hello = Hello { version: VERSION, run_id, rank, world_size, seed, port };
        let said = write_frame(Until::new(&master, deadline), &Word::Hello(hello), 0, None);
        while said.is_ok() {
            match read_frame(Until::new(&master, deadline)) {
                Ok(Some(Frame { word: Word::Table(table), .. })) => {
                    return Ok((master, listener, table));
                }
                Ok(Some(Frame { word: Word::Missing { ranks }, .. })) => missing = Some(ranks),
                Ok(Some(Frame { word: Word::Refused { why }, .. })) => return Err(why),
                Ok(Some(_)) => return Err("rank 0 spoke out of turn".to_string()),
                Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                    return Err(format!("what listens there is not rank 0: {error}"));
                }
                // Perhaps an earlier run's rank 0 that just went.
                Ok(None) | Err(_) => break,
            }
        }
        if Instant::now() + TICK >= deadline {
            return Err(match missing {
                Some(missing) => format!("ranks {missing:?} did not come in time"),
                None => "rank 0 did not answer in time".to_string(),
            });
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// A rank that knows the table.
#[derive(Debug)]
struct Guest<'a> {
    env: &'a RankEnv,
    deadline: Instant,
    master: TcpStream,
    listener: TcpListener,
    nonce: u64,
}

impl Guest<'_> {
    /// Dials the lower ranks and takes the calls of the higher ones. An error tells whether rank 0
    /// still has to hear of it.
    fn mesh(&self, table: &Table) -> Result<Vec<Option<TcpStream>>, (String, bool)> {
        let mut streams: Vec<Option<TcpStream>> = table.peers.iter().map(|_| None).collect();
        for (to, &peer) in table.peers.iter().enumerate().take(self.env.rank).skip(1) {
            streams[to] = Some(self.call(to, peer).map_err(|why| (why, true))?);
        }
        loop {
            let missing: Vec<_> =
                (self.env.rank + 1..streams.len()).filter(|&i| streams[i].is_none()).collect();
            if missing.is_empty() {
                return Ok(streams);
            }
            let next = socket::accept(&self.listener).map_err(|e| (e.to_string(), true))?;
            if let Some((stream, from)) = next {
                match self.identify(&stream) {
                    Some(rank) if missing.contains(&rank) => streams[rank] = Some(stream),
                    _ => tracing::warn!("rank {}: {from} is a stranger", self.env.rank),
                }
                continue;
            }
            // Rank 0 says nothing now unless the rendezvous failed.
            if socket::pending(&self.master) != Pending::Nothing {
                let said = read_frame(Until::new(&self.master, Instant::now() + SHORT));
                return Err((refusal(said), false));
            }
            if Instant::now() >= self.deadline {
                return Err((format!("ranks {missing:?} did not connect to it in time"), true));
            }
            thread::sleep(TICK);
        }
    }

    fn call(&self, to: usize, (host, port): (Option<IpAddr>, u16)) -> Result<TcpStream, String> {
        let host = match host {
            Some(host) => host,
            None => self.master.peer_addr().map_err(|error| error.to_string())?.ip(),
        };
        let failed = |why: String| format!("cannot connect to rank {to} at {host} {port}: {why}");
        let stream = socket::dial(&host.to_string(), port, self.deadline).map_err(failed)?;
        let word = Word::Peer { nonce: self.nonce, from: self.env.rank, to };
        write_frame(Until::new(&stream, self.deadline), &word, 0, None)
            .map_err(|(_, error)| failed(error.to_string()))?;
        Ok(stream)
    }

    /// Which rank calls; `None` for a stranger.
    fn identify(&self, stream: &TcpStream) -> Option<usize> {
        let until = self.deadline.min(Instant::now() + SHORT);
        match read_frame(Until::new(stream, until)) {
            Ok(Some(Frame { word: Word::Peer { nonce, from, to }, .. }))
                if (nonce, to) == (self.nonce, self.env.rank) =>
            {
                Some(from)
            }
            _ => None,
        }
    }
}

fn refusal(said: std::io::Result<Option<Frame>>) -> String {
    match said {
        Ok(Some(Frame { word: Word::Refused { why }, .. })) => why,
        Ok(_) => "rank 0 left the rendezvous".to_string(),
        Err(error) => format!("rank 0 left the rendezvous: {error}"),
    }
}
