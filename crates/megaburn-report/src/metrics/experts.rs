use megaburn_parallel::LoadCounts;
use serde::{Deserialize, Serialize};

use super::nan_if_null;

/// What a step measured about its experts. Losses are means over layers of means over tokens,
/// without their coefficients; they are 0 if they are not computed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertMetrics {
    /// The load-balancing loss of micro-batches; 1 if all experts get the same number of tokens.
    #[serde(deserialize_with = "nan_if_null")]
    pub aux_loss: f64,
    /// The load-balancing loss of sequences.
    #[serde(deserialize_with = "nan_if_null")]
    pub seq_aux_loss: f64,
    /// The load-balancing loss of the global batch.
    #[serde(deserialize_with = "nan_if_null")]
    pub global_aux_loss: f64,
    /// The mean square of the log-sum-exp of the router's logits.
    #[serde(deserialize_with = "nan_if_null")]
    pub z_loss: f64,
    /// The fraction of assignments that were dropped.
    pub dropped: f64,
    /// For each layer with experts, in order: tokens of the busiest expert, relative to the mean.
    pub busiest: Vec<f64>,
    /// For each layer with experts, in order: tokens of the least busy expert, relative to the
    /// mean.
    pub idlest: Vec<f64>,
    /// Number of layers that the means contain so far.
    #[serde(skip)]
    layers: f64,
}

impl ExpertMetrics {
    /// Adds a layer in which each of `tokens` tokens was routed to `top_k` experts.
    pub fn add(&mut self, load: &LoadCounts, top_k: usize, tokens: f64) {
        let num = load.tokens.len().max(1) as f64;
        let sent = load.tokens.iter().sum::<u64>().max(1) as f64;
        let tokens = tokens.max(1.0);
        // For each expert: its fraction of the assignments times its mean probability.
        let pairs = load.tokens.iter().zip(&load.probabilities);
        let global = pairs
            .map(|(&own, p)| num * (own as f64 / sent) * (p / tokens))
            .sum::<f64>();
        let layers = self.layers + 1.0;
        let mean = |mean: &mut f64, new: f64| *mean += (new - *mean) / layers;
        mean(&mut self.aux_loss, load.aux_loss / tokens);
        mean(&mut self.seq_aux_loss, load.seq_aux_loss / tokens);
        mean(&mut self.global_aux_loss, global);
        mean(&mut self.z_loss, load.z_loss / tokens);
        mean(
            &mut self.dropped,
            load.dropped as f64 / (tokens * top_k as f64),
        );
        self.layers = layers;
        let of_mean = |own: Option<&u64>| own.map_or(0.0, |&own| own as f64 * num / sent);
        self.busiest.push(of_mean(load.tokens.iter().max()));
        self.idlest.push(of_mean(load.tokens.iter().min()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_none_are_written_and_read() {
        let metrics = ExpertMetrics {
            z_loss: f64::NAN,
            ..ExpertMetrics::default()
        };
        let text = serde_json::to_string(&metrics).unwrap();
        let read: ExpertMetrics = serde_json::from_str(&text).unwrap();
        assert!(text.contains("\"z_loss\":null") && read.z_loss.is_nan());
    }

    #[test]
    fn losses_are_means_over_layers_and_loads_are_told_layer_by_layer() {
        let load = |tokens: [u64; 2], aux_loss| LoadCounts {
            tokens: tokens.to_vec(),
            dropped: 2,
            aux_loss,
            probabilities: vec![3.0, 1.0],
            ..LoadCounts::default()
        };
        let mut metrics = ExpertMetrics::default();
        metrics.add(&load([4, 4], 8.0), 2, 4.0);
        metrics.add(&load([6, 2], 4.0), 2, 4.0);
        assert_eq!((metrics.aux_loss, metrics.dropped), (1.5, 0.25));
        // 2 (0.5 0.75 + 0.5 0.25) and 2 (0.75 0.75 + 0.25 0.25).
        assert_eq!(metrics.global_aux_loss, (1.0 + 1.25) / 2.0);
        assert_eq!(
            (metrics.busiest, metrics.idlest),
            (vec![1.0, 1.5], vec![1.0, 0.5])
        );
    }
}
