//! What follows a spike of the loss.

use burn::module::Module;
use megaburn_optim::DeviceScalar;

use super::{Outcome, TrainerCore};
use crate::config::OnSpike;

impl<M: Module> TrainerCore<M> {
    /// Makes the update of this step do nothing if its loss is a spike, and `train.on_spike` asks for
    /// it. The device compares, so the host does not wait. `sum` is the sum of `count` losses.
    pub(crate) fn skip_spike(&mut self, sum: &DeviceScalar, count: f64) {
        let train = &self.config.train;
        self.spike_bound = match train.on_spike {
            OnSpike::None => None,
            OnSpike::Skip | OnSpike::Stop | OnSpike::Rollback => {
                self.losses.bound(train.spike_factor)
            }
        };
        if let Some(bound) = self.spike_bound {
            self.grads
                .skip_if_above(sum, (bound * count.max(1.0)) as f32);
        }
    }

    /// Whether the device has found that this sum of `count` losses is a spike.
    pub(super) fn is_spike(&self, sum: f64, count: f64) -> bool {
        let limit = self
            .spike_bound
            .map(|bound| (bound * count.max(1.0)) as f32);
        limit.is_some_and(|limit| sum > f64::from(limit))
    }

    /// Adds the loss of a step that has changed the weights to those that spikes are compared with.
    pub(super) fn add_loss(&mut self, outcome: Outcome) {
        if outcome.is_update && self.config.train.on_spike != OnSpike::None {
            self.losses.add(outcome.loss);
        }
    }
}
