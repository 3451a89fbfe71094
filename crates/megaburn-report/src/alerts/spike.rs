//! Notices spikes of the loss.

use crate::loss_window::LossWindow;

/// The losses of the last steps, and whether a spike has been noticed.
#[derive(Debug)]
pub(super) struct Spikes {
    factor: f64,
    losses: LossWindow,
    /// Whether the last loss was a spike. Those that follow it are the same one.
    is_in_spike: bool,
}

impl Spikes {
    /// A loss is a spike if it is more than `factor` times the mean of the steps before.
    pub(super) fn new(factor: f64) -> Self {
        Self {
            factor,
            losses: LossWindow::default(),
            is_in_spike: false,
        }
    }

    /// Adds the loss of a step. Returns the mean of the steps before if a spike begins with it.
    pub(super) fn check(&mut self, loss: f64) -> Option<f64> {
        if !loss.is_finite() {
            return None;
        }
        let mean = self.losses.mean();
        let bound = self.losses.bound(self.factor);
        let is_spike = bound.is_some_and(|bound| loss > bound);
        let begins = is_spike && !self.is_in_spike;
        self.is_in_spike = is_spike;
        self.losses.add(loss);
        mean.filter(|_| begins)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spike_is_noticed_once_after_sixteen_steps() {
        let mut spikes = Spikes::new(1.5);
        assert_eq!(spikes.check(100.0), None, "there is nothing before it");
        for _ in 0..15 {
            assert_eq!(spikes.check(4.0), None);
        }
        assert_eq!(spikes.check(4.0), None);
        assert_eq!(spikes.check(6.0), None, "it is exactly the bound");
        let mean = (14.0 * 4.0 + 4.0 + 6.0) / 16.0;
        assert_eq!(spikes.check(20.0), Some(mean));
        assert_eq!(spikes.check(30.0), None, "the same spike");
        assert_eq!(spikes.check(f64::NAN), None);
        assert_eq!(spikes.check(4.0), None);
        assert!(spikes.check(40.0).is_some(), "another one");
    }
}
