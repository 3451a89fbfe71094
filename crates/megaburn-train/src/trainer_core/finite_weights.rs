//! Ensures that only finite weights are saved.

use burn::module::Module;
use megaburn_collective::objects;

use crate::{error::TrainError, trainer_core::TrainerCore};

impl<M: Module> TrainerCore<M> {
    /// Checks on the devices that all weights are finite. A step with a non-finite gradient changes
    /// nothing, but an update with a finite gradient can still overflow, and a checkpoint of the
    /// result would replace a good one.
    ///
    /// # Errors
    /// A parameter is not finite (the same error on every rank), or a device cannot be read.
    /// # Collective
    /// All ranks; one parameter name.
    pub(crate) fn check_finite(&self) -> Result<(), TrainError> {
        let bad = self.device_error(self.optimizer.find_non_finite(self.model()))?;
        let world = &self.groups.world;
        let all: Vec<Option<String>> = objects::gather(world, &bad.into_iter().next())?;
        let name = |(rank, param): (usize, Option<String>)| Some((rank, param?));
        let first = all.into_iter().enumerate().find_map(name);
        match objects::broadcast(world, &first)? {
            None => Ok(()),
            Some((rank, param)) => {
                let step = self.progress.step;
                Err(TrainError::NonFiniteWeights { step, param, rank })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::{
        exit::Exit,
        trainer::testing::{poison, trainers},
    };

    #[rstest]
    fn weights_that_are_not_finite_are_not_saved(
        #[values("tp1", "tp2-dp2", "pp2")] layout: &str,
        #[values("parallel.zero=0", "parallel.zero=1")] zero: &str,
        #[values(f32::INFINITY, f32::NAN)] value: f32,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = format!("run.dir={}", dir.path().display());
        let errors = trainers(&[zero, &run_dir], layout, |mut trainer| {
            trainer.save()?;
            let rank = trainer.core.groups.world.size() - 1;
            if trainer.core.groups.world.rank() == rank {
                poison(&mut trainer, "norm.gamma", value);
            }
            let error = trainer.save().unwrap_err();
            assert_eq!(error.exit(), Exit::NonFinite);
            Ok((rank, error.to_string()))
        });
        for (rank, error) in errors {
            let start = format!("after step 0 `norm.gamma` is not finite on rank {rank}: ");
            assert!(error.starts_with(&start), "{error}");
        }
    }

    /// Masters are saved, and with ZeRO-3 shards of parameters, so both must be checked.
    #[rstest]
    fn an_update_that_overflows_is_not_saved(
        #[values("train.dtype=f32", "train.dtype=bf16")] dtype: &str,
        #[values("parallel.zero=0", "parallel.zero=1", "parallel.zero=3")] zero: &str,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = format!("run.dir={}", dir.path().display());
        for (lr, is_good) in [("optimizer.lr=0.001", true), ("optimizer.lr=1e39", false)] {
            trainers(
                &[zero, dtype, &run_dir, lr, "optimizer.min_lr=0"],
                "dp2",
                |mut trainer| {
                    trainer.step()?;
                    assert_eq!(trainer.save().is_ok(), is_good, "{dtype}, {zero}");
                    Ok(())
                },
            );
        }
    }
}
