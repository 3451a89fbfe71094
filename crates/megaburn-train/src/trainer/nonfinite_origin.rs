//! The search for the origin of a step that is not finite.

use crate::{
    diagnosis::NonFiniteOrigin,
    error::TrainError,
    trainer::{Trainer, passes::ReduceScope},
    trainer_core::with_diagnosis,
};

impl Trainer {
    /// Recomputes the gradients of the next step, and finds which of them are not finite before they
    /// are reduced. `None` if every gradient is finite this time.
    ///
    /// # Collective
    /// All ranks; a forward and backward pass, and one parameter name.
    fn non_finite_origin(&mut self) -> Result<Option<NonFiniteOrigin>, TrainError> {
        self.forward_backward(ReduceScope::Local)?;
        let layers = self.model_config.layers;
        self.core.non_finite_origin(|path| place(path, layers))
    }

    /// Adds the diagnosis to the error of a non-finite step; other errors are returned unchanged.
    ///
    /// # Collective
    /// All ranks, with the same error.
    pub(super) fn with_origin(&mut self, error: TrainError) -> TrainError {
        let device = self.core.device.clone();
        with_diagnosis(error, &device, || self.non_finite_origin())
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
            let error = trainer.undiagnosed_step().unwrap_err();
            if trainer.core.groups.world.rank() == 1 {
                trainer.core.groups.world.abort("it has no memory for that");
            }
            Ok(trainer.with_origin(error))
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
            if trainer.core.groups.world.rank() == rank {
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
