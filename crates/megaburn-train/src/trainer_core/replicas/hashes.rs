//! Hashes of the tensors that a rank holds.

use std::{collections::BTreeMap, ops::Range};

use burn::{module::Module, tensor::Tensor};
use megaburn_kernels::{PendingHash, Runs};
use megaburn_mesh::ShardPlan;
use megaburn_optim::{HeldState, StateTensor};
use megaburn_parallel::lazy_params;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    error::TrainError,
    state_name::{StateKind, StateName},
    trainer_core::TrainerCore,
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
        hashes.read()
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
        hashes.read()
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

/// Elements of the flattened local parameter: their runs, and which of them.
type Elements = (Runs, Range<usize>);

/// Hashes that the devices may still compute.
struct Hashes<'a> {
    plan: &'a ShardPlan,
    ranges: Vec<RangeHash>,
    pending: Vec<PendingHash>,
}

impl<'a> Hashes<'a> {
    fn new(plan: &'a ShardPlan) -> Self {
        Self {
            plan,
            ranges: Vec::new(),
            pending: Vec::new(),
        }
    }

    fn add_tensor(
        &mut self,
        kind: StateKind,
        path: &str,
        range: Range<usize>,
        values: Tensor<1>,
    ) -> Result<(), TrainError> {
        self.add(kind, path, &range, |elements| {
            let hash = |(runs, indices): &Elements| {
                PendingHash::of(values.clone(), range.start, *runs, indices.clone())
            };
            let hashes: Result<_, String> = elements.iter().map(hash).collect();
            hashes.map_err(|why| TrainError::Device { why })
        })
    }

    fn add_state(
        &mut self,
        kind: StateKind,
        path: &str,
        state: StateTensor,
    ) -> Result<(), TrainError> {
        let range = state.range.clone();
        self.add(kind, path, &range, |elements| Ok(state.hashes(elements)?))
    }

    /// Adds a hash for each piece of the parameter that has elements in `range` of the flattened local
    /// parameter. `hashes` computes the hashes of the given elements.
    ///
    /// # Errors
    /// `hashes` fails.
    fn add(
        &mut self,
        kind: StateKind,
        path: &str,
        range: &Range<usize>,
        hashes: impl FnOnce(&[Elements]) -> Result<Vec<PendingHash>, TrainError>,
    ) -> Result<(), TrainError> {
        let shard = &self.plan.get(path).expect("the plan was validated").shard;
        let mut elements = Vec::new();
        for piece in &shard.pieces {
            let mut all = Vec::new();
            shard.for_each_run(piece, |local, global, len| all.push((local, global, len)));
            let Some(&(start, _, len)) = all.first().filter(|run| run.2 > 0) else {
                continue;
            };
            let stride = all.get(1).map_or(len, |next| next.0 - start);
            let runs = Runs { start, len, stride };
            let before = |position| runs.num_before(position).min(all.len() * len);
            let indices = before(range.start)..before(range.end);
            if indices.is_empty() {
                continue;
            }
            let first = all[indices.start / len].1 + indices.start % len;
            let (piece, count) = (&piece.global, indices.len());
            let place = format!(
                "{kind} {path} {}-{} {first} {count}",
                piece.start, piece.end
            );
            self.ranges.push(RangeHash {
                name: StateName {
                    kind,
                    param: path.to_string(),
                },
                place: xxh3_64(place.as_bytes()),
                hash: 0,
            });
            elements.push((runs, indices));
        }
        if !elements.is_empty() {
            self.pending.extend(hashes(&elements)?);
        }
        Ok(())
    }

    /// Waits for the hashes.
    ///
    /// # Errors
    /// A device cannot be read.
    fn read(mut self) -> Result<Vec<RangeHash>, TrainError> {
        let read = PendingHash::read(&self.pending);
        let read = read.map_err(|why| TrainError::Device { why })?;
        for (range, hash) in self.ranges.iter_mut().zip(read) {
            range.hash = hash;
        }
        Ok(self.ranges)
    }
}
