use std::{collections::BTreeMap, ops::Range};

use burn::{
    Tensor,
    module::{Module, Param},
    tensor::{DType, FloatDType, Gradients},
};
use megaburn_autograd::MainGrad;
use megaburn_kernels::scaled;
use megaburn_mesh::ShardPlan;

use crate::{
    error::OptimError,
    overlap::Overlap,
    param_grad::ParamGrad,
    plan::check_plan,
    sharding::{Bucket, ParamKind, Sharding},
    state_dtype::check_dtype,
    visit::{FloatVisitor, visit_floats},
};

/// Gradients of a module's trainable parameters, keyed by path: summed over micro-batches, then
/// over ranks. The sums are f32 whatever the type of the parameters, unless
/// [`with_dtype`](Self::with_dtype) says otherwise. Of the sums over ranks, each rank keeps the
/// part that its [`Sharding`] assigns to it.
///
/// A frozen parameter has no entry; the gradient of a trainable parameter that received none counts
/// as zero.
#[derive(Debug)]
pub struct GradientAccumulator {
    pub(crate) entries: BTreeMap<String, ParamGrad>,
    pub(crate) sharding: Sharding,
    /// Present if other ranks hold the same parameters and layers accumulate their own main
    /// gradients.
    pub(crate) overlap: Option<Overlap>,
    /// Whether a micro-batch has been accumulated since gradients were last summed over ranks.
    pub(crate) is_open: bool,
    /// Pending scale of all gradients (1/tokens, clip). The reader applies it, which saves a pass
    /// over memory.
    pub(crate) factor: f64,
    /// Pending scale that is known only on the GPU: `[1]`, f32. Multiplied with `factor`.
    pub(crate) factor_on_gpu: Option<Tensor<1>>,
}

impl GradientAccumulator {
    /// Zero gradients for the parameters of `module` that require them, sharded as `sharding` says.
    /// `sharding` must have been made for the same module.
    ///
    /// # Errors
    /// The parameters of the module and of the plan differ in path or local shape; a parameter is
    /// frozen that was trainable when the sharding was made; or `plan` and `sharding` disagree on
    /// whether a parameter belongs to an expert.
    pub fn new<M: Module>(
        module: &M,
        plan: &ShardPlan,
        sharding: &Sharding,
    ) -> Result<Self, OptimError> {
        check_plan(module, plan)?;
        let mut collect = Collect {
            plan,
            sharding,
            entries: BTreeMap::new(),
        };
        visit_floats(module, &mut collect);
        let entries = collect.entries;
        let sharding = sharding.clone();
        for Bucket { kind, slots, .. } in sharding.buckets() {
            for path in slots.iter().map(|slot| slot.path.clone()) {
                let Some(entry) = entries.get(&path) else {
                    return Err(OptimError::NotTrainable { path });
                };
                if entry.spec.is_expert() != (*kind == ParamKind::Expert) {
                    return Err(OptimError::OtherReplicas { path });
                }
            }
        }
        let overlap = None;
        let is_open = false;
        let factor = 1.0;
        let factor_on_gpu = None;
        Ok(Self {
            entries,
            sharding,
            overlap,
            is_open,
            factor,
            factor_on_gpu,
        })
    }

    /// Accumulates and reduces gradients in `dtype` instead of f32 (Megatron's
    /// `--main-grads-dtype`). bf16 halves memory and communication, but loses contributions smaller
    /// than 1/256 of the sum they are added to. Call this before
    /// [`with_main_grads`](Self::with_main_grads).
    ///
    /// # Errors
    /// `dtype` is neither f32 nor bf16; sums over tokens would exceed the range of f16.
    pub fn with_dtype(mut self, dtype: FloatDType) -> Result<Self, OptimError> {
        check_dtype("main_grads", dtype)?;
        self.entries
            .values_mut()
            .for_each(|entry| entry.dtype = dtype.into());
        Ok(self)
    }

    /// Lets linear layers accumulate their weight gradients in f32 as they compute them.
    /// `main_grads` are keyed by path (`megaburn_parallel::main_grads`). These gradients no longer
    /// pass through Burn's `Gradients` or [`accumulate`](Self::accumulate).
    ///
    /// Ignores paths without a trainable parameter and parameters whose gradients are not summed in
    /// f32 ([`with_dtype`](Self::with_dtype)).
    #[must_use]
    pub fn with_main_grads(mut self, main_grads: BTreeMap<String, MainGrad>) -> Self {
        self.attach(main_grads);
        let first = self.entries.values().next();
        if let Some(device) = first.map(|entry| entry.device.clone())
            && !self.sharding.is_alone()
        {
            let entries = self.entries.iter();
            let weights = entries.filter_map(
                |(
                    path,
                    ParamGrad {
                        main_grad, spec, ..
                    },
                )| { Some((path.clone(), (main_grad.clone()?, spec.clone()))) },
            );
            let weights = weights.collect();
            self.overlap = Some(Overlap::new(self.sharding.clone(), device, weights));
        }
        self
    }

    /// Like [`with_main_grads`](Self::with_main_grads), for small parameters
    /// (`megaburn_parallel::vector_grads`). Their gradients are never sent during backward, only by
    /// [`reduce`](Self::reduce). Call this after [`with_main_grads`](Self::with_main_grads).
    #[must_use]
    pub fn with_vector_grads(mut self, vector_grads: BTreeMap<String, MainGrad>) -> Self {
        self.attach(vector_grads);
        self
    }

    fn attach(&mut self, main_grads: BTreeMap<String, MainGrad>) {
        for (path, main_grad) in main_grads {
            if let Some(entry) = self
                .entries
                .get_mut(&path)
                .filter(|e| e.dtype == DType::F32)
            {
                main_grad.attach();
                entry.main_grad = Some(main_grad);
            }
        }
    }

    /// Takes what the layers summed since; until then the sums of a step are theirs.
    pub(crate) fn gather(&mut self) {
        self.entries.values_mut().for_each(ParamGrad::gather);
    }

    /// Adds the gradients of one micro-batch and removes them from `grads`. Call
    /// [`begin_micro_batch`](Self::begin_micro_batch) before the backward pass,
    /// [`end_micro_batch`](Self::end_micro_batch) after this, and [`reduce`](Self::reduce) after
    /// the last micro-batch; `reduce` completes the sums, on a single rank too.
    ///
    /// `module` is the module that this was made for, or a later version of it after updates.
    pub fn accumulate<M: Module>(&mut self, module: &M, grads: &mut Gradients) {
        let Self {
            entries, overlap, ..
        } = self;
        visit_floats(
            module,
            &mut Accumulate {
                entries,
                overlap: overlap.as_ref(),
                grads,
            },
        );
        self.end_backward();
    }

    /// Like [`accumulate`](Self::accumulate), after a pass whose gradients are all summed by the
    /// layers themselves: the [deferred](megaburn_autograd::WgradQueue::defer) products of a
    /// backward pass.
    pub fn end_backward(&mut self) {
        self.is_open = true;
        if let Some(overlap) = &self.overlap {
            overlap.end();
        }
    }

    /// Multiplies every gradient by `factor`, e.g. `1 / tokens`.
    pub fn scale(&mut self, factor: f64) {
        self.factor *= factor;
    }

    /// Sets all gradients to zero, for the next step.
    pub fn reset(&mut self) {
        if let Some(overlap) = &self.overlap {
            overlap.reset();
        }
        for entry in self.entries.values_mut() {
            entry.own = None;
            entry.sum = None;
            entry.main_grad.as_ref().map(MainGrad::take);
        }
        self.is_open = false;
        self.factor = 1.0;
        self.factor_on_gpu = None;
    }

    /// The part of the gradient of the parameter at `path` that this rank keeps, or `None` if the
    /// parameter is frozen or unknown.
    ///
    /// # Shapes
    /// `[local elements]`, row-major, padding included; fewer elements where gradients are sharded.
    pub fn get(&self, path: &str) -> Option<Tensor<1>> {
        let grad = self
            .entries
            .get(path)?
            .grad_or_zeros()
            .mul_scalar(self.factor);
        Some(match self.factor_on_gpu.clone() {
            Some(factor) => scaled(grad, factor),
            None => grad,
        })
    }

    /// As [`get`](Self::get), after the range of the flattened local parameter.
    pub fn kept(&self, path: &str) -> Option<(Range<usize>, Tensor<1>)> {
        let range = self.entries.get(path)?.kept.clone();
        Some((range, self.get(path)?))
    }

    /// The paths that have gradients, in order.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }
}

struct Collect<'a> {
    plan: &'a ShardPlan,
    sharding: &'a Sharding,
    entries: BTreeMap<String, ParamGrad>,
}

impl FloatVisitor for Collect<'_> {
    fn visit<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        let spec = self
            .plan
            .get(&path)
            .expect("the plan was validated")
            .clone();
        if param.val().is_require_grad() {
            let device = param.val().device().inner();
            let dtype = DType::F32;
            let kept = self
                .sharding
                .kept(&path, param.val().shape().num_elements());
            let own = None;
            let sum = None;
            let main_grad = None;
            self.entries.insert(
                path,
                ParamGrad {
                    spec,
                    device,
                    dtype,
                    kept,
                    own,
                    sum,
                    main_grad,
                },
            );
        }
    }
}

struct Accumulate<'a> {
    entries: &'a mut BTreeMap<String, ParamGrad>,
    overlap: Option<&'a Overlap>,
    grads: &'a mut Gradients,
}

impl FloatVisitor for Accumulate<'_> {
    fn visit<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        let Some(entry) = self.entries.get_mut(&path) else {
            return;
        };
        let Some(grad) = param.val().grad_remove(self.grads) else {
            return;
        };
        if let Some(overlap) = self.overlap {
            overlap.exclude(&path);
        }
        let grad = grad.cast(entry.dtype).flatten(0, D - 1);
        entry.own = Some(match entry.own.take() {
            Some(own) => own + grad,
            None => grad,
        });
    }
}

#[cfg(test)]
mod tests {
    use burn::{module::Module, tensor::Device};

    use super::*;
    use crate::testing::{Net, plan_of, values};

    #[test]
    fn micro_batches_add_up_and_a_missing_gradient_is_zero() {
        let device = Device::default().autodiff();
        let net = Net::new(3, 4, 0, 1, &device);
        let mut sum =
            GradientAccumulator::new(&net, &plan_of(3, 4, 0, 1), &Sharding::none()).unwrap();
        for scale in [1.0f32, 2.5, -0.25] {
            let loss = net.matrix.val().sum().mul_scalar(scale);
            sum.accumulate(&net, &mut loss.backward());
        }
        assert_eq!(values(sum.get("matrix").unwrap()), [3.25; 12]);
        assert_eq!(values(sum.get("bias").unwrap()), [0.0; 4]);
        sum.scale(0.5);
        assert_eq!(values(sum.get("matrix").unwrap()), [1.625; 12]);
        sum.reset();
        assert_eq!(values(sum.get("matrix").unwrap()), [0.0; 12]);
    }

    #[test]
    fn a_frozen_parameter_has_no_gradient() {
        let device = Device::default().autodiff();
        let mut net = Net::new(3, 4, 0, 1, &device);
        net.bias = net.bias.set_require_grad(false);
        let sum = GradientAccumulator::new(&net, &plan_of(3, 4, 0, 1), &Sharding::none()).unwrap();
        assert_eq!(sum.paths().collect::<Vec<_>>(), ["matrix"]);
        assert!(sum.get("bias").is_none());
        let frozen = net.no_grad();
        let sum =
            GradientAccumulator::new(&frozen, &plan_of(3, 4, 0, 1), &Sharding::none()).unwrap();
        assert_eq!(sum.paths().count(), 0);
    }

    #[test]
    fn bf16_gradients_are_summed_in_f32() {
        let device = Device::default().autodiff();
        let mut net = Net::new(2, 2, 0, 1, &device);
        net.matrix = net
            .matrix
            .map(|t| t.inner().cast(DType::BF16).autodiff().require_grad());
        let mut sum =
            GradientAccumulator::new(&net, &plan_of(2, 2, 0, 1), &Sharding::none()).unwrap();
        // 256 + 1 is not representable in bf16.
        for scale in [256.0f32, 1.0] {
            let loss = net.matrix.val().sum().mul_scalar(scale);
            sum.accumulate(&net, &mut loss.backward());
        }
        assert_eq!(values(sum.get("matrix").unwrap()), [257.0; 4]);

        let mut narrow =
            GradientAccumulator::new(&net, &plan_of(2, 2, 0, 1), &Sharding::none()).unwrap();
        narrow = narrow.with_dtype(FloatDType::BF16).unwrap();
        for scale in [256.0f32, 1.0] {
            let loss = net.matrix.val().sum().mul_scalar(scale);
            narrow.accumulate(&net, &mut loss.backward());
        }
        for (path, expected) in [("matrix", 256.0), ("bias", 0.0)] {
            let sum = narrow.get(path).unwrap();
            assert_eq!(sum.dtype(), DType::BF16);
            assert!(
                values(sum.cast(DType::F32))
                    .into_iter()
                    .all(|x| x == expected)
            );
        }
    }
}
