use super::{socket, wire::StartFailure};
use crate::error::CollectiveError;

/// Why a rendezvous ends without a world.
#[derive(Debug)]
pub(super) enum Ended {
    Because(String),
    CannotStart(StartFailure),
}

impl From<String> for Ended {
    fn from(why: String) -> Self {
        Self::Because(why)
    }
}

impl From<Ended> for CollectiveError {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::Because(why) => socket::rendezvous(why),
            Ended::CannotStart(StartFailure { rank, why, code }) => {
                Self::CannotStart { rank, why, code }
            }
        }
    }
}
