//! The tensors that a rank holds, as a checkpoint names them.

use std::{cell::RefCell, collections::BTreeMap, ops::Range};

use burn::{
    module::Module,
    tensor::{Tensor, TensorData},
};
use megaburn_checkpoint::{CheckpointError, Copies, NamedTensor, PendingValues};
use megaburn_optim::{D2hCopy, HeldState, HostPart, StateTensor};
use megaburn_parallel::{LazyParam, lazy_params};

use crate::trainer_core::TrainerCore;

impl<M: Module> TrainerCore<M> {
    /// The tensors that this rank holds. `values` returns a range of one; it also gets the name in
    /// the checkpoint.
    pub(crate) fn held_tensors<'a>(
        &'a self,
        values: impl Fn(HeldValues, String, Range<usize>) -> Result<PendingValues, CheckpointError>
        + Clone
        + 'a,
    ) -> impl Iterator<Item = NamedTensor<'a>> {
        let shard = |path: &str| &self.plan.get(path).expect("the plan was validated").shard;
        let num_elements = |path: &str| shard(path).local_shape().iter().product();
        let all = lazy_params(self.model()).into_iter();
        let mut by_path: BTreeMap<_, _> = all.map(|param| (param.path.clone(), param)).collect();
        let HeldState {
            mut masters,
            moments,
        } = self.optimizer.held_state(num_elements, |path| {
            let param = by_path.remove(path).expect("masters are of parameters");
            param.flat()
        });
        let of_state = move |name: String, path: &str, state: StateTensor| {
            let (index, count) = state.copies;
            let range = state.range.clone();
            let held = (name, state.dtype(), HeldValues::State(Box::new(state)));
            (
                path.to_string(),
                held,
                Some((range, Copies { index, count })),
            )
        };
        let params = lazy_params(self.model()).into_iter().map(move |param| {
            let name = format!("model.{}", param.path);
            let path = param.path.clone();
            match masters.remove(&path) {
                Some(master) => of_state(name, &path, master),
                None => (path, (name, param.dtype, HeldValues::Param(param)), None),
            }
        });
        let moments = moments.into_iter().map(move |((moment, path), state)| {
            of_state(format!("{}.{path}", moment.name()), &path, state)
        });
        params
            .chain(moments)
            .map(move |(path, (name, dtype, held), part)| {
                let values = values.clone();
                let own = name.clone();
                let tensor = NamedTensor::ranged(name, shard(&path), dtype, move |range| {
                    values(held, own, range)
                });
                match part {
                    Some((range, copies)) => tensor.holding(range, copies),
                    None => tensor,
                }
            })
    }
}

/// Values that this rank holds.
pub(crate) enum HeldValues {
    State(Box<StateTensor>),
    Param(LazyParam),
}

impl HeldValues {
    /// Reads a range of the flattened local tensor.
    pub(crate) fn read(self, range: Range<usize>) -> Result<TensorData, String> {
        match self {
            Self::State(state) => state.read(range).map_err(|error| error.to_string()),
            Self::Param(param) => to_host(param.flat().narrow(0, range.start, range.len())),
        }
    }

    /// Starts to copy a range of the flattened local tensor to host memory.
    pub(crate) fn copy_to_host(
        self,
        range: Range<usize>,
        in_flight: &RefCell<Vec<D2hCopy>>,
    ) -> Result<HostPart, String> {
        let copied = match self {
            Self::State(state) => state.copy_to_host(range),
            Self::Param(param) => {
                let part = param.flat().narrow(0, range.start, range.len());
                HostPart::copy_of(part).map(|(host, copy)| (host, Some(copy)))
            }
        };
        let (host, copy) = copied.map_err(|error| error.to_string())?;
        in_flight.borrow_mut().extend(copy);
        Ok(host)
    }
}

fn to_host(tensor: Tensor<1>) -> Result<TensorData, String> {
    tensor.try_into_data().map_err(|error| error.to_string())
}
