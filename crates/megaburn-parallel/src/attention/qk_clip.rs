//! Clipping of the weights of queries and keys.

use super::{Attention, heads::Heads};

/// Clipping of the weights of queries and keys (QK-Clip of MuonClip): if the largest attention logit
/// of a head exceeds `threshold`, the weights of its queries are scaled by
/// `(threshold / largest)^alpha` and those of its keys by `(threshold / largest)^(1 - alpha)`, after
/// which the same input would give `threshold`. Biases are scaled with the weights.
///
/// Query heads that share a key head are clipped together, by the largest logit among them, as
/// Megatron-LM does. With latents, the rotated features of the keys belong to all heads, so the
/// rotated features of the queries are scaled by the full `threshold / largest` instead.
///
/// Source: Kimi Team, "Kimi K2" (2025), <https://arxiv.org/abs/2507.20534>, algorithm 1;
/// Megatron-LM `megatron/core/transformer/attention.py` and `multi_latent_attention.py`, `clip_qk`,
/// which leave biases as they are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkClip {
    /// The largest attention logit that is not clipped.
    pub threshold: f64,
    /// The share of the scaling that the queries take, between 0 and 1.
    pub alpha: f64,
}

impl QkClip {
    /// The factor of the logits of each group of `group` query heads; 1 for logits that are not
    /// above the threshold, and for those that are not finite.
    fn factors(&self, max_logits: &[f64], group: usize) -> Vec<f64> {
        let factor = |logits: &[f64]| {
            let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if largest > self.threshold && largest.is_finite() {
                self.threshold / largest
            } else {
                1.0
            }
        };
        max_logits.chunks(group).map(factor).collect()
    }
}

impl Attention {
    /// The largest attention logit (after the scale, before soft cap and softmax, without ALiBi) of
    /// each query head of the full layer in the training passes since the last call. It is minus
    /// infinity for a head without one, such as those of other tensor-parallel ranks. `None` if the
    /// layer does not record them. Waits for the device.
    ///
    /// # Errors
    /// The device cannot be read.
    pub fn take_max_logits(&self) -> Result<Option<Vec<f64>>, String> {
        let recorded = self.core.max_logits();
        recorded.map(|max_logits| max_logits.take()).transpose()
    }

    /// The factor of each output feature of this rank's projections, by parameter path within the
    /// layer, that clips queries and keys; empty if none of the heads is clipped. `max_logits` has
    /// the largest logit of each query head of the full layer. Norms of queries or keys undo the
    /// factors, so a layer that has them must not be clipped.
    ///
    /// # Panics
    /// If the layer does not record the largest logits.
    pub fn clip_factors(&self, clip: &QkClip, max_logits: &[f64]) -> Vec<(String, Vec<f32>)> {
        let recorded = self.core.max_logits();
        let first = recorded
            .expect("the layer records its largest logits")
            .first_head();
        let [num_queries, num_keys] = self.core.num_heads();
        let of_queries = |eta: f64| eta.powf(clip.alpha);
        let of_keys = |eta: f64| eta.powf(1.0 - clip.alpha);
        let projections = match &self.heads {
            Heads::Grouped(heads) => {
                let (group, size) = (heads.queries_per_key, heads.head_dim);
                let eta = clip.factors(max_logits, group);
                let queries =
                    (first..first + num_queries).map(|head| of_queries(eta[head / group]));
                let keys = eta[first / group..].iter().take(num_keys);
                let factors = queries.chain(keys.map(|eta| of_keys(*eta)));
                let factors = factors.map(|factor| (factor, size));
                let features = factors.chain([(1.0, num_keys * size)]);
                vec![("qkv", &self.qkv, repeated(features))]
            }
            Heads::Latent(heads) => {
                let eta = clip.factors(max_logits, 1);
                let own = &eta[first..first + num_queries];
                let queries = own
                    .iter()
                    .flat_map(|eta| [(of_queries(*eta), heads.nope), (*eta, heads.rope)]);
                let keys_values = own
                    .iter()
                    .flat_map(|eta| [(of_keys(*eta), heads.nope), (1.0, heads.values)]);
                let queries = repeated(queries);
                vec![
                    ("q_up", &self.q_up, queries.clone()),
                    ("q", &self.q, queries),
                    ("kv_up", &self.kv_up, repeated(keys_values)),
                ]
            }
        };
        let mut found = Vec::new();
        for (field, layer, factors) in projections {
            let Some(layer) = layer else { continue };
            if factors.iter().all(|factor| *factor == 1.0) {
                continue;
            }
            if layer.bias.is_some() {
                found.push((format!("{field}.bias"), factors.clone()));
            }
            found.push((format!("{field}.weight"), factors));
        }
        found
    }
}

/// Repeats each factor as often as its number says.
fn repeated(factors: impl IntoIterator<Item = (f64, usize)>) -> Vec<f32> {
    factors
        .into_iter()
        .flat_map(|(factor, count)| std::iter::repeat_n(factor as f32, count))
        .collect()
}

#[cfg(test)]
mod tests {
    use burn::{
        module::Param,
        tensor::{Device, Distribution, Tensor},
    };
    use megaburn_collective::Group;
    use rstest::rstest;

    use super::*;
    use crate::{
        BatchContext, MultiLatentAttentionConfig, ParallelLinear, PositionTables,
        SelfAttentionConfig,
    };

    const CLIP: QkClip = QkClip {
        threshold: 2.0,
        alpha: 0.25,
    };

    fn grouped(heads: usize, kv_heads: usize) -> Attention {
        let config = SelfAttentionConfig::new(12, heads, kv_heads, 4)
            .with_qkv_bias(true)
            .with_record_max_logits(true);
        config
            .init(&Group::single(0), &Device::flex().autodiff())
            .unwrap()
    }

    #[test]
    fn query_heads_of_a_group_and_their_key_head_are_scaled_together() {
        let layer = grouped(4, 2);
        let found = layer.clip_factors(&CLIP, &[1.0, 8.0, 2.0, -50.0]);
        let factor = 0.25f64;
        let [q, k] = [factor.powf(0.25) as f32, factor.powf(0.75) as f32];
        let expected = [[q; 8], [1.0; 8]].concat();
        let expected = [expected, vec![k; 4], vec![1.0; 4 + 8]].concat();
        let all = ["qkv.bias", "qkv.weight"].map(|path| (path.to_string(), expected.clone()));
        assert_eq!(found, all);
    }

    #[test]
    fn logits_that_are_small_or_not_finite_are_not_clipped() {
        let layer = grouped(3, 3);
        let unclipped = [
            [2.0, -9.0, f64::NEG_INFINITY],
            [f64::INFINITY, f64::NAN, 0.0],
        ];
        for logits in unclipped {
            assert!(layer.clip_factors(&CLIP, &logits).is_empty());
        }
    }

    #[test]
    fn the_rotated_features_of_latents_are_scaled_in_the_queries_alone() {
        let config =
            MultiLatentAttentionConfig::new(12, 2, 6, 2, 4, 3).with_record_max_logits(true);
        let layer = config.init(&Group::single(0), &Device::flex()).unwrap();
        let found = layer.clip_factors(&CLIP, &[1.0, 4.0]);
        let [q, k] = [0.5f64.powf(0.25) as f32, 0.5f64.powf(0.75) as f32];
        let queries = [vec![1.0; 6], vec![q; 2], vec![0.5; 4]].concat();
        let keys = [vec![1.0; 2 + 3], vec![k; 2], vec![1.0; 3]].concat();
        let expected = [("q.weight", queries), ("kv_up.weight", keys)];
        assert_eq!(
            found,
            expected.map(|(path, factors)| (path.to_string(), factors))
        );
    }

    /// The layer with its weights scaled by `factors`.
    fn clipped(layer: &Attention, factors: &[(String, Vec<f32>)]) -> Attention {
        let mut layer = layer.clone();
        for (path, factors) in factors {
            let (field, name) = path.split_once('.').unwrap();
            let linear = match field {
                "qkv" => &mut layer.qkv,
                "q_up" => &mut layer.q_up,
                "q" => &mut layer.q,
                _ => &mut layer.kv_up,
            };
            let ParallelLinear { weight, bias, .. } = linear.as_mut().unwrap();
            let factors = Tensor::<1>::from_floats(factors.as_slice(), &weight.device());
            if name == "weight" {
                *weight = Param::from_tensor(leaf(weight.val() * factors.unsqueeze()));
            } else {
                let old = bias.take().unwrap();
                *bias = Some(Param::from_tensor(leaf(old.val() * factors)));
            }
        }
        layer
    }

    fn leaf<const D: usize>(x: Tensor<D>) -> Tensor<D> {
        x.inner().autodiff().require_grad()
    }

    fn max_logits(layer: &Attention, x: &Tensor<3>) -> Vec<f64> {
        let batch = BatchContext {
            loss_factor: Some(1.0),
            ..BatchContext::default()
        };
        layer.forward_in(x.clone(), PositionTables::default(), &batch);
        layer.take_max_logits().unwrap().unwrap()
    }

    #[rstest]
    #[case::grouped(grouped(4, 2))]
    #[case::each_its_own(grouped(3, 3))]
    fn clipped_logits_are_the_threshold(#[case] layer: Attention) {
        let x = Tensor::random([5, 2, 12], Distribution::Normal(0.0, 60.0), &Device::flex());
        let x = x.autodiff();
        let before = max_logits(&layer, &x);
        assert!(
            before.iter().any(|logit| *logit > CLIP.threshold),
            "{before:?}"
        );
        let factors = layer.clip_factors(&CLIP, &before);
        let after = max_logits(&clipped(&layer, &factors), &x);
        let group = before.len() / layer.core.num_heads()[1];
        for (before, after) in before.chunks(group).zip(after.chunks(group)) {
            let [before, after] = [before, after]
                .map(|logits| logits.iter().copied().fold(f64::NEG_INFINITY, f64::max));
            let expected = before.min(CLIP.threshold);
            assert!(
                (after - expected).abs() < 1e-4 * expected.abs(),
                "{after} {expected}"
            );
        }
        // Outside of training nothing is recorded.
        layer.forward(x, PositionTables::default());
        assert!(
            max_logits_of(&layer)
                .iter()
                .all(|logit| *logit == f64::NEG_INFINITY)
        );
    }

    fn max_logits_of(layer: &Attention) -> Vec<f64> {
        layer.take_max_logits().unwrap().unwrap()
    }
}
