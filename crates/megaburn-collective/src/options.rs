use std::time::Duration;

use crate::busy::Phase;

/// Options that all groups of a run share.
#[derive(Clone, Copy, Debug)]
pub struct GroupOptions {
    /// The run's seed, from which parameters, dropout and data order are drawn.
    pub seed: u64,
    /// How long a collective waits for a peer before it fails. It may take up to a second longer
    /// while it asks which rank that peer waits for, and as little as half of it when another
    /// rank's wait times out.
    pub timeout: Duration,
    /// How long a rank may make no progress in long work while others wait for it in a collective.
    pub phases: PhaseLimits,
}

impl Default for GroupOptions {
    /// Seed 0 and ten minutes, as in Megatron-LM.
    fn default() -> Self {
        let timeout = Duration::from_secs(600);
        let phases = PhaseLimits::default();
        Self {
            seed: 0,
            timeout,
            phases,
        }
    }
}

/// How long a rank may make no progress in each phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseLimits {
    /// The limit of [`Phase::Start`].
    pub start: Duration,
    /// The limit of [`Phase::Save`].
    pub save: Duration,
    /// The limit of [`Phase::Load`].
    pub load: Duration,
    /// The limit of [`Phase::Data`].
    pub data: Duration,
    /// The limit of [`Phase::Evaluate`].
    pub evaluate: Duration,
}

impl PhaseLimits {
    /// The limit of `phase`.
    pub fn of(&self, phase: Phase) -> Duration {
        match phase {
            Phase::Start => self.start,
            Phase::Save => self.save,
            Phase::Load => self.load,
            Phase::Data => self.data,
            Phase::Evaluate => self.evaluate,
        }
    }
}

impl Default for PhaseLimits {
    /// Ten minutes for each phase.
    fn default() -> Self {
        let ten_minutes = Duration::from_secs(600);
        Self {
            start: ten_minutes,
            save: ten_minutes,
            load: ten_minutes,
            data: ten_minutes,
            evaluate: ten_minutes,
        }
    }
}
