//! The rendezvous on all ranks but 0: the rank introduces itself to rank 0, learns its place in the
//! tree of ranks, connects to the rank above it, and waits for those below it.

use std::{
    net::{TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{
    ConnectOptions,
    acceptor::Acceptor,
    build,
    coordinator::OTHERS_COME,
    ended::Ended,
    endpoint::{Endpoint, Pass},
    socket::{self, Pending, TICK, Until, rendezvous},
    transport::TcpTransport,
    wire::{ControlMessage, Frame, Hello, Place, StartFailure, VERSION, read_frame, write_frame},
};
use crate::{clock, error::CollectiveError, host_name, tree};

/// A rank that does not send an expected message within this time is stopped.
const SHORT: Duration = Duration::from_secs(5);
/// Rank 0 reports every second; if it is silent for this long, it is stopped. The limit is not
/// shorter because rank 0 may be slow.
const SILENT: Duration = Duration::from_secs(5);
/// The other ranks give up this much later than rank 0, so that its reason reaches them.
const AFTER_RANK_0: Duration = Duration::from_secs(2);

/// Joins the run.
pub(super) fn join(options: &ConnectOptions) -> Result<TcpTransport, CollectiveError> {
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
    let (master, listener, place) = introduce(options, None).map_err(ended)?;
    let home = master.peer_addr().map_err(|error| at(error.to_string()))?;
    let pass = Pass {
        token: env.job_token.clone(),
        nonce: place.nonce,
    };
    let world = (env.rank, env.world_size);
    let endpoint = Endpoint::new(world, options.group, pass, home.ip());
    let acceptor = Acceptor::start(listener, &endpoint)
        .map_err(|error| at(format!("cannot start a thread: {error}")))?;
    let transport = TcpTransport::new(endpoint.clone(), Some(acceptor));
    let guest = Worker {
        deadline: clock::now() + options.meshing() + AFTER_RANK_0,
        master,
        endpoint,
    };
    match guest.take_place(&place) {
        Ok(()) => Ok(transport),
        Err(why) => {
            transport.give_up("the run did not start");
            Err(at(why))
        }
    }
}

/// Reports to rank 0, which notifies all others, that this rank cannot start.
pub(super) fn tell_failure(options: &ConnectOptions, why: StartFailure) {
    // If rank 0 never arrives there is no rank to notify.
    let _ = introduce(options, Some(why));
}

/// Connects to rank 0 and waits for a place in the tree, or reports why this rank cannot start.
fn introduce(
    options: &ConnectOptions,
    failure: Option<StartFailure>,
) -> Result<(TcpStream, TcpListener, Place), Ended> {
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
        let master = socket::dial(&env.master_addr, env.master_port, reach, &|_| false)
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
                    word: ControlMessage::Place(place),
                    ..
                })) => {
                    return Ok((master, listener, place));
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

/// A rank that has received its place.
struct Worker {
    deadline: Instant,
    master: TcpStream,
    endpoint: Arc<Endpoint>,
}

/// Why a rank does not take its place.
enum NoPlace {
    /// This rank's own reason, of which rank 0 has to be notified.
    Own(String),
    /// The reason that rank 0 sent.
    Received(String),
}

impl Worker {
    /// Connects to the ranks next to this one and waits until the run starts.
    fn take_place(&self, place: &Place) -> Result<(), String> {
        match self.connect(place) {
            Ok(()) => {}
            Err(NoPlace::Received(why)) => return Err(why),
            Err(NoPlace::Own(why)) => {
                // Rank 0 forwards this to all ranks.
                let rank = self.endpoint.rank;
                let why_for_all = format!("rank {rank}: {why}");
                let until = Until::new(&self.master, clock::now() + SHORT);
                let word = ControlMessage::Refused { why: why_for_all };
                let _ = write_frame(until, &word, 0, None);
                return Err(why);
            }
        }
        let until = || Until::new(&self.master, self.deadline);
        write_frame(until(), &ControlMessage::Ready, 0, None)
            .map_err(|(_, error)| format!("rank 0 disconnected: {error}"))?;
        match read_frame(until()) {
            Ok(Some(Frame {
                word: ControlMessage::Go,
                ..
            })) => Ok(()),
            other => Err(refusal(other)),
        }
    }

    /// Connects to the rank above this one, waits for those below it and for the addresses of all,
    /// and passes these on.
    fn connect(&self, place: &Place) -> Result<(), NoPlace> {
        let endpoint = &self.endpoint;
        // From here on, rank 0 sends a message only if the rendezvous failed.
        let is_over = || socket::pending(&self.master) != Pending::Nothing;
        let heard = || {
            let said = read_frame(Until::new(&self.master, clock::now() + SHORT));
            NoPlace::Received(refusal(said))
        };
        if let Some(above) = tree::parent(endpoint.rank) {
            let called = endpoint.line_to(above, place.above, self.deadline, &is_over);
            called.map_err(|why| match is_over() {
                true => heard(),
                false => NoPlace::Own(why),
            })?;
        }
        loop {
            let passed_on = endpoint.pass_on_addresses().map_err(NoPlace::Own)?;
            let Some(missing) = passed_on else {
                return Ok(());
            };
            if is_over() {
                return Err(heard());
            }
            if clock::now() >= self.deadline {
                let why = if missing.is_empty() {
                    "the addresses of the others did not arrive in time".into()
                } else {
                    format!("ranks {missing:?} did not connect to it in time")
                };
                return Err(NoPlace::Own(why));
            }
            thread::sleep(TICK);
        }
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
