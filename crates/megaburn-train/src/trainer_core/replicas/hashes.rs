//! Hashes of the tensors that a rank holds.

use std::{collections::BTreeMap, ops::Range};

use burn::{
    module::Module,
    tensor::{Tensor, TensorData},
};
use megaburn_mesh::ShardPlan;
use megaburn_optim::{HeldState, StateTensor};
use megaburn_parallel::lazy_params;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use crate::{
    error::TrainError,
    state_name::{StateKind, StateName},
    trainer_core::{TrainerCore, held_tensors::to_host},
};

/// The hash of a range of a tensor that this rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RangeHash {
    pub(super) name: StateName,
    /// Identifies the tensor and the range, in the full parameter.
    pub(super) place: u64,
    pub(super) hash: u64,
}

impl<M: Module> TrainerCore<M> {
    /// Hashes the weights, the masters and the moments that this rank holds, in this order. Padding is
    /// left out.
    ///
    /// # Errors
    /// A device cannot be read.
    pub(super) fn state_hashes(&self) -> Result<Vec<RangeHash>, TrainError> {
        let mut hashes = Hashes::new(&self.plan);
        for param in lazy_params(self.model()) {
            let path = &param.path.clone();
            if self.sharding.is_param_sharded(path) {
                if let Some((range, part)) = self.sharding.kept_part(path) {
                    hashes.add_tensor(StateKind::Weight, path, range, part)?;
                }
                continue;
            }
            let values = param.flat();
            hashes.add_tensor(StateKind::Weight, path, 0..values.dims()[0], values)?;
        }
        let HeldState { masters, moments } = self.held_state();
        for (path, master) in masters {
            // A sharded weight that has no master is in its place.
            let weight = self.sharding.kept_part(&path);
            if weight.is_none_or(|(_, part)| part.dtype() != master.dtype()) {
                hashes.add_state(StateKind::Master, &path, master)?;
            }
        }
        for ((moment, path), state) in moments {
            hashes.add_state(moment.into(), &path, state)?;
        }
        Ok(hashes.all)
    }

    /// Hashes the gradients of the last step that this rank keeps, after their sum over ranks.
    ///
    /// # Errors
    /// A device cannot be read.
    pub(super) fn gradient_hashes(&self) -> Result<Vec<RangeHash>, TrainError> {
        let mut hashes = Hashes::new(&self.plan);
        for path in self.grads.paths() {
            if let Some((range, grad)) = self.grads.kept(path) {
                hashes.add_tensor(StateKind::Gradient, path, range, grad)?;
            }
        }
        Ok(hashes.all)
    }

    pub(super) fn held_state(&self) -> HeldState {
        let params = lazy_params(self.model()).into_iter();
        let mut by_path: BTreeMap<_, _> = params.map(|param| (param.path.clone(), param)).collect();
        let shard = |path: &str| &self.plan.get(path).expect("the plan was validated").shard;
        let num_elements = |path: &str| shard(path).local_shape().iter().product();
        self.optimizer.held_state(num_elements, |path| {
            let param = by_path.remove(path).expect("masters are of parameters");
            param.flat()
        })
    }
}

struct Hashes<'a> {
    plan: &'a ShardPlan,
    all: Vec<RangeHash>,
}

impl<'a> Hashes<'a> {
    fn new(plan: &'a ShardPlan) -> Self {
        let all = Vec::new();
        Self { plan, all }
    }

    fn add_tensor(
        &mut self,
        kind: StateKind,
        path: &str,
        range: Range<usize>,
        values: Tensor<1>,
    ) -> Result<(), TrainError> {
        if range.is_empty() {
            return Ok(());
        }
        let data = to_host(values).map_err(|why| TrainError::Device { why })?;
        self.add(kind, path, &range, &data);
        Ok(())
    }

    fn add_state(
        &mut self,
        kind: StateKind,
        path: &str,
        state: StateTensor,
    ) -> Result<(), TrainError> {
        let range = state.range.clone();
        if range.is_empty() {
            return Ok(());
        }
        let data = state.read(range.clone())?;
        self.add(kind, path, &range, &data);
        Ok(())
    }

    /// Adds a hash for each piece of the parameter that has elements in `range` of the flattened local
    /// parameter, whose values are `data`.
    fn add(&mut self, kind: StateKind, path: &str, range: &Range<usize>, data: &TensorData) {
        let shard = &self.plan.get(path).expect("the plan was validated").shard;
        let size = data.dtype().size();
        let bytes = data.as_bytes();
        for piece in &shard.pieces {
            let mut hash = Xxh3Default::new();
            // Of a piece, a range of the local parameter has consecutive elements.
            let mut first = None;
            let mut count = 0;
            shard.for_each_run(piece, |local, global, len| {
                let start = local.max(range.start);
                let end = (local + len).min(range.end);
                if start < end {
                    first.get_or_insert(global + start - local);
                    count += end - start;
                    let [start, end] = [start, end].map(|at| (at - range.start) * size);
                    hash.update(&bytes[start..end]);
                }
            });
            if let Some(first) = first {
                let piece = &piece.global;
                let place = format!(
                    "{kind} {path} {}-{} {first} {count}",
                    piece.start, piece.end
                );
                self.all.push(RangeHash {
                    name: StateName {
                        kind,
                        param: path.to_string(),
                    },
                    place: xxh3_64(place.as_bytes()),
                    hash: hash.digest(),
                });
            }
        }
    }
}
