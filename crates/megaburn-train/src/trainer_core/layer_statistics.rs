//! Statistics of the activations, gradients and weights of each layer, in the steps of
//! `log.layer_statistics_interval`.

use std::collections::BTreeSet;

use burn::module::Module;
use megaburn_collective::objects;
use megaburn_kernels::ElementSums;
use megaburn_parallel::BlockStatistics;
use megaburn_report::metrics::{LayerStatistics, TensorStatistics};
use serde::{Deserialize, Serialize};

use super::TrainerCore;
use crate::{error::TrainError, failure::device_error};

/// A layer: the beginning of the paths of its parameters, and its number among layers of this name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct LayerName(String, Option<usize>);

impl LayerName {
    /// The layer of the parameter at `path`.
    fn of(path: &str) -> Self {
        let mut names = path.split('.');
        let first = names.next().unwrap_or_default().to_string();
        Self(first, names.next().and_then(|name| name.parse().ok()))
    }

    fn text(&self) -> String {
        match self.1 {
            Some(number) => format!("{}.{number}", self.0),
            None => self.0.clone(),
        }
    }
}

/// What a rank has counted in a step.
#[derive(Debug)]
pub(crate) struct CountedLayers {
    /// The layers of all ranks.
    names: Vec<LayerName>,
    gradients: Vec<ElementSums>,
}

/// The sums of a rank for each layer: of activations, gradients and weights. They are bits of f64,
/// because JSON has no NaN.
type RankSums = Vec<[[u64; 5]; 3]>;

impl<M: Module> TrainerCore<M> {
    /// Begins to count the activations of a step, if its statistics are logged.
    pub(crate) fn begin_layer_statistics(&mut self) {
        let interval = self.config.log.layer_statistics_interval;
        let is_due = interval > 0 && (self.progress.step + 1).is_multiple_of(interval);
        self.block_statistics = is_due.then(BlockStatistics::default);
    }

    /// Counts the gradients, if the statistics of this step are logged. Call it after they are
    /// reduced and before they are clipped.
    ///
    /// # Errors
    /// A failed collective or device.
    /// # Collective
    /// All ranks.
    pub(crate) fn count_gradients(&self) -> Result<Option<CountedLayers>, TrainError> {
        if self.block_statistics.is_none() {
            return Ok(None);
        }
        let own: BTreeSet<LayerName> = self.grads.paths().map(LayerName::of).collect();
        let all = objects::gather(&self.groups.world, &own)?;
        let all: BTreeSet<LayerName> = all.into_iter().flatten().collect();
        let names: Vec<LayerName> = objects::broadcast(&self.groups.world, &all)?
            .into_iter()
            .collect();
        let gradients = self
            .grads
            .grad_sums(names.len(), |path| number_of(&names, path));
        let gradients = self.device_error(gradients)?;
        Ok(Some(CountedLayers { names, gradients }))
    }

    /// Adds activations and weights, and keeps the statistics of all ranks on rank 0.
    ///
    /// # Errors
    /// A failed collective or device.
    /// # Collective
    /// All ranks.
    pub(crate) fn end_layer_statistics(
        &mut self,
        counted: Option<CountedLayers>,
    ) -> Result<(), TrainError> {
        let blocks = self.block_statistics.take();
        let (Some(CountedLayers { names, gradients }), Some(blocks)) = (counted, blocks) else {
            return Ok(());
        };
        let weights = self
            .grads
            .param_sums(self.model(), names.len(), |path| number_of(&names, path));
        let weights = self.device_error(weights)?;
        let blocks = blocks
            .take()
            .map_err(|why| device_error(why, &self.device))?;
        // Without sequence parallelism, all tensor-parallel ranks have the same activations.
        let counts = self.layout().sp || self.groups.tp.rank() == 0;
        let of_block = |name: &LayerName| {
            let number = name.1.filter(|_| name.0 == "blocks" && counts)?;
            blocks.get(&number).copied()
        };
        let bits = |sums: ElementSums| sums.to_array().map(f64::to_bits);
        let sums = names.iter().zip(gradients).zip(weights);
        let own: RankSums = sums
            .map(|((name, gradients), weights)| {
                let activations = of_block(name).unwrap_or_default();
                [activations, gradients, weights].map(bits)
            })
            .collect();
        let all: Vec<RankSums> = objects::gather(&self.groups.world, &own)?;
        self.layer_statistics = (!all.is_empty()).then(|| total(&names, &all));
        Ok(())
    }
}

/// The number of a parameter's layer among all.
fn number_of(names: &[LayerName], path: &str) -> usize {
    let name = LayerName::of(path);
    // All names were gathered from the paths.
    names.binary_search(&name).unwrap_or_default()
}

/// The statistics over all ranks.
fn total(names: &[LayerName], ranks: &[RankSums]) -> Vec<LayerStatistics> {
    let layer = |(at, name): (usize, &LayerName)| {
        let mut sums = [ElementSums::default(); 3];
        for rank in ranks {
            for (sums, own) in sums.iter_mut().zip(rank[at]) {
                sums.add(ElementSums::from_array(own.map(f64::from_bits)));
            }
        }
        let [activations, gradients, weights] = sums;
        LayerStatistics {
            layer: name.text(),
            activations: (activations.count > 0.0).then(|| statistics(activations)),
            gradients: statistics(gradients),
            weights: statistics(weights),
        }
    };
    names.iter().enumerate().map(layer).collect()
}

fn statistics(sums: ElementSums) -> TensorStatistics {
    let ElementSums {
        count,
        squares,
        max_abs,
        zeros,
        non_finite,
    } = sums;
    let num_finite = (count - non_finite).max(1.0);
    TensorStatistics {
        norm: squares.sqrt(),
        rms: (squares / num_finite).sqrt(),
        max_abs,
        zeros: zeros / count.max(1.0),
        non_finite: non_finite / count.max(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_named_by_their_parameters_and_sorted_by_number() {
        let paths = [
            "blocks.10.mlp.up",
            "blocks.2.norm",
            "embedding.weight",
            "norm.gamma",
        ];
        let names: BTreeSet<LayerName> = paths.map(LayerName::of).into_iter().collect();
        let names: Vec<LayerName> = names.into_iter().collect();
        let texts: Vec<String> = names.iter().map(LayerName::text).collect();
        assert_eq!(texts, ["blocks.2", "blocks.10", "embedding", "norm"]);
        assert_eq!(number_of(&names, "blocks.10.attention.q"), 1);
    }
}
