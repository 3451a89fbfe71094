//! What a rank knows of the launch that it belongs to.

use std::{
    io,
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use megaburn_collective::JobToken;
use serde::{Deserialize, Serialize};

/// A launch: all attempts that one `megaburn launch` makes, on all hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Random digits.
    pub id: String,
    /// When it began, in seconds since 1970.
    started: u64,
}

/// The start of this process's ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The launch.
    pub launch: Launch,
    /// Its number in the launch: 0, or that of the restart.
    pub attempt: usize,
    /// Why the attempt before it ended, such as `rank 3 was killed by SIGKILL`.
    pub cause: Option<String>,
    /// The numbers of ranks with which the job may train, now or after a restart, largest first.
    pub world_sizes: Vec<usize>,
}

/// The attempt that this process takes part in after a restart in place: its environment still
/// describes the attempt that it was started for, and cannot be changed safely.
static LATER: Mutex<Option<LaterStart>> = Mutex::new(None);

/// What differs between the attempts of a process.
#[derive(Clone, Debug)]
pub(crate) struct LaterStart {
    pub(crate) attempt: usize,
    pub(crate) cause: Option<String>,
}

impl Launch {
    /// The environment variable with [`Self::id`].
    pub(crate) const ID: &str = "MEGABURN_LAUNCH_ID";
    /// The environment variable with the time at which the launch began.
    pub(crate) const TIME: &str = "MEGABURN_LAUNCH_TIME";
    /// The environment variable with [`Launched::attempt`], as torchrun names it.
    pub(crate) const ATTEMPT: &str = "TORCHELASTIC_RESTART_COUNT";
    /// The environment variable with [`Launched::cause`].
    pub(crate) const CAUSE: &str = "MEGABURN_RESTART_CAUSE";
    /// The environment variable with [`Launched::world_sizes`].
    pub(crate) const WORLD_SIZES: &str = "MEGABURN_WORLD_SIZES";

    /// A launch that begins now.
    ///
    /// # Errors
    /// The system provides no random numbers.
    pub(crate) fn begin() -> io::Result<Self> {
        let started = SystemTime::now().duration_since(UNIX_EPOCH);
        Ok(Self {
            id: JobToken::draw()?.text().into(),
            started: started.map_or(0, |time| time.as_secs()),
        })
    }

    /// How long ago it began.
    pub fn age(&self) -> Duration {
        let started = UNIX_EPOCH + Duration::from_secs(self.started);
        SystemTime::now()
            .duration_since(started)
            .unwrap_or_default()
    }

    pub(crate) fn variables(&self) -> [(&'static str, String); 2] {
        [
            (Self::ID, self.id.clone()),
            (Self::TIME, self.started.to_string()),
        ]
    }
}

impl Launched {
    /// Reads the variables that `megaburn launch` sets; `None` if another launcher, or none,
    /// started this process. After a [restart in place](crate::RestartInPlace), attempt and cause
    /// describe that restart.
    pub fn from_env() -> Option<Self> {
        let first = Self::from_lookup(|name| std::env::var(name).ok())?;
        let later = LATER.lock().unwrap_or_else(PoisonError::into_inner);
        Some(match later.clone() {
            Some(LaterStart { attempt, cause }) => Self {
                attempt,
                cause,
                ..first
            },
            None => first,
        })
    }

    /// Sets the attempt that this process takes part in from now on.
    pub(crate) fn set_later(later: LaterStart) {
        *LATER.lock().unwrap_or_else(PoisonError::into_inner) = Some(later);
    }

    fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Option<Self> {
        Some(Self {
            launch: Launch {
                id: get(Launch::ID)?,
                started: get(Launch::TIME)?.parse().ok()?,
            },
            attempt: get(Launch::ATTEMPT)?.parse().ok()?,
            cause: get(Launch::CAUSE),
            world_sizes: get(Launch::WORLD_SIZES)
                .iter()
                .flat_map(|text| text.split(','))
                .filter_map(|size| size.parse().ok())
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_reads_what_its_launcher_wrote() {
        let launch = Launch::begin().unwrap();
        assert!(launch.age() < Duration::from_secs(10));
        let mut variables = launch.variables().to_vec();
        variables.push((Launch::ATTEMPT, "3".into()));
        variables.push((Launch::CAUSE, "rank 1 exited with code 1".into()));
        variables.push((Launch::WORLD_SIZES, "8,4".into()));
        let get = |name: &str| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| value.clone())
        };
        let found = Launched::from_lookup(get);
        let expected = Launched {
            launch: launch.clone(),
            attempt: 3,
            cause: Some("rank 1 exited with code 1".into()),
            world_sizes: vec![8, 4],
        };
        assert_eq!(found, Some(expected));
        assert_eq!(Launched::from_lookup(|_| None), None);
    }
}
