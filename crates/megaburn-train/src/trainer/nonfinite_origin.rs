//! The search for the origin of a step that is not finite.

use std::panic::{AssertUnwindSafe, catch_unwind};

use megaburn_collective::objects;
use megaburn_parallel::lazy_params;

use crate::{
    diagnosis::{Diagnosis, NonFiniteOrigin},
    error::TrainError,
    failure::diagnose,
    ranks::panic_text,
    trainer::{Trainer, passes::ReduceScope},
};

impl Trainer {
    /// Recomputes the gradients of the next step, and examines them before they are reduced over
    /// data-parallel ranks, after which they would be equal on all of them. A successful step costs
    /// nothing extra, whereas Megatron-LM checks each bucket in each step
    /// (`--check-for-nan-in-loss-and-grad`). A failure that does not occur a second time is not
    /// found.
    ///
    /// During this, every rank holds its own unreduced sum of all gradients, even if ZeRO shards
    /// gradients. Returns `None` if every gradient is finite this time.
    ///
    /// # Collective
    /// All ranks; a forward and backward pass, and one parameter name.
    fn non_finite_origin(&mut self) -> Result<Option<NonFiniteOrigin>, TrainError> {
        self.forward_backward(ReduceScope::Local)?;
        self.sharding.check()?;
        self.sharding.release();
        let model = self
            .model
            .as_ref()
            .expect("the model is absent only during an update");
        let order = lazy_params(model).into_iter().map(|param| param.path);
        let bad = self.grads.find_non_finite()?;
        let place = |path: &String| place(path, self.model_config.layers);
        let mine = order
            .filter(|path| bad.contains(path.as_str()))
            .max_by_key(place);
        let world = &self.groups.world;
        let all = objects::gather(world, &mine)?.into_iter().enumerate();
        let (ranks, params): (Vec<_>, Vec<String>) =
            all.filter_map(|(rank, param)| Some((rank, param?))).unzip();
        let latest = |first: String, next: String| {
            if place(&next) > place(&first) {
                next
            } else {
                first
            }
        };
        let non_finite_origin = params
            .into_iter()
            .reduce(latest)
            .map(|param| NonFiniteOrigin { ranks, param });
        Ok(objects::broadcast(world, &non_finite_origin)?)
    }

    /// Adds the diagnosis to the error of a non-finite step; other errors are returned unchanged.
    /// The error stays the same if the diagnosis fails, which needs more memory than a step.
    ///
    /// # Collective
    /// All ranks, with the same error.
    pub(crate) fn diagnosed(&mut self, mut error: TrainError) -> TrainError {
        let diagnosis = match &mut error {
            TrainError::NonFinite { diagnosis, .. } => diagnosis,
            TrainError::TooManySkippedSteps {
                loss,
                grad_norm,
                diagnosis,
                ..
            } if !(loss.is_finite() && grad_norm.is_finite()) => diagnosis,
            _ => return error,
        };
        *diagnosis = match catch_unwind(AssertUnwindSafe(|| self.non_finite_origin())) {
            Ok(Ok(Some(non_finite_origin))) => Diagnosis::NonFiniteOrigin(non_finite_origin),
            Ok(Ok(None)) => Diagnosis::Finite,
            Ok(Err(error)) => self.failed(&error.to_string()),
            Err(panic) => self.failed(panic_text(&*panic).unwrap_or("a panic")),
        };
        error
    }

    fn failed(&self, why: &str) -> Diagnosis {
        let why = diagnose(why, &self.device).map_or(why.to_string(), |error| error.to_string());
        Diagnosis::Failed(why)
    }
}

/// Orders parameters by their place in a model of `layers` layers: before the layers, in a layer,
/// in the final norm, in a multi-token-prediction block, or at the end.
fn place(path: &str, layers: usize) -> usize {
    let mut names = path.split('.');
    let norm = usize::MAX / 2;
    match (names.next(), names.next()) {
        (Some("blocks"), Some(index)) => match index.parse::<usize>() {
            Ok(index) if index < layers => index + 1,
            Ok(index) => norm + index,
            Err(_) => 0,
        },
        (Some("embedding" | "positions" | "token_types" | "embedding_norm"), _) => 0,
        (Some("encoder_bias" | "decoder_bias"), _) => 0,
        (Some("norm"), _) => norm,
        _ => usize::MAX,
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use megaburn_parallel::read_params;
    use rstest::rstest;

    use crate::{
        error::TrainError,
        exit::Exit,
        trainer::testing::{poison, trainers},
    };

    #[rstest]
    // A non-finite loss makes all gradients non-finite; ranks 2 and 3 exchange activations.
    #[case("dp3", 2, "norm.gamma", "`norm.gamma`, on rank 2);")]
    #[case(
        "tp2-dp2",
        3,
        "blocks.1.mlp.down.weight",
        "`norm.gamma`, on ranks 2, 3);"
    )]
    #[case(
        "pp2-dp2",
        3,
        "blocks.1.mlp.down.weight",
        "`norm.gamma`, on ranks 1, 3);"
    )]
    #[case("cp2", 1, "norm.gamma", "`norm.gamma`, on ranks 0, 1);")]
    #[case("pp2", 0, "blocks.0.mlp.down.weight", "`norm.gamma`, on ranks 0, 1);")]
    fn the_ranks_whose_gradients_are_not_finite_are_named(
        #[case] layout: &str,
        #[case] rank: usize,
        #[case] param: &str,
        #[case] text: &str,
        #[values("parallel.zero=0", "parallel.zero=1", "parallel.zero=2")] zero: &str,
    ) {
        assert_named(layout, rank, param, text, zero);
    }

    #[rstest]
    fn a_block_that_predicts_further_tokens_is_named(#[values("tp1", "pp2")] layout: &str) {
        let errors = trainers(&["model.mtp_layers=1"], layout, |mut trainer| {
            if trainer.plan().get("blocks.2.mtp.hnorm.gamma").is_some() {
                poison(&mut trainer, "blocks.2.mtp.hnorm.gamma", f32::NAN);
            }
            Ok(trainer.step().unwrap_err().to_string())
        });
        for error in errors {
            assert!(
                error.contains("in `blocks.2.mtp.norm.gamma`"),
                "{layout}: {error}"
            );
        }
    }

    /// With ZeRO-3, no rank holds a full matrix, and every rank holds the norms.
    #[test]
    fn they_are_named_where_parameters_are_shared_out() {
        assert_named(
            "dp3",
            2,
            "norm.gamma",
            "`norm.gamma`, on rank 2);",
            "parallel.zero=3",
        );
        trainers(&["parallel.zero=3"], "dp3", |trainer| {
            for (path, data) in read_params(trainer.model()) {
                let is_nan = data.iter::<f32>().all(f32::is_nan);
                assert_eq!(is_nan, data.shape().len() == 2, "{path}");
            }
            Ok(())
        });
    }

    /// If one rank cannot recompute the step, all ranks end, with the same exit code.
    #[test]
    fn a_diagnosis_that_fails_leaves_the_error_that_it_is() {
        let errors = trainers(&[], "dp2", |mut trainer| {
            poison(&mut trainer, "norm.gamma", f32::NAN);
            let error = trainer.try_step().unwrap_err();
            if trainer.groups.world.rank() == 1 {
                trainer.groups.world.abort("it has no memory for that");
            }
            Ok(trainer.diagnosed(error))
        });
        for error in errors {
            let text = error.to_string();
            assert!(
                text.contains("could not be recomputed to find the origin: "),
                "{text}"
            );
            assert!(matches!(error, TrainError::NonFinite { step: 1, .. }));
            assert_eq!(error.exit(), Exit::NonFinite);
        }
    }

    fn assert_named(layout: &str, rank: usize, param: &str, text: &str, zero: &str) {
        let errors = trainers(&[zero], layout, |mut trainer| {
            trainer.step()?;
            if trainer.groups.world.rank() == rank {
                poison(&mut trainer, param, f32::NAN);
            }
            let before = read_params(trainer.model());
            let error = trainer.step().unwrap_err();
            let bits = |params: Vec<(String, TensorData)>| -> Vec<Vec<u8>> {
                params
                    .into_iter()
                    .map(|(_, data)| data.as_bytes().to_vec())
                    .collect()
            };
            assert!(
                bits(before) == bits(read_params(trainer.model())),
                "a weight has changed"
            );
            assert_eq!(trainer.progress().step, 1);
            Ok(error.to_string())
        });
        for error in errors {
            assert!(error.contains(text), "{layout}: {error}");
        }
    }
}
