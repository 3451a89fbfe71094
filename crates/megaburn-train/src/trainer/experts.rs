//! What a step learns of its experts, and does for them behind it.

use burn::tensor::TensorData;
use megaburn_collective::ReduceOp;
use megaburn_mesh::ShardPlan;
use megaburn_parallel::LoadCounts;

use crate::{TrainError, metrics::ExpertMetrics, trainer::Trainer};

/// The parameters that are experts'.
pub(crate) fn experts(plan: &ShardPlan) -> impl Iterator<Item = String> {
    let experts = plan.iter().filter(|(_, spec)| spec.is_expert());
    experts.map(|(path, _)| path.to_string())
}

impl Trainer {
    /// What the routers have seen of a step over `tokens` tokens; if it was an update, their biases move on, and
    /// the next step balances by what went where. None of a model without experts.
    ///
    /// Source: Wang et al. (2024), <https://arxiv.org/abs/2408.15664>; Megatron-LM
    /// `megatron/core/distributed/finalize_model_grads.py`, `_update_router_expert_bias`.
    ///
    /// # Collective
    /// All ranks; a few numbers an expert.
    pub(super) fn balance_experts(
        &mut self,
        tokens: f64,
        is_update: bool,
    ) -> Result<Option<ExpertMetrics>, TrainError> {
        let Some(experts) = self.model_config.experts.clone() else { return Ok(None) };
        let loads = self.loads(experts.num)?;
        let mut metrics = ExpertMetrics::default();
        for load in loads.iter().flatten() {
            metrics.add(load, experts.top_k, tokens);
        }
        if !is_update {
            return Ok(Some(metrics));
        }
        let rate = self.config.moe.bias_update_rate as f32;
        let model = self.model.as_mut().expect("the model is only away during an update");
        let before: Vec<_> = model.routers().map(|(layer, of)| (layer, of.biases())).collect();
        let moved = |layer: usize| {
            let biases = before.iter().find(|(of, _)| *of == layer).and_then(|(_, of)| of.clone());
            let tokens = &loads[layer].as_ref().expect("the layer has experts").tokens;
            let sum: u64 = tokens.iter().sum();
            let step = |(bias, &own): (f32, &u64)| {
                let (own, mean) = (u128::from(own) * tokens.len() as u128, u128::from(sum));
                bias + rate * (f32::from(i8::from(mean > own)) - f32::from(i8::from(own > mean)))
            };
            biases.unwrap_or_default().into_iter().zip(tokens).map(step).collect()
        };
        if experts.bias && rate != 0.0 {
            model.set_expert_biases(moved);
        }
        self.last_load = loads.iter().map(|load| Some(parts(load.as_ref()?))).collect();
        self.tell_last_load();
        Ok(Some(metrics))
    }

    /// Tells the routers what went where in the step before.
    pub(super) fn tell_last_load(&self) {
        for (layer, router) in self.unsettled().routers() {
            router.load().set_last(self.last_load[layer].clone());
        }
    }

    /// What all ranks saw of each layer of the whole model that has `num` experts.
    fn loads(&self, num: usize) -> Result<Vec<Option<LoadCounts>>, TrainError> {
        let layers = self.model_config.layers;
        let width = 2 * num + LOSSES;
        let mut all = vec![0.0; layers * width];
        for (layer, router) in self.unsettled().routers() {
            let counts = router.load().take().map_err(|why| TrainError::Device { why })?;
            let own = &mut all[layer * width..][..width];
            let tokens = counts.tokens.iter().map(|&tokens| tokens as f64);
            own.iter_mut().zip(tokens).for_each(|(sum, tokens)| *sum = tokens);
            let probabilities = own[num..].iter_mut().zip(&counts.probabilities);
            probabilities.for_each(|(sum, probability)| *sum = *probability);
            let LoadCounts { dropped, aux_loss, seq_aux_loss, z_loss, .. } = counts;
            own[2 * num..].copy_from_slice(&[dropped as f64, aux_loss, seq_aux_loss, z_loss]);
        }
        let len = all.len();
        let all = self.groups.world.all_reduce(TensorData::new(all, [len]), ReduceOp::Sum)?;
        let all: Vec<f64> = all.try_to_vec().expect("f64 went in");
        let of_layer = |layer: usize| {
            self.model_config.layer_experts(layer)?;
            let own = &all[layer * width..][..width];
            Some(LoadCounts {
                tokens: own[..num].iter().map(|&tokens| tokens as u64).collect(),
                probabilities: own[num..2 * num].to_vec(),
                dropped: own[2 * num] as u64,
                aux_loss: own[2 * num + 1],
                seq_aux_loss: own[2 * num + 2],
                z_loss: own[2 * num + 3],
            })
        };
        Ok((0..layers).map(of_layer).collect())
    }
}

/// Numbers of a layer beside those of each expert.
const LOSSES: usize = 4;

/// The part of the tokens that each expert got.
fn parts(load: &LoadCounts) -> Vec<f64> {
    let sum = load.tokens.iter().sum::<u64>().max(1) as f64;
    load.tokens.iter().map(|&tokens| tokens as f64 / sum).collect()
}
