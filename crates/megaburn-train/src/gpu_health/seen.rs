//! What a rank reports about its GPU.

use megaburn_doctor::{GpuHealth, HealthEvent};
use serde::{Deserialize, Serialize};

/// What a rank has seen of its GPU since its last report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Seen {
    pub(super) host: String,
    /// The number of the GPU on the host.
    pub(super) gpu: usize,
    /// The newest reading.
    pub(super) last: Option<GpuHealth>,
    pub(super) events: Vec<HealthEvent>,
}
