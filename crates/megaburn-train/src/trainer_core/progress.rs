//! How far a run is.

use serde::{Deserialize, Serialize};

/// The progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Number of optimizer steps done, including skipped ones.
    pub step: u64,
    /// Number of training samples read.
    pub consumed_samples: u64,
    /// Number of these steps that were skipped, because their gradient overflowed or exceeded the
    /// threshold.
    #[serde(default)]
    pub skipped_steps: u64,
    /// Number of samples of the skipped steps, for which schedules do not advance.
    #[serde(default)]
    pub skipped_samples: u64,
    /// Tokens of all these steps that count in the loss. `None` if the run began with a checkpoint
    /// that does not record them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consumed_tokens: Option<u64>,
}

impl Progress {
    /// The progress of a run that continues with the weights of this one, after the samples of
    /// `reached`: the steps in between are skipped.
    pub(crate) fn skipping_to(self, reached: Self) -> Self {
        let steps = reached.step - self.step;
        let samples = reached.consumed_samples - self.consumed_samples;
        Self {
            skipped_steps: self.skipped_steps + steps,
            skipped_samples: self.skipped_samples + samples,
            ..reached
        }
    }

    /// Advances by a step over `samples` samples, of whose tokens `tokens` count in the loss.
    pub(crate) fn advance(&mut self, samples: u64, tokens: u64, is_update: bool) {
        let before = if self.step == 0 {
            Some(0)
        } else {
            self.consumed_tokens
        };
        self.consumed_tokens = before.map(|before| before + tokens);
        self.step += 1;
        self.consumed_samples += samples;
        if !is_update {
            self.skipped_steps += 1;
            self.skipped_samples += samples;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_after_a_checkpoint_that_is_reloaded_are_skipped() {
        let mut run = Progress::default();
        run.advance(8, 100, false);
        run.advance(8, 100, true);
        let saved = run;
        for is_update in [true, false, true] {
            run.advance(8, 100, is_update);
        }
        let on = saved.skipping_to(run);
        assert_eq!((on.step, on.consumed_samples), (5, 40));
        assert_eq!((on.skipped_steps, on.skipped_samples), (4, 32));
        assert_eq!(on.consumed_tokens, Some(500));
        // The updates are those of the checkpoint.
        assert_eq!(on.step - on.skipped_steps, saved.step - saved.skipped_steps);
    }

    #[test]
    fn tokens_are_counted_from_the_first_step_or_not_at_all() {
        let mut new = Progress::default();
        new.advance(8, 1000, true);
        new.advance(8, 24, false);
        let counts = (new.step, new.consumed_samples, new.skipped_samples);
        assert_eq!((counts, new.consumed_tokens), ((2, 16, 8), Some(1024)));
        let old = r#"{"step":3,"consumed_samples":24}"#;
        let mut old: Progress = serde_json::from_str(old).unwrap();
        old.advance(8, 1000, true);
        assert_eq!((old.step, old.consumed_tokens), (4, None));
    }
}
