//! Which candidates of a search fit, with which settings. Nothing is simulated.

use std::{collections::HashSet, hash::Hash, sync::Mutex};

use megaburn_mesh::Layout;
use megaburn_pipeline::ScheduleKind;
use megaburn_train::{TrainConfig, TrainError};

use crate::{
    candidates::{Candidate, Recomputed, Settings},
    in_parallel::in_parallel,
    settings_trials::SettingsTrials,
    trial::{Cut, Trials, locked},
};

/// A candidate that fits with these settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Run {
    /// The index of the candidate.
    pub(crate) candidate: usize,
    pub(crate) settings: Settings,
    /// The least time of its step.
    pub(crate) least_ms: f64,
}

impl Run {
    /// The whole configuration.
    pub(crate) fn config(&self, config: &TrainConfig, candidates: &[Candidate]) -> TrainConfig {
        candidates[self.candidate].config(config, self.settings)
    }
}

/// The settings of a candidate, except for its layout.
type SettingsKey = (usize, Option<(ScheduleKind, Option<usize>)>, Settings);

/// Layouts and settings that were found valid.
#[derive(Debug, Default)]
struct Valid {
    layouts: Mutex<HashSet<Layout>>,
    settings: Mutex<HashSet<SettingsKey>>,
}

impl Valid {
    /// Validates a configuration, unless both its layout and its settings are known to be valid:
    /// whether one is does not depend on the other.
    fn check(
        &self,
        config: &TrainConfig,
        candidate: &Candidate,
        settings: Settings,
    ) -> Result<(), TrainError> {
        let key = (candidate.micro_batch, candidate.schedule, settings);
        if knows(&self.layouts, &candidate.layout) && knows(&self.settings, &key) {
            return Ok(());
        }
        config.validate()?;
        locked(&self.layouts).insert(candidate.layout);
        locked(&self.settings).insert(key);
        Ok(())
    }
}

fn knows<T: Eq + Hash>(known: &Mutex<HashSet<T>>, key: &T) -> bool {
    locked(known).contains(key)
}

/// The runs of all candidates that fit, in their order, and why the other candidates do not run.
pub(crate) fn of(
    config: &TrainConfig,
    candidates: &[Candidate],
    trials: &Trials,
) -> (Vec<Run>, Vec<Cut>) {
    let valid = Valid::default();
    let numbered: Vec<_> = candidates.iter().enumerate().collect();
    let all = in_parallel(&numbered, |candidate| {
        of_candidate(config, *candidate, trials, &valid)
    });
    let (mut runs, mut cuts) = (Vec::new(), Vec::new());
    for found in all {
        match found {
            Ok(found) => runs.extend(found),
            Err(cut) => cuts.push(cut),
        }
    }
    (runs, cuts)
}

/// The settings with which a candidate fits: with each stage of ZeRO, and with and without the fused
/// loss, the least recomputation.
fn of_candidate(
    config: &TrainConfig,
    (index, candidate): (usize, &Candidate),
    trials: &Trials,
    valid: &Valid,
) -> Result<Vec<Run>, Cut> {
    let first = Settings {
        zero: candidate.zeros()[0],
        fused_loss: false,
        recomputed: Recomputed::ALL[0],
    };
    let base = candidate.config(config, first);
    valid.check(&base, candidate, first)?;
    let layout = base.layout(None)?;
    let known = trials.known(&base, &layout)?;
    let mut trials = SettingsTrials::new(trials, &base, layout, &known)?;
    let mut config = base.clone();
    let mut runs = Vec::new();
    for &zero in candidate.zeros() {
        'zero: for fused_loss in [false, true] {
            for recomputed in Recomputed::ALL {
                let settings = Settings {
                    zero,
                    fused_loss,
                    recomputed,
                };
                settings.set(&mut config);
                let mut fit = || {
                    valid.check(&config, candidate, settings)?;
                    trials.fit(&config)
                };
                let least_ms = match fit() {
                    Ok(least_ms) => least_ms,
                    Err(Cut::DoesNotFit) => continue,
                    // Other settings do not make the layout possible.
                    Err(Cut::Refused(error)) => match runs.is_empty() {
                        true => return Err(Cut::Refused(error)),
                        false => return Ok(runs),
                    },
                };
                runs.push(Run {
                    candidate: index,
                    settings,
                    least_ms,
                });
                // To recompute more is slower, and so is the fused loss where all logits fit.
                if recomputed == Recomputed::Nothing {
                    break 'zero;
                }
                break;
            }
        }
    }
    match runs.is_empty() {
        true => Err(Cut::DoesNotFit),
        false => Ok(runs),
    }
}
