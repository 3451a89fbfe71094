//! The losses of the last steps, with which a spike is compared.

use std::collections::VecDeque;

/// The losses of the last [`Self::STEPS`] steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossWindow(VecDeque<f64>);

impl LossWindow {
    /// The number of steps whose mean loss a spike is compared with.
    pub const STEPS: usize = 16;

    /// The window after steps with these losses.
    pub fn of(losses: impl IntoIterator<Item = f64>) -> Self {
        let mut window = Self::default();
        losses.into_iter().for_each(|loss| window.add(loss));
        window
    }

    /// Adds the loss of a step; one that is not finite is left out.
    pub fn add(&mut self, loss: f64) {
        if !loss.is_finite() {
            return;
        }
        if self.0.len() == Self::STEPS {
            self.0.pop_front();
        }
        self.0.push_back(loss);
    }

    /// The losses, the oldest first.
    pub fn losses(&self) -> impl Iterator<Item = f64> {
        self.0.iter().copied()
    }

    /// Their mean, once there are [`Self::STEPS`].
    pub fn mean(&self) -> Option<f64> {
        let is_full = self.0.len() == Self::STEPS;
        is_full.then(|| self.0.iter().sum::<f64>() / Self::STEPS as f64)
    }

    /// The loss above which a step is a spike: `factor` times the mean. (If the mean is negative,
    /// the bound is as far above it.)
    pub fn bound(&self, factor: f64) -> Option<f64> {
        let mean = self.mean()?;
        Some(mean + (factor - 1.0) * mean.abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_bound_after_sixteen_finite_losses_and_old_ones_are_forgotten() {
        let mut window = LossWindow::of([100.0]);
        for _ in 0..15 {
            assert_eq!(window.bound(1.5), None);
            window.add(4.0);
            window.add(f64::NAN);
        }
        assert_eq!(window.mean(), Some(10.0));
        window.add(4.0);
        assert_eq!((window.mean(), window.bound(1.5)), (Some(4.0), Some(6.0)));
        assert_eq!(LossWindow::of(window.losses()), window);
        let negative = LossWindow::of([-2.0; 16]);
        assert_eq!(negative.bound(1.5), Some(-1.0));
    }
}
