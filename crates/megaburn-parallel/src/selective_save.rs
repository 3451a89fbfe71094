//! Selective save: the output of attention is kept inside regions that are recomputed.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use megaburn_kernels::PartialAttention;

/// The outputs of attention and their log-sum-exps that a [recomputed](crate::recomputed) region
/// saves. Backward recomputes everything else and uses the saved ones. The region gives it to its
/// layers in [`BatchContext::saved_attention`](crate::BatchContext::saved_attention).
///
/// - This costs as much memory as the output of attention, for each layer.
/// - It saves the computation that grows with the square of the sequence length and, with context
///   parallelism, one exchange of keys and values.
/// - Without a fused kernel (e.g. on GPUs in f32), attention is then computed in parts, which is
///   slower.
///
/// Source: PyTorch's selective activation checkpointing, as torchtitan uses it
/// (`torchtitan/distributed/activation_checkpoint.py`).
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use megaburn_collective::Group;
/// use megaburn_parallel::{BatchContext, SelectiveSave, SelfAttentionConfig, recomputed};
///
/// let device = Device::flex().autodiff();
/// let config = SelfAttentionConfig::new(8, 2, 2, 4).with_name("attention");
/// let layer = config.init(&Group::single(0), &device)?;
/// let x = Tensor::<3>::ones([4, 2, 8], &device).require_grad();
/// let saved = SelectiveSave::default();
/// let batch = BatchContext { saved_attention: Some(saved.clone()), ..BatchContext::default() };
/// let inputs = [x.clone().into()];
/// let [y] = recomputed(&layer, inputs, move |layer, [x]| [layer.forward_in(x, None, &batch)]);
/// saved.end_forward();
/// assert!(x.grad(&y.sum().backward()).is_some());
/// # Ok::<_, megaburn_parallel::ParallelError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct SelectiveSave(Arc<Mutex<SavedOutputs>>);

#[derive(Debug, Default)]
struct SavedOutputs {
    /// The output of each attention, in order of computation.
    outputs: VecDeque<PartialAttention>,
    /// Whether the region's first forward pass is over.
    is_recompute: bool,
}

impl SelectiveSave {
    /// Ends the region's first forward pass. Its recompute takes the saved outputs.
    pub fn end_forward(&self) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_recompute = true;
    }

    /// The result of `compute` or, in a recompute, its saved result.
    pub(crate) fn output(&self, compute: impl FnOnce() -> PartialAttention) -> PartialAttention {
        let saved = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if saved().is_recompute {
            let output = saved().outputs.pop_front();
            return output.expect("recompute saves as many tensors as the first forward pass");
        }
        let output = compute();
        saved().outputs.push_back(output.clone());
        output
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;

    fn part(value: f32) -> PartialAttention {
        let device = Device::flex();
        let [out, lse] = [value, -value].map(|value| Tensor::<1>::full([6], value, &device));
        PartialAttention {
            out: out.reshape([3, 1, 1, 2]),
            lse: lse.reshape([1, 1, 6]),
        }
    }

    fn value(part: PartialAttention) -> f32 {
        assert!(part.lse.into_data().iter::<f32>().all(|x| x < 0.0));
        part.out.into_data().iter::<f32>().next().unwrap()
    }

    /// Two attentions of one region.
    fn both(saved: &SelectiveSave, values: [f32; 2]) -> [f32; 2] {
        values.map(|of| value(saved.output(|| part(of))))
    }

    #[test]
    fn what_is_kept_is_not_computed_again() {
        let [kept, others] = [SelectiveSave::default(), SelectiveSave::default()];
        assert_eq!(both(&kept, [1.0, 2.0]), [1.0, 2.0]);
        assert_eq!(both(&others, [5.0, 6.0]), [5.0, 6.0]);
        kept.end_forward();
        others.end_forward();
        assert_eq!(both(&kept, [f32::NAN; 2]), [1.0, 2.0]);
        assert_eq!(both(&others, [f32::NAN; 2]), [5.0, 6.0]);
    }
}
