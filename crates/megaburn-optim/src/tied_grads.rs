//! Sums gradients of parameters that several pipeline stages share, such as a tied embedding.

use megaburn_collective::{Group, Lane, ReduceOp, tensors};

use crate::{accumulator::GradientAccumulator, error::OptimError};

impl GradientAccumulator {
    /// Sums the gradient of a parameter of which several pipeline stages have a copy
    /// ([`with_cross_stage`](crate::ShardingConfig::with_cross_stage)) over `group`, so that all
    /// copies get the same gradient. Call it after [`reduce`](Self::reduce).
    ///
    /// Source: Megatron-LM `megatron/core/distributed/finalize_model_grads.py`,
    /// `_allreduce_word_embedding_grads`.
    ///
    /// # Errors
    /// See [`megaburn_collective::CollectiveError`].
    /// # Collective
    /// All members of `group`, with the same path.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn all_reduce_tied(&mut self, path: &str, group: &Group) -> Result<(), OptimError> {
        assert!(
            self.sharding.is_cross_stage(path),
            "`{path}` is not tied across stages: name it in `ShardingConfig::with_cross_stage`"
        );
        let entry = self
            .entries
            .get_mut(path)
            .expect("the parameter is on this rank");
        let sum =
            tensors::all_reduce(entry.grad_or_zeros(), ReduceOp::Sum, group, Lane::InOrder)?.wait();
        entry.own = None;
        entry.sum = Some(sum);
        Ok(())
    }
}
