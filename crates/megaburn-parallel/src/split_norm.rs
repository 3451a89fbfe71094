//! A norm over a dimension that is split over ranks.

use burn::tensor::{FloatDType, Tensor};
use megaburn_autograd::backend_ops::compute_dtype;
use megaburn_collective::{
    Group,
    region::{copy_to, reduce_from},
};
use megaburn_kernels::NormOptions;
use megaburn_mesh::{Axis, FusedPart, ShardSpec};

use crate::{error::ParallelError, replicated_parts::ReplicatedParts};

/// How the features of a norm are split over a group.
#[derive(Clone, Debug)]
pub(crate) struct NormSplit {
    spec: ShardSpec,
    group: Group,
    /// The ranks with the same features as this one, if there are any.
    replicas: Vec<ReplicatedParts>,
}

impl NormSplit {
    /// The split of a dimension that consists of `part`.
    ///
    /// # Errors
    /// The ranks do not divide the part.
    pub(crate) fn new(part: FusedPart, name: &str, group: &Group) -> Result<Self, ParallelError> {
        let shape = [part.size()];
        let spec = ShardSpec::split(&shape, 0, &[part], Axis::Tp, group.rank(), group.size());
        let spec = spec.map_err(|source| ParallelError::Shard {
            name: name.into(),
            source,
        })?;
        Ok(Self {
            replicas: ReplicatedParts::of(&spec, group, name)?,
            spec,
            group: group.clone(),
        })
    }

    /// The part of the scale that this rank holds.
    pub(crate) fn spec(&self) -> &ShardSpec {
        &self.spec
    }

    /// Number of features on this rank.
    pub(crate) fn local_len(&self) -> usize {
        self.spec.local_len
    }

    pub(crate) fn num_ranks(&self) -> usize {
        self.group.size()
    }

    /// The norm of this rank's features. It is composed of tensor operations; the mean is
    /// subtracted first if the norm is `centered`.
    ///
    /// # Shapes
    /// `[.., n]` and `[n]` for the `n` features of this rank
    pub(crate) fn normed<const D: usize>(
        &self,
        x: Tensor<D>,
        centered: bool,
        gamma: Tensor<1>,
        beta: Option<Tensor<1>>,
        options: &NormOptions,
    ) -> Tensor<D> {
        let dtype = x.dtype();
        let wide = compute_dtype(dtype);
        let x = x.cast(wide);
        let x = if centered {
            x.clone() - self.mean(x)
        } else {
            x
        };
        let scale = (self.mean(x.clone() * x.clone()) + options.epsilon)
            .sqrt()
            .recip();
        let gamma = self.vector(gamma, wide);
        let gamma = if options.zero_centered_gamma {
            gamma + 1.0
        } else {
            gamma
        };
        let y = x * scale * gamma.unsqueeze();
        match beta {
            Some(beta) => y + self.vector(beta, wide).unsqueeze(),
            None => y,
        }
        .cast(dtype)
    }

    /// The mean over the features of all ranks, `[.., 1]`. Each rank normalizes its own features
    /// with it, so its gradient is the sum over the ranks.
    fn mean<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        // Features that several ranks hold are counted once.
        let copies: usize = self.spec.pieces.iter().map(|piece| piece.replicas).sum();
        let all = self.spec.global_shape[0] * copies;
        let sum = reduce_from(x.sum_dim(D - 1), &self.group);
        copy_to(sum, &self.group) / all as f64
    }

    /// This rank's part of gamma or beta, whose gradient is summed over the ranks that hold it.
    fn vector(&self, param: Tensor<1>, dtype: FloatDType) -> Tensor<1> {
        let parts = self.replicas.iter();
        parts
            .fold(param, |param, part| part.with_summed_grad(param, 0))
            .cast(dtype)
    }
}
