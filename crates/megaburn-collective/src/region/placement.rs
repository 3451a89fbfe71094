//! Placement as a type: how a tensor is distributed determines which operations compile. A
//! forgotten reduction, the most common cause of plausible but wrong losses, is a compile error.

use burn::tensor::Tensor;

use crate::{
    group::Group,
    region::{gather_from_sequence, reduce_from, reduce_scatter_to_sequence, scatter_to_sequence},
};

/// One member's term of a sum over its group, such as the product of a row-parallel matrix. It has
/// no meaning until it is reduced, so reducing is the only operation.
///
/// ```compile_fail
/// use burn::tensor::Tensor;
/// use megaburn_collective::{Group, region::Partial};
///
/// fn forgotten_reduction(partial: Partial<3>, residual: Tensor<3>) -> Tensor<3> {
///     residual + partial // a partial sum is no tensor
/// }
/// ```
///
/// With the reduction the same function compiles:
///
/// ```
/// use burn::tensor::Tensor;
/// use megaburn_collective::{Group, region::Partial};
///
/// fn reduced(partial: Partial<3>, residual: Tensor<3>) -> Tensor<3> {
///     residual + partial.all_reduce()
/// }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a partial sum has no value until it is reduced"]
pub struct Partial<const D: usize> {
    term: Tensor<D>,
    group: Group,
}

impl<const D: usize> Partial<D> {
    /// This member's term of a sum over `group`.
    pub fn new(term: Tensor<D>, group: &Group) -> Self {
        Self {
            term,
            group: group.clone(),
        }
    }

    /// The sum, on every member.
    ///
    /// # Collective
    /// See [`reduce_from`].
    pub fn all_reduce(self) -> Tensor<D> {
        reduce_from(self.term, &self.group)
    }

    /// This member's sequence shard of the sum.
    ///
    /// # Shapes
    /// `[n * s, ..]` to `[s, ..]`.
    /// # Collective
    /// See [`reduce_scatter_to_sequence`].
    pub fn reduce_scatter(self) -> SequenceShard<D> {
        let shard = reduce_scatter_to_sequence(self.term, &self.group);
        SequenceShard {
            shard,
            group: self.group,
        }
    }
}

/// One member's shard of the sequence (dim 0). Token-wise work can run on it; anything that needs
/// the full sequence must gather it first.
///
/// ```compile_fail
/// use burn::tensor::Tensor;
/// use megaburn_collective::{Group, region::SequenceShard};
///
/// fn attends_to_a_shard(shard: SequenceShard<3>, weight: Tensor<3>) -> Tensor<3> {
///     shard.matmul(weight) // a shard is no tensor: gather it, or say `map_tokens`
/// }
/// ```
///
/// With the gather the same function compiles:
///
/// ```
/// use burn::tensor::Tensor;
/// use megaburn_collective::{Group, region::SequenceShard};
///
/// fn attends_to_all(shard: SequenceShard<3>, weight: Tensor<3>) -> Tensor<3> {
///     shard.gather().matmul(weight)
/// }
/// ```
#[derive(Clone, Debug)]
pub struct SequenceShard<const D: usize> {
    shard: Tensor<D>,
    group: Group,
}

impl<const D: usize> SequenceShard<D> {
    /// Declares that `shard` is this member's shard of the sequence.
    pub fn new(shard: Tensor<D>, group: &Group) -> Self {
        Self {
            shard,
            group: group.clone(),
        }
    }

    /// Takes this member's shard of a replicated tensor.
    ///
    /// # Shapes
    /// `[n * s, ..]` to `[s, ..]`.
    /// # Collective
    /// See [`scatter_to_sequence`].
    pub fn of(whole: Tensor<D>, group: &Group) -> Self {
        Self::new(scatter_to_sequence(whole, group), group)
    }

    /// Gathers the full sequence, for work that is split over the group.
    ///
    /// # Shapes
    /// `[s, ..]` to `[n * s, ..]`.
    /// # Collective
    /// See [`gather_from_sequence`].
    pub fn gather(self) -> Tensor<D> {
        gather_from_sequence(self.shard, &self.group)
    }

    /// Applies the same token-wise function to every member's shard.
    pub fn map_tokens<const D2: usize>(
        self,
        f: impl FnOnce(Tensor<D>) -> Tensor<D2>,
    ) -> SequenceShard<D2> {
        SequenceShard {
            shard: f(self.shard),
            group: self.group,
        }
    }

    /// Returns the bare shard, for the boundary of a module that documents its output's placement.
    pub fn into_shard(self) -> Tensor<D> {
        self.shard
    }
}
