use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use crate::{error::CollectiveError, recorder::FlightRecorder, transport::Transport};

/// How long a rank that fails by itself waits before it aborts the others. They may have agreed on
/// the failure in their last collective (a non-finite loss, a checkpoint that cannot be written),
/// which some of them are still finishing. They should report that failure, not the loss of this
/// rank.
pub(crate) const FAILURE_GRACE: Duration = Duration::from_millis(100);

/// The state that all groups of one rank share: the transport, the recorder and the first failure.
#[derive(Debug)]
pub(crate) struct RankContext {
    /// Declared first in order to be dropped first: its thread holds references to the others.
    #[cfg(feature = "cuda")]
    pub(crate) device: crate::device::NcclContext,
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) recorder: Arc<FlightRecorder>,
    pub(crate) failure: Arc<OnceLock<CollectiveError>>,
}

impl RankContext {
    pub(crate) fn new(transport: Arc<dyn Transport>) -> Self {
        Self {
            #[cfg(feature = "cuda")]
            device: Default::default(),
            transport,
            recorder: Arc::default(),
            failure: Arc::default(),
        }
    }
}

/// Records a rank's first failure and reports it to the others; returns false if it was not the
/// first.
pub(crate) fn fail(
    rank: usize,
    transport: &dyn Transport,
    failure: &OnceLock<CollectiveError>,
    error: &CollectiveError,
) -> bool {
    if failure.set(error.clone()).is_err() {
        return false;
    }
    // A rank that only received a failure forwards the root cause, not its own echo of it.
    match error {
        CollectiveError::Aborted { by, reason, .. } => {
            transport.abort(*by, reason, error.is_hang());
        }
        first => transport.abort(rank, &first.to_string(), first.is_hang()),
    }
    true
}
