use std::{
    cmp::Reverse,
    collections::{BTreeMap, VecDeque},
};

use burn::{
    Tensor,
    module::{Module, Param},
    tensor::DType,
};

use super::{Bucket, ParamKind, ShardingConfig};
use crate::visit::{FloatVisitor, visit_floats};

/// When gradients are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Order {
    /// During backward.
    FusedWgrad,
    /// After all backward passes; for matrices that stages share.
    CrossStage,
    /// After all backward passes; for parameters that stages share and whose layers do not
    /// accumulate gradients.
    CrossStageDeferred,
    /// After all backward passes.
    Deferred,
}

impl Order {
    /// Whether layers accumulate the gradients of such parameters, so that the parameters can be
    /// sharded.
    pub(super) fn is_direct(self) -> bool {
        matches!(self, Self::FusedWgrad | Self::CrossStage)
    }
}

/// The properties that all parameters of a bucket share: kind, time of sending, chunk (the last
/// chunk first) and type.
type Common = (ParamKind, Order, Reverse<usize>, &'static str);

/// The trainable parameters, in the module's order.
pub(super) struct Params<'a> {
    config: &'a ShardingConfig,
    /// Path and elements of each parameter.
    found: BTreeMap<Common, Vec<(String, usize)>>,
    /// The position of each parameter in the module.
    places: BTreeMap<String, usize>,
    /// The shapes of matrices.
    pub(super) shapes: BTreeMap<String, [usize; 2]>,
}

impl<'a> Params<'a> {
    pub(super) fn of<M: Module>(config: &'a ShardingConfig, module: &M) -> Self {
        let (found, places, shapes) = Default::default();
        let mut params = Self {
            config,
            found,
            places,
            shapes,
        };
        visit_floats(module, &mut params);
        params
    }

    /// Fills buckets, in sending order. For each kind, `sizes` returns the approximate number of
    /// elements per bucket and the number of ranks that shard it. Within a kind the order is fixed;
    /// between kinds, the bucket that backward completes first comes first. So all ranks that hold
    /// copies of the same parameters, dense or expert, send them in the same order, and no rank
    /// waits forever.
    pub(super) fn buckets(self, sizes: impl Fn(ParamKind) -> [usize; 2]) -> Vec<(Order, Bucket)> {
        let mut of_kinds = ParamKind::ALL.map(|_| VecDeque::new());
        for ((kind, order, chunk, _), mut found) in self.found {
            // Backward produces the gradients of the last parameters first.
            found.reverse();
            let [target, ranks] = sizes(kind);
            let fill = |found, target| Bucket::fill(kind, chunk.0, found, target, ranks);
            let filled = match order {
                Order::CrossStage | Order::CrossStageDeferred => {
                    found.into_iter().flat_map(|of| fill(vec![of], 0)).collect()
                }
                Order::FusedWgrad | Order::Deferred => fill(found, target),
            };
            of_kinds[kind as usize].extend(filled.into_iter().map(|bucket| {
                let last = bucket.slots.last().map(|slot| self.places[&slot.path]);
                ((order, chunk, Reverse(last)), bucket)
            }));
        }
        let [mut dense, mut experts] = of_kinds;
        let mut all = Vec::with_capacity(dense.len() + experts.len());
        loop {
            let next = match (dense.front(), experts.front()) {
                (Some((place, _)), Some((other, _))) if other < place => experts.pop_front(),
                (None, _) => experts.pop_front(),
                _ => dense.pop_front(),
            };
            let Some(((order, ..), bucket)) = next else {
                return all;
            };
            all.push((order, bucket));
        }
    }
}

impl FloatVisitor for Params<'_> {
    fn visit<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        let dtype = if param.is_initialized() {
            let value = param.val();
            if !value.is_require_grad() {
                return;
            }
            value.dtype()
        } else {
            DType::F32
        };
        let shape = param.lazy_shape();
        let matrix = <[usize; 2]>::try_from(shape.to_vec()).ok();
        let is_direct = matrix.is_some() && self.config.direct.contains(&path);
        let order = match (is_direct, self.config.cross_stage.contains(&path)) {
            (true, true) => Order::CrossStage,
            (true, false) => Order::FusedWgrad,
            (false, true) => Order::CrossStageDeferred,
            (false, false) => Order::Deferred,
        };
        self.shapes
            .extend(matrix.map(|shape| (path.clone(), shape)));
        let chunk = self.config.chunks.get(&path).copied().unwrap_or_default();
        let common = (
            ParamKind::of(&self.config.experts, &path),
            order,
            Reverse(chunk),
            dtype.name(),
        );
        self.places.insert(path.clone(), self.places.len());
        self.found
            .entry(common)
            .or_default()
            .push((path, shape.num_elements()));
    }
}
