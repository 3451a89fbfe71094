//! A rank's end of the connection to its launcher.

use std::{
    env,
    io::{self, BufReader},
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    thread,
};

use megaburn_collective::{JobToken, RankEnv};

use super::{
    VARIABLE,
    requests::LauncherRequests,
    wire::{FromRank, Restart, ToRank, WaitReason, receive, send},
};
use crate::launched::{LaterStart, Launched};

/// The permission of the launcher to meet the other ranks again in this process.
///
/// ```no_run
/// use megaburn_collective::{CollectiveError, ConnectOptions, RankEnv, connect};
/// use megaburn_launch::{RestartInPlace, WaitReason};
///
/// fn train(env: RankEnv) -> Result<(), CollectiveError> {
///     let world = connect(&ConnectOptions::new(env))?;
///     // ...
///     Ok(())
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut env = RankEnv::from_env()?.ok_or("start it with `megaburn launch`")?;
/// let mut launcher = RestartInPlace::enroll();
/// while let Err(error) = train(env.clone()) {
///     let reason = WaitReason::LostPeer { after_step: 0, hangs: false };
///     let next = launcher.as_mut().and_then(|launcher| launcher.wait(&env, reason));
///     env = next.ok_or(error)?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RestartInPlace {
    stream: UnixStream,
    restarts: Receiver<Restart>,
    requests: Arc<LauncherRequests>,
}

impl RestartInPlace {
    /// Says to the launcher that this rank waits for a restart if it loses a peer. `None` if there is
    /// no launcher, or if it does not restart ranks in place.
    pub fn enroll() -> Option<Self> {
        env::var_os(VARIABLE)?;
        let stream: UnixStream = io::stdin().as_fd().try_clone_to_owned().ok()?.into();
        // Standard input is another file where a program between launcher and rank replaced it.
        send(&stream, &FromRank::Enrolled).ok()?;
        let mut from = BufReader::new(stream.try_clone().ok()?);
        let (sender, restarts) = channel();
        let requests = Arc::new(LauncherRequests::default());
        let asked = requests.clone();
        let listen = move || {
            while let Ok(Some(message)) = receive(&mut from) {
                match message {
                    ToRank::Regroup => asked.ask_to_regroup(),
                    ToRank::Leave => asked.ask_to_leave(),
                    ToRank::Restart(restart) => {
                        asked.clear();
                        let Ok(()) = sender.send(restart) else { return };
                    }
                }
            }
        };
        let listener = thread::Builder::new().name("launcher-link".into());
        listener.spawn(listen).ok()?;
        Some(Self {
            stream,
            restarts,
            requests,
        })
    }

    /// What the launcher asks while this rank trains.
    pub fn requests(&self) -> Arc<LauncherRequests> {
        self.requests.clone()
    }

    /// Waits until the launcher says how the ranks meet again, for a rank that was `env` until now. Its
    /// groups must be closed. Its number and the number of all ranks may change. `None` if there is no
    /// restart: the process must then end, with [`EXIT_PEER_FAILED`](crate::EXIT_PEER_FAILED) if it
    /// lost a peer.
    ///
    /// From then on [`Launched::from_env`] describes the new attempt.
    pub fn wait(&mut self, env: &RankEnv, reason: WaitReason) -> Option<RankEnv> {
        send(&self.stream, &FromRank::Waits(reason)).ok()?;
        let restart = self.restarts.recv().ok()?;
        Launched::set_later(LaterStart {
            attempt: restart.attempt,
            cause: restart.cause,
        });
        let token = restart.token.map(JobToken::secret);
        let token = token.unwrap_or_else(|| env.job_token.clone());
        let next = env.clone();
        let next = next.in_attempt(restart.master_addr, restart.master_port, token);
        Some(RankEnv {
            rank: restart.rank,
            world_size: restart.world_size,
            ..next
        })
    }
}
