//! A rank's end of the connection to its launcher.

use std::{
    env, io,
    io::BufReader,
    os::{fd::AsFd, unix::net::UnixStream},
};

use megaburn_collective::{JobToken, RankEnv};

use super::{
    VARIABLE,
    wire::{FromRank, Restart, receive, send},
};
use crate::launched::{LaterStart, Launched};

/// The permission of the launcher to meet the other ranks again in this process.
///
/// ```no_run
/// use megaburn_collective::{CollectiveError, ConnectOptions, RankEnv, connect};
/// use megaburn_launch::RestartInPlace;
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
///     let next = launcher.as_mut().and_then(|launcher| launcher.wait(&env, 0));
///     env = next.ok_or(error)?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RestartInPlace(BufReader<UnixStream>);

impl RestartInPlace {
    /// Says to the launcher that this rank waits for a restart if it loses a peer. `None` if there is
    /// no launcher, or if it does not restart ranks in place.
    pub fn enroll() -> Option<Self> {
        env::var_os(VARIABLE)?;
        let stream: UnixStream = io::stdin().as_fd().try_clone_to_owned().ok()?.into();
        // Standard input is another file where a program between launcher and rank replaced it.
        send(&stream, &FromRank::Enrolled).ok()?;
        Some(Self(BufReader::new(stream)))
    }

    /// Waits until the launcher says how the ranks meet again, for a rank that was `env` until now and
    /// lost a peer after `step` steps. Its groups must be closed. `None` if there is no restart: the
    /// process must then end, with
    /// [`EXIT_PEER_FAILED`](crate::EXIT_PEER_FAILED).
    ///
    /// From then on [`Launched::from_env`] describes the new attempt.
    pub fn wait(&mut self, env: &RankEnv, step: u64) -> Option<RankEnv> {
        send(self.0.get_ref(), &FromRank::Waits { step }).ok()?;
        let restart: Restart = receive(&mut self.0).ok()??;
        Launched::set_later(LaterStart {
            attempt: restart.attempt,
            cause: restart.cause,
        });
        let token = restart.token.map(JobToken::secret);
        let token = token.unwrap_or_else(|| env.job_token.clone());
        let next = env.clone();
        Some(next.in_attempt(restart.master_addr, restart.master_port, token))
    }
}
