//! Rank 0's side of the rendezvous: gather all ranks, tell each where the others are, and let them
//! go when everybody is connected to everybody.

use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use super::{
    RankEnv,
    socket::{self, Pending, TICK, Until, rendezvous},
    wire::{Frame, Hello, Table, VERSION, Word, read_frame, write_frame},
};
use crate::CollectiveError;

/// Who connects must introduce itself within this time; a stranger may say nothing at all.
const INTRODUCTION: Duration = Duration::from_secs(5);
/// Short words to one rank take no longer unless it is stopped.
const SHORT: Duration = Duration::from_secs(2);

/// A rank that introduced itself.
#[derive(Debug)]
struct Guest {
    stream: TcpStream,
    host: IpAddr,
    port: u16,
}

/// The state of a rendezvous at rank 0.
#[derive(Debug)]
struct Host<'a> {
    env: &'a RankEnv,
    seed: u64,
    deadline: Instant,
    guests: Vec<Option<Guest>>,
    /// Who introduced itself at some time: its own patience may end before rank 0's.
    came: Vec<bool>,
    refusals: Vec<String>,
}

/// The connections to ranks `1..world_size`, all of them ready.
pub(super) fn gather(
    listener: &TcpListener,
    env: &RankEnv,
    seed: u64,
    deadline: Instant,
) -> Result<Vec<Option<TcpStream>>, CollectiveError> {
    let guests = (0..env.world_size).map(|_| None).collect();
    let came = vec![false; env.world_size];
    let mut host = Host { env, seed, deadline, guests, came, refusals: Vec::new() };
    let result = host
        .await_all(listener)
        .and_then(|()| host.hand_out_table())
        .and_then(|()| host.await_ready())
        .and_then(|()| host.tell_all(&Word::Go));
    if let Err(why) = result {
        // Who hears of it fails with the same reason; who does not sees the connection end.
        let _ = host.tell_all(&Word::Refused { why: why.clone() });
        return Err(rendezvous(why));
    }
    Ok(host.guests.into_iter().map(|guest| Some(guest?.stream)).collect())
}

impl Host<'_> {
    fn await_all(&mut self, listener: &TcpListener) -> Result<(), String> {
        let (introduced, introductions) = channel();
        let mut told = self.missing();
        while !told.is_empty() {
            self.accept(listener, &introduced)?;
            self.admit(&introductions)?;
            for guest in &mut self.guests {
                if guest.as_ref().is_some_and(|g| socket::pending(&g.stream) == Pending::Closed) {
                    *guest = None;
                }
            }
            let missing = self.missing();
            if missing != told {
                let ranks = missing.clone();
                // Who left meanwhile is noticed above.
                let _ = self.tell_all(&Word::Missing { ranks });
                told = missing;
            }
            if !told.is_empty() {
                self.check_time()?;
                thread::sleep(TICK);
            }
        }
        Ok(())
    }

    /// Lets everybody who connected introduce itself on a thread, so that a silent stranger holds
    /// up nobody.
    fn accept(
        &self,
        listener: &TcpListener,
        introduced: &Sender<(TcpStream, SocketAddr, Result<Hello, String>)>,
    ) -> Result<(), String> {
        while let Some((stream, from)) =
            socket::accept(listener).map_err(|error| format!("cannot accept: {error}"))?
        {
            let introduced = introduced.clone();
            let until = self.deadline.min(Instant::now() + INTRODUCTION);
            let introduce = move || {
                let hello = match read_frame(Until::new(&stream, until)) {
                    Ok(Some(Frame { word: Word::Hello(hello), .. })) => Ok(hello),
                    Ok(_) => Err("it did not introduce itself".to_string()),
                    Err(error) => Err(error.to_string()),
                };
                // The rendezvous may be over by now.
                let _ = introduced.send((stream, from, hello));
            };
            let spawned = thread::Builder::new().name("introduction".into()).spawn(introduce);
            spawned.map_err(|error| format!("cannot start a thread: {error}"))?;
        }
        Ok(())
    }

    fn admit(
        &mut self,
        introductions: &Receiver<(TcpStream, SocketAddr, Result<Hello, String>)>,
    ) -> Result<(), String> {
        while let Ok((stream, from, hello)) = introductions.try_recv() {
            let refusal = match &hello {
                Err(why) => Some(why.clone()),
                Ok(hello) => self.stranger(hello),
            };
            if let Some(why) = refusal {
                let why = format!("{from} was refused: {why}");
                tracing::warn!("rendezvous at {}: {why}", self.env.master());
                let _ = say(&stream, &Word::Refused { why: why.clone() });
                self.refusals.push(why);
                continue;
            }
            let hello = hello.expect("a failed introduction was refused");
            let mistake = self.mistake(&hello);
            let (host, port) = (from.ip().to_canonical(), hello.port);
            if let Some(why) = mistake {
                let _ = say(&stream, &Word::Refused { why: why.clone() });
                return Err(why);
            }
            self.came[hello.rank] = true;
            self.guests[hello.rank] = Some(Guest { stream, host, port });
        }
        Ok(())
    }

    /// Why a connection does not belong to this run.
    fn stranger(&self, hello: &Hello) -> Option<String> {
        let Hello { version, run_id, .. } = hello;
        if *version != VERSION {
            return Some(format!("it speaks version {version}, rank 0 speaks {VERSION}"));
        }
        let other = run_id != &self.env.run_id;
        other.then(|| format!("it belongs to run {run_id:?}, not to {:?}", self.env.run_id))
    }

    /// Why a rank of this run cannot have been started rightly.
    fn mistake(&self, hello: &Hello) -> Option<String> {
        let Hello { rank, world_size, seed, .. } = hello;
        let own = self.env.world_size;
        if *world_size != own {
            return Some(format!(
                "rank {rank} was started with WORLD_SIZE={world_size}, rank 0 with {own}"
            ));
        }
        if seed != &self.seed {
            return Some(format!("rank {rank} has seed {seed}, rank 0 has {}", self.seed));
        }
        if *rank == 0 || *rank >= own || self.guests[*rank].is_some() {
            return Some(format!("two processes were started with RANK={rank}"));
        }
        None
    }

    fn hand_out_table(&mut self) -> Result<(), String> {
        let nonce = RandomState::new().hash_one(std::process::id());
        let peer = |guest: &Option<Guest>| match guest {
            Some(guest) if guest.host.is_loopback() => (None, guest.port),
            Some(guest) => (Some(guest.host), guest.port),
            None => (None, 0),
        };
        let peers = self.guests.iter().map(peer).collect();
        self.tell_all(&Word::Table(Table { nonce, peers }))
    }

    fn await_ready(&mut self) -> Result<(), String> {
        let mut waiting = self.missing_of(|_| true);
        while !waiting.is_empty() {
            let mut still = Vec::new();
            for &rank in &waiting {
                let guest = self.guests[rank].as_ref().expect("everybody is there");
                match socket::pending(&guest.stream) {
                    Pending::Nothing => still.push(rank),
                    Pending::Closed => return Err(format!("rank {rank} left while connecting")),
                    Pending::Data => match read_frame(Until::new(&guest.stream, self.deadline)) {
                        Ok(Some(Frame { word: Word::Ready, .. })) => {}
                        Ok(Some(Frame { word: Word::Refused { why }, .. })) => return Err(why),
                        Ok(_) => return Err(format!("rank {rank} left while connecting")),
                        Err(error) => return Err(format!("rank {rank}: {error}")),
                    },
                }
            }
            waiting = still;
            if !waiting.is_empty() {
                if Instant::now() >= self.deadline {
                    return Err(format!("ranks {waiting:?} did not connect to the others in time"));
                }
                thread::sleep(TICK);
            }
        }
        Ok(())
    }

    fn missing(&self) -> Vec<usize> {
        self.missing_of(Option::is_none)
    }

    fn missing_of(&self, which: impl Fn(&Option<Guest>) -> bool) -> Vec<usize> {
        (1..self.guests.len()).filter(|&rank| which(&self.guests[rank])).collect()
    }

    fn check_time(&self) -> Result<(), String> {
        if Instant::now() < self.deadline {
            return Ok(());
        }
        let (left, never): (Vec<usize>, Vec<usize>) =
            self.missing().into_iter().partition(|&rank| self.came[rank]);
        let (world_size, master) = (self.env.world_size, self.env.master());
        let mut why = match never.is_empty() {
            true => format!("ranks {left:?} of {world_size} left rank 0 at {master}"),
            false => {
                format!("ranks {never:?} of {world_size} did not reach rank 0 at {master} in time")
            }
        };
        if !(never.is_empty() || left.is_empty()) {
            why += &format!("; ranks {left:?} came and left again");
        }
        for refusal in &self.refusals {
            why += &format!("; {refusal}");
        }
        Err(why)
    }

    fn tell_all(&self, word: &Word) -> Result<(), String> {
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

fn say(stream: &TcpStream, word: &Word) -> Result<(), String> {
    let until = Until::new(stream, Instant::now() + SHORT);
    write_frame(until, word, 0, None).map_err(|(_, error)| error.to_string())
}
