//! Sums over the elements of gradients and parameters, by layer.

use std::collections::BTreeMap;

use burn::{module::Module, tensor::Tensor};
use megaburn_collective::ReduceOp;
use megaburn_kernels::{ElementSums, PendingSums};

use crate::{
    accumulator::GradientAccumulator, error::OptimError, grad_zero_count::Params,
    param_grad::ParamGrad, reduce::has_padding, sharding::ParamKind, visit::visit_floats,
};

/// The sums of this rank, by the number of the layer.
type LayerSums = Vec<ElementSums>;

impl GradientAccumulator {
    /// The sums over the gradients of each layer, of which there are `num_layers`; `layer_of` maps a
    /// parameter's path to its layer. Each logical element counts once over all ranks whose sums are
    /// added: this rank's are zero if another rank's count in their place. Call it after
    /// [`reduce`](Self::reduce).
    ///
    /// # Errors
    /// A failed collective or device.
    /// # Collective
    /// The ranks that together hold experts of this rank's stage, if it has any.
    pub fn grad_sums(
        &self,
        num_layers: usize,
        layer_of: impl Fn(&str) -> usize,
    ) -> Result<LayerSums, OptimError> {
        let sums = self.layer_sums(num_layers, layer_of, |_, entry| entry.grad())?;
        Ok(sums
            .into_iter()
            .map(|sums| sums.times(self.factor))
            .collect())
    }

    /// As [`grad_sums`](Self::grad_sums), of the parameters of `module`, which must have arrived
    /// ([`Sharding::settle`](crate::Sharding::settle)).
    ///
    /// # Errors
    /// As [`grad_sums`](Self::grad_sums).
    /// # Collective
    /// As [`grad_sums`](Self::grad_sums).
    pub fn param_sums<M: Module>(
        &self,
        module: &M,
        num_layers: usize,
        layer_of: impl Fn(&str) -> usize,
    ) -> Result<LayerSums, OptimError> {
        let mut params = Params {
            sharding: &self.sharding,
            values: BTreeMap::new(),
        };
        visit_floats(module, &mut params);
        self.layer_sums(num_layers, layer_of, |path, entry| {
            let part = self.sharding.part(path);
            part.or_else(|| {
                let values = params.values.get(path)?.clone();
                Some(values.narrow(0, entry.kept.start, entry.kept.len()))
            })
        })
    }

    /// The sums over what `of` returns of each parameter: the part that this rank keeps.
    fn layer_sums(
        &self,
        num_layers: usize,
        layer_of: impl Fn(&str) -> usize,
        of: impl Fn(&str, &ParamGrad) -> Option<Tensor<1>>,
    ) -> Result<LayerSums, OptimError> {
        let mut sums = self.sums_of_kind(ParamKind::Dense, num_layers, &layer_of, &of)?;
        if self.sharding.has(ParamKind::Expert) {
            let mut experts = self.sums_of_kind(ParamKind::Expert, num_layers, &layer_of, &of)?;
            let group = self.sharding.replicas(ParamKind::Expert).norm();
            let arrays: Vec<f64> = experts.iter().flat_map(|sums| sums.to_array()).collect();
            let reduced = |op| -> Result<Vec<f64>, OptimError> {
                let all = group.all_reduce(arrays[..].into(), op)?;
                Ok(all.iter::<f64>().collect())
            };
            let [added, largest] = [reduced(ReduceOp::Sum)?, reduced(ReduceOp::Max)?];
            for (at, sums) in experts.iter_mut().enumerate() {
                let mut array: [f64; 5] = std::array::from_fn(|field| added[5 * at + field]);
                array[2] = largest[5 * at + 2];
                *sums = ElementSums::from_array(array);
            }
            if self.sharding.counts_experts() {
                sums.iter_mut()
                    .zip(experts)
                    .for_each(|(sums, experts)| sums.add(experts));
            }
        }
        // Of ranks with the same parameters, the first counts.
        if self.sharding.replicas(ParamKind::Dense).copies().rank() > 0 {
            sums.fill(ElementSums::default());
        }
        Ok(sums)
    }

    fn sums_of_kind(
        &self,
        kind: ParamKind,
        num_layers: usize,
        layer_of: &impl Fn(&str) -> usize,
        of: &impl Fn(&str, &ParamGrad) -> Option<Tensor<1>>,
    ) -> Result<LayerSums, OptimError> {
        let mut layers = Vec::new();
        let mut pending = Vec::new();
        let mut sums = vec![ElementSums::default(); num_layers];
        for (path, entry) in &self.entries {
            // Another rank keeps all of a small parameter.
            if self.sharding.kind_of(path) != kind || entry.kept.is_empty() {
                continue;
            }
            let layer = layer_of(path);
            let Some(values) = of(path, entry) else {
                // There is no gradient, which counts as zeros.
                let num = owned_runs(entry).iter().map(|(_, len)| *len).sum::<usize>() as f64;
                sums[layer].count += num;
                sums[layer].zeros += num;
                continue;
            };
            for (start, len) in owned_runs(entry) {
                layers.push(layer);
                pending.push(PendingSums::of(values.clone().narrow(0, start, len)));
            }
        }
        let found = PendingSums::read(&pending).map_err(|why| OptimError::Device { why })?;
        for (layer, found) in layers.into_iter().zip(found) {
            sums[layer].add(found);
        }
        Ok(sums)
    }
}

/// The parts of what this rank keeps of a parameter that it owns, as starts and lengths: each element
/// of the full parameter is owned by one tensor-parallel rank, and padding by none.
fn owned_runs(entry: &ParamGrad) -> Vec<(usize, usize)> {
    let shard = &entry.spec.shard;
    let kept = &entry.kept;
    if kept.is_empty() {
        return Vec::new();
    }
    if shard.pieces.iter().all(|piece| piece.replica == 0) && !has_padding(shard) {
        return vec![(0, kept.len())];
    }
    let mut runs = Vec::new();
    for piece in shard.owned() {
        shard.for_each_run(piece, |local, _, len| {
            let [start, end] =
                [local, local + len].map(|at| at.clamp(kept.start, kept.end) - kept.start);
            if start < end {
                runs.push((start, end - start));
            }
        });
    }
    runs
}
