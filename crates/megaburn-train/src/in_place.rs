//! Restarts in place: a rank that only lost a peer leaves its groups and trains again in the same
//! process, with its device, its compiled kernels and its data.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::{prelude::Device, tensor::Tensor};
use megaburn_collective::{CollectiveError, RankEnv};
use megaburn_launch::{Launched, RestartInPlace, WaitReason};
use megaburn_mesh::Layout;

use crate::{
    error::TrainError,
    exit::Exit,
    failure,
    stop::{StopReason, Stops},
    train_loop::Ended,
};

/// A rank that may meet the others again.
#[derive(Debug)]
pub(crate) struct InPlace(Option<RestartInPlace>);

impl InPlace {
    /// Enrolls this rank, if its launcher restarts ranks in place and `is_possible`. `stops` learns
    /// what the launcher asks the ranks.
    pub(crate) fn enroll(env: Option<&RankEnv>, is_possible: bool, stops: &mut Stops) -> Self {
        let launched = env.filter(|_| is_possible);
        let launcher = launched.and_then(|_| RestartInPlace::enroll());
        if let Some(launcher) = &launcher {
            stops.set_requests(launcher.requests());
        }
        Self(launcher)
    }

    /// Calls `run`, and calls it again when the launcher restarts this rank in place. The second
    /// argument of `run` says whether this is such a restart.
    ///
    /// # Errors
    /// The error of the last call.
    pub(crate) fn run(
        self,
        first: Option<RankEnv>,
        device: &Device,
        stops: &Stops,
        mut run: impl FnMut(Option<RankEnv>, bool) -> Result<Ended, TrainError>,
    ) -> Result<Ended, TrainError> {
        let (Some(mut launcher), Some(mut env)) = (self.0, first.clone()) else {
            return run(first, false);
        };
        let mut is_restart = false;
        loop {
            let ended = run(Some(env.clone()), is_restart);
            let reason = match &ended {
                Err(error) if has_lost_peer(error) => {
                    tracing::warn!("rank {} waits to restart in place: {error}", env.rank);
                    WaitReason::LostPeer {
                        after_step: stops.steps(),
                        hangs: error.collective().is_some_and(CollectiveError::is_hang),
                    }
                }
                Ok(Ended::Stopped(StopReason::Regroup)) => WaitReason::Regroup,
                _ => return ended,
            };
            // From now on a signal ends the process; one that came before asked the run to stop.
            stops.end_training();
            if stops.is_signalled() {
                return ended;
            }
            if let Err(failed) = check(device) {
                tracing::error!("rank {} cannot restart in place: {failed}", env.rank);
                return ended.and(Err(failed));
            }
            env = match launcher.wait(&env, reason) {
                Some(env) => env,
                None => return ended,
            };
            is_restart = true;
        }
    }
}

/// Checks that a run also fits on the other numbers of ranks with which its launcher may restart it.
///
/// # Errors
/// The error of `layout_on` for the first such number on which it does not.
pub(crate) fn check_other_sizes(
    env: Option<&RankEnv>,
    layout_on: impl Fn(usize) -> Result<Layout, TrainError>,
) -> Result<(), TrainError> {
    let launched = env.and_then(|_| Launched::from_env());
    let sizes = launched.map_or(Vec::new(), |launched| launched.world_sizes);
    fits_all(&sizes, layout_on)
}

fn fits_all(
    sizes: &[usize],
    layout_on: impl Fn(usize) -> Result<Layout, TrainError>,
) -> Result<(), TrainError> {
    sizes.iter().try_for_each(|&ranks| {
        let refuse = |why| TrainError::NotOnFewerRanks {
            ranks,
            why: Box::new(why),
        };
        layout_on(ranks).map(drop).map_err(refuse)
    })
}

/// Whether a rank ended only because another one did, or did not answer.
fn has_lost_peer(error: &TrainError) -> bool {
    let first = match error.collective() {
        Some(CollectiveError::Unusable { first, .. }) => Some(&**first),
        other => other,
    };
    let is_lost = matches!(
        first,
        Some(
            CollectiveError::Timeout { .. }
                | CollectiveError::Stalled { .. }
                | CollectiveError::PeerLost { .. }
                | CollectiveError::Aborted { .. }
        )
    );
    is_lost && error.exit() == Exit::PeerLost
}

/// Computes a number on the device, which fails if the device does not work any more.
fn check(device: &Device) -> Result<(), TrainError> {
    let compute = || {
        let one = Tensor::<1>::from_data([1.0f32], device);
        failure::read(one.clone() + one)
    };
    match catch_unwind(AssertUnwindSafe(compute)) {
        Ok(Ok(2.0)) => Ok(()),
        Ok(Ok(found)) => Err(TrainError::Device {
            why: format!("it computed 1 + 1 = {found}"),
        }),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(TrainError::Device {
            why: "it does not compute any more".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use megaburn_collective::{GroupOptions, run_threads};

    use super::*;

    #[test]
    fn a_rank_that_lost_a_peer_may_restart_and_one_that_failed_itself_may_not() {
        let ranks = run_threads(2, GroupOptions::default(), |world| {
            if world.rank() == 0 {
                return Err(TrainError::Set { text: "abc".into() });
            }
            // The first call fails, and the second one because of the first.
            let lost = [(); 2].map(|()| TrainError::from(world.barrier().unwrap_err()));
            Ok(lost.map(|error| has_lost_peer(&error)))
        });
        let own = TrainError::Set { text: "abc".into() };
        assert!(!has_lost_peer(&own));
        assert_eq!(ranks[1].as_ref().unwrap(), &[true; 2]);
    }

    #[test]
    fn a_run_must_fit_on_each_number_of_ranks() {
        let layout_on = |ranks| match ranks {
            2.. => Ok("dp2".parse().unwrap()),
            _ => Err(TrainError::Set { text: "abc".into() }),
        };
        fits_all(&[4, 2], layout_on).unwrap();
        let refused = fits_all(&[4, 2, 1], layout_on).unwrap_err();
        assert!(matches!(
            refused,
            TrainError::NotOnFewerRanks { ranks: 1, .. }
        ));
        assert_eq!(refused.exit(), Exit::BadInput);
    }

    #[test]
    fn a_device_that_computes_is_found_to_work() {
        check(&Device::flex()).unwrap();
    }
}
