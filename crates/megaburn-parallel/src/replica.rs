use burn::{module::Param, tensor::Tensor};
use megaburn_collective::{Group, region::copy_to};
use megaburn_mesh::{Axis, ShardSpec};

/// How a replicated parameter of a group is used.
#[derive(Clone, Debug)]
pub(crate) struct Replica {
    group: Group,
    /// Whether each rank uses the parameter on its own rows, so that the ranks' gradients must be
    /// summed.
    own_rows: bool,
}

impl Replica {
    pub(crate) fn of(group: &Group, own_rows: bool) -> Self {
        Self {
            group: group.clone(),
            own_rows,
        }
    }

    /// The ranks that hold the parameter.
    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// Returns the parameter's use where every rank sees all rows.
    pub(crate) fn with_all_rows(self) -> Self {
        Self {
            own_rows: false,
            ..self
        }
    }

    /// The value as used on this rank's rows.
    pub(crate) fn value<const D: usize>(&self, param: &Param<Tensor<D>>) -> Tensor<D> {
        self.shared(param.val())
    }

    /// Like [`value`](Self::value), for a tensor that was computed from the parameter.
    pub(crate) fn shared<const D: usize>(&self, value: Tensor<D>) -> Tensor<D> {
        if self.own_rows {
            copy_to(value, &self.group)
        } else {
            value
        }
    }

    /// Whether backward sums the parameter's gradient over ranks.
    pub(crate) fn is_summed(&self) -> bool {
        self.own_rows && self.group.size() > 1
    }

    pub(crate) fn spec<const D: usize>(&self, param: &Param<Tensor<D>>) -> ShardSpec {
        let shape = param.lazy_shape();
        ShardSpec::whole(&shape, Axis::Tp, self.group.rank(), self.group.size())
    }

    /// This rank's rows of `all`.
    pub(crate) fn rows<'a, T>(&self, all: &'a [T]) -> &'a [T] {
        if !self.own_rows {
            return all;
        }
        let len = all.len() / self.group.size();
        &all[self.group.rank() * len..][..len]
    }
}
