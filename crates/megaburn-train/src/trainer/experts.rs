//! The routing statistics of a step, and the update of the expert biases after it.

use burn::tensor::TensorData;
use megaburn_collective::ReduceOp;
use megaburn_parallel::{LoadCounts, QUANTILE_BINS, quantile_biases};
use megaburn_report::metrics::ExpertMetrics;

use crate::{
    config::{BiasUpdate, MoeTrainingConfig},
    error::TrainError,
    trainer::Trainer,
};

/// Numbers of a layer in addition to those of each expert: dropped assignments and three losses.
const LOSSES: usize = 4;

impl Trainer {
    /// Collects the routers' statistics of a step over `tokens` tokens. If the step was an update,
    /// also moves the expert biases and stores the token counts for the global load-balancing loss
    /// of the next step. Returns `None` for a model without experts.
    ///
    /// Source: Wang et al. (2024), <https://arxiv.org/abs/2408.15664>; Megatron-LM
    /// `megatron/core/distributed/finalize_model_grads.py`, `_update_router_expert_bias`.
    ///
    /// # Collective
    /// All ranks; a few numbers per expert, and with `moe.bias_update = "quantile"` another
    /// thousand per expert.
    pub(super) fn balance_experts(
        &mut self,
        tokens: f64,
        is_update: bool,
    ) -> Result<Option<ExpertMetrics>, TrainError> {
        let Some(experts) = self.model_config.experts.clone() else {
            return Ok(None);
        };
        let loads = self.loads(experts.num)?;
        let mut metrics = ExpertMetrics::default();
        for load in loads.iter().flatten() {
            metrics.add(load, experts.top_k, tokens);
        }
        if !is_update {
            return Ok(Some(metrics));
        }
        if experts.bias {
            let MoeTrainingConfig {
                bias_update,
                bias_update_rate,
                ..
            } = self.core.config.moe;
            let moved = |own: &[f32], load: &LoadCounts| match bias_update {
                BiasUpdate::Sign => moved_by_sign(own, &load.tokens, bias_update_rate as f32),
                BiasUpdate::Quantile => quantile_biases(&load.quantile_counts, own, experts.top_k),
            };
            let model = self
                .core
                .model
                .as_mut()
                .expect("the model is absent only during an update");
            model.move_expert_biases(|layer, own| {
                moved(own, loads[layer].as_ref().expect("an MoE layer has a load"))
            });
        }
        self.last_load = loads
            .iter()
            .map(|load| Some(parts(load.as_ref()?)))
            .collect();
        self.log_last_load();
        Ok(Some(metrics))
    }

    /// Discards the routers' statistics of a step that ended in an error.
    pub(super) fn reset_loads(&self) -> Result<(), TrainError> {
        for (_, router) in self.model_in_flight().routers() {
            router
                .load()
                .take()
                .map_err(|why| TrainError::Device { why })?;
        }
        Ok(())
    }

    /// Passes the token counts of the previous step to the routers.
    pub(super) fn log_last_load(&self) {
        for (layer, router) in self.model_in_flight().routers() {
            router.load().set_last(self.last_load[layer].clone());
        }
    }

    /// The statistics of each layer over all ranks, for the full model, which has `num` experts per
    /// layer.
    fn loads(&self, num: usize) -> Result<Vec<Option<LoadCounts>>, TrainError> {
        let layers = self.model_config.num_blocks();
        let width = 2 * num + LOSSES;
        let mut all = vec![0.0; layers * width];
        let mut quantile_counts = vec![Vec::new(); layers];
        for (layer, router) in self.model_in_flight().routers() {
            let counts = router
                .load()
                .take()
                .map_err(|why| TrainError::Device { why })?;
            let own = &mut all[layer * width..][..width];
            let tokens = counts.tokens.iter().map(|&tokens| tokens as f64);
            own.iter_mut()
                .zip(tokens)
                .for_each(|(sum, tokens)| *sum = tokens);
            let probabilities = own[num..].iter_mut().zip(&counts.probabilities);
            probabilities.for_each(|(sum, probability)| *sum = *probability);
            let LoadCounts {
                dropped,
                aux_loss,
                seq_aux_loss,
                z_loss,
                ..
            } = counts;
            own[2 * num..].copy_from_slice(&[dropped as f64, aux_loss, seq_aux_loss, z_loss]);
            quantile_counts[layer] = counts.quantile_counts;
        }
        let len = all.len();
        let all = self
            .core
            .groups
            .world
            .all_reduce(TensorData::new(all, [len]), ReduceOp::Sum)?;
        let all: Vec<f64> = all.try_to_vec().expect("the tensor is f64");
        let of_layer = |(layer, quantile_counts): (usize, Vec<u64>)| {
            if self.model_config.layer_experts(layer).is_none() {
                return Ok(None);
            }
            let own = &all[layer * width..][..width];
            Ok(Some(LoadCounts {
                tokens: own[..num].iter().map(|&tokens| tokens as u64).collect(),
                probabilities: own[num..2 * num].to_vec(),
                dropped: own[2 * num] as u64,
                aux_loss: own[2 * num + 1],
                seq_aux_loss: own[2 * num + 2],
                z_loss: own[2 * num + 3],
                quantile_counts: self.quantile_counts(quantile_counts, num)?,
            }))
        };
        quantile_counts
            .into_iter()
            .enumerate()
            .map(of_layer)
            .collect()
    }

    /// The quantile counts of a layer over all ranks; a rank whose stages lack the layer adds none.
    fn quantile_counts(&self, own: Vec<u64>, num: usize) -> Result<Vec<u64>, TrainError> {
        if self.core.config.moe.bias_update != BiasUpdate::Quantile {
            return Ok(own);
        }
        let mut own: Vec<i64> = own.into_iter().map(|count| count as i64).collect();
        own.resize(num * QUANTILE_BINS, 0);
        let own = TensorData::new(own, [num * QUANTILE_BINS]);
        let all = self.core.groups.world.all_reduce(own, ReduceOp::Sum)?;
        let all: Vec<i64> = all.try_to_vec().expect("the tensor is i64");
        Ok(all.into_iter().map(|count| count as u64).collect())
    }
}

/// The biases after a step with the sign rule: up by `rate` for experts with fewer tokens than the
/// mean, down for those with more.
fn moved_by_sign(biases: &[f32], tokens: &[u64], rate: f32) -> Vec<f32> {
    let sum = u128::from(tokens.iter().sum::<u64>());
    let step = |(bias, &own): (&f32, &u64)| {
        let own = u128::from(own) * tokens.len() as u128;
        bias + rate * (f32::from(sum > own) - f32::from(own > sum))
    };
    biases.iter().zip(tokens).map(step).collect()
}

/// The fraction of the assignments that each expert got.
fn parts(load: &LoadCounts) -> Vec<f64> {
    let sum = load.tokens.iter().sum::<u64>().max(1) as f64;
    load.tokens
        .iter()
        .map(|&tokens| tokens as f64 / sum)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_move_towards_the_mean() {
        let moved = moved_by_sign(&[0.5, 0.0, -0.25, 0.0], &[9, 4, 0, 3], 0.25);
        assert_eq!(moved, [0.25, 0.0, 0.0, 0.25]);
    }
}
