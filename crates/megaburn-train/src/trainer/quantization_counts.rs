//! What the quantised layers of a step lost, over all ranks.

use std::collections::BTreeMap;

use burn::tensor::{Tensor, TensorData};
use megaburn_collective::ReduceOp;
use megaburn_kernels::MatrixRole;
use megaburn_report::metrics::{LayerQuantization, MatrixQuantization};

use crate::{error::TrainError, failure::read_all, trainer::Trainer, trainer_core::world_max};

/// The matrices of a layer, in the order of their names.
pub(super) const MATRICES: [(MatrixRole, &str); 3] = [
    (MatrixRole::Gradient, "gradient"),
    (MatrixRole::Input, "input"),
    (MatrixRole::Weight, "weight"),
];

/// The sums of a matrix over ranks: the elements that saturated, those that underflowed, those that
/// were not zero, and the ranks that counted.
const SUMS: usize = 4;

impl Trainer {
    /// Begins a step in which lost elements are counted, or not. The counts of a step that ended in an
    /// error are discarded.
    pub(super) fn begin_counts(&mut self, counts: bool) {
        if !counts && !self.precision.counts {
            return;
        }
        self.precision.counts = counts;
        for layer in self.own_layers().values() {
            layer.set_counted(counts);
            for (role, _) in MATRICES {
                drop(layer.counts().take(role));
            }
        }
    }

    /// Reads what each layer of the full model lost in the step, by its name. Ranks that hold copies of
    /// a matrix each count them, which changes no share. Layers that were not quantised are missing.
    ///
    /// # Collective
    /// All ranks: fifteen numbers per layer, and the names of layers at the first call.
    pub(super) fn read_counts(
        &mut self,
    ) -> Result<BTreeMap<String, LayerQuantization>, TrainError> {
        let names = self.names_of_layers()?;
        let layers = self.own_layers();
        let mut places = Vec::new();
        let mut found: Vec<Tensor<1>> = Vec::new();
        let mut sums = vec![0.0; names.len() * MATRICES.len() * SUMS];
        let mut largest = vec![0.0; names.len() * MATRICES.len()];
        for (index, name) in names.iter().enumerate() {
            let Some(layer) = layers.get(name) else {
                continue;
            };
            for (number, (role, _)) in MATRICES.into_iter().enumerate() {
                let Some(counts) = layer.counts().take(role) else {
                    continue;
                };
                let place = index * MATRICES.len() + number;
                sums[SUMS * place + 3] = 1.0;
                places.push(place);
                found.push(counts.numbers);
            }
        }
        if !found.is_empty() {
            // All are read at once, not one by one.
            let numbers = read_all(Tensor::cat(found, 0))?;
            for (place, of_matrix) in places.into_iter().zip(numbers.chunks_exact(4)) {
                for (sum, number) in sums[SUMS * place..].iter_mut().zip(&of_matrix[..3]) {
                    *sum = f64::from(*number);
                }
                largest[place] = f64::from(of_matrix[3]);
            }
        }
        let len = sums.len();
        let world = &self.core.groups.world;
        let sums = world.all_reduce(TensorData::new(sums, [len]), ReduceOp::Sum)?;
        let sums: Vec<f64> = sums.try_to_vec().expect("the tensor is f64");
        let largest = world_max(&self.core.groups, &largest)?;
        let mut all = BTreeMap::new();
        for (index, name) in names.into_iter().enumerate() {
            let of = |number: usize| {
                let place = index * MATRICES.len() + number;
                let of_matrix = [0, 1, 2, 3].map(|it| sums[SUMS * place + it]);
                let [saturated, underflowed, nonzero, ranks] = of_matrix;
                (ranks > 0.0).then(|| MatrixQuantization {
                    saturated: saturated / nonzero.max(1.0),
                    underflowed: underflowed / nonzero.max(1.0),
                    amax: largest[place] / self.unit_of(MATRICES[number].0),
                })
            };
            let [gradient, input, weight] = [0, 1, 2].map(of);
            let layer = LayerQuantization {
                input,
                weight,
                gradient,
            };
            if layer != LayerQuantization::default() {
                all.insert(name, layer);
            }
        }
        Ok(all)
    }
}
