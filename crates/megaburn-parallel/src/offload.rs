//! Activation offload: activations wait for backward in host memory.

#[cfg(feature = "cuda")]
use std::collections::VecDeque;
use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use burn::tensor::Tensor;
use megaburn_autograd::RecomputeFn;
#[cfg(feature = "cuda")]
use {
    burn::backend::Cube,
    megaburn_cuda::{
        AsyncOp, CudaQueue,
        host::{D2hCopy, HostTensor},
        tensor::{from_backend, into_backend},
    },
};

use crate::recomputable::Recomputable;

/// Offloads the inputs of [recomputed](crate::recomputed) parts until backward needs them. On GPUs
/// they wait in pinned host memory: the copy to the host overlaps the parts that follow, and the
/// copy back overlaps the backward of the following part. If the host has no pinned memory left,
/// they stay on the GPU. On CPUs nothing moves.
///
/// An instance belongs to the passes of one thread; clones share its state.
///
/// Source: Megatron-LM `--cpu-offloading-num-layers`,
/// `megatron/core/pipeline_parallel/fine_grained_activation_offload.py`.
#[derive(Clone, Debug, Default)]
pub struct ActivationOffload(Arc<Mutex<OffloadState>>);

#[derive(Default)]
struct OffloadState {
    /// The last part that this forward pass offloaded.
    last: Option<Weak<OffloadedActivation>>,
    /// Copies to the host in flight, oldest first.
    #[cfg(feature = "cuda")]
    leaving: VecDeque<D2hCopy>,
}

/// Tensors in flight to the host at a time: the residual stream before a part and its last term,
/// while that part is computed. Their GPU memory is held until further tensors are offloaded or
/// backward starts.
#[cfg(feature = "cuda")]
const LEAVING: usize = 2;

/// The offloaded inputs of a part.
struct OffloadedActivation {
    tensors: Vec<Mutex<SavedTensor>>,
    /// The part before it, whose inputs backward needs next.
    before: Option<Weak<OffloadedActivation>>,
}

#[allow(
    clippy::large_enum_variant,
    reason = "there is one per model part and micro-batch"
)]
enum SavedTensor {
    Here(Tensor<2>),
    #[cfg(feature = "cuda")]
    OnHost(HostTensor, [usize; 2]),
    #[cfg(feature = "cuda")]
    Coming(AsyncOp, [usize; 2]),
    /// Already taken: backward needs it once.
    Gone,
}

impl ActivationOffload {
    /// Starts a forward pass. Backward must visit its parts in the opposite order.
    pub fn begin(&self) {
        self.lock().last = None;
    }

    /// Offloads `tensors` as inputs of a part. With `keep_on_device` they stay there; this is for
    /// the part with which backward starts, which would only wait for them.
    pub fn inputs<const N: usize>(
        &self,
        tensors: [Tensor<3>; N],
        keep_on_device: bool,
    ) -> [Recomputable<3>; N] {
        if !tensors.iter().all(|x| x.device().is_autodiff()) {
            return tensors.map(Recomputable::from);
        }
        let mut state = self.lock();
        let held = tensors.iter().map(|x| {
            let rows = x.clone().inner().flatten(0, 1);
            Mutex::new(if keep_on_device {
                SavedTensor::Here(rows)
            } else {
                state.offload(rows)
            })
        });
        let tensors_held = held.collect();
        let kept = Arc::new(OffloadedActivation {
            tensors: tensors_held,
            before: state.last.take(),
        });
        state.last = Some(Arc::downgrade(&kept));
        let mut places = 0..N;
        tensors.map(|x| {
            let offload = self.clone();
            let kept = kept.clone();
            let place = places.next().expect("there is one place per tensor");
            let take = move || {
                offload.release();
                kept.take(place)
            };
            Recomputable::recomputed(x, RecomputeFn::new(take))
        })
    }

    /// Frees the GPU memory of the last copies to the host: the forward pass is over.
    fn release(&self) {
        #[cfg(feature = "cuda")]
        self.lock().leaving.clear();
    }

    fn lock(&self) -> MutexGuard<'_, OffloadState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OffloadState {
    #[cfg(feature = "cuda")]
    fn offload(&mut self, x: Tensor<2>) -> SavedTensor {
        let on_gpu = x
            .clone()
            .try_into_primitive::<Cube>()
            .ok()
            .map(from_backend);
        let on_gpu = on_gpu.filter(|x| CudaQueue::of(x).is_some() && x.meta.num_elements() > 0);
        let Some((on_gpu, mut host)) =
            on_gpu.and_then(|x| Some((x.clone(), HostTensor::like(&x).ok()?)))
        else {
            return SavedTensor::Here(x);
        };
        let shape = x.dims();
        drop(x);
        self.leaving.push_back(host.store(on_gpu));
        while self.leaving.len() > LEAVING {
            self.leaving.pop_front();
        }
        SavedTensor::OnHost(host, shape)
    }

    #[cfg(not(feature = "cuda"))]
    #[allow(clippy::unused_self, reason = "used with the feature `cuda`")]
    fn offload(&mut self, x: Tensor<2>) -> SavedTensor {
        SavedTensor::Here(x)
    }
}

impl OffloadedActivation {
    /// Starts copying back what is not in flight yet.
    fn fetch(&self) {
        #[cfg(feature = "cuda")]
        for held in &self.tensors {
            let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
            if let SavedTensor::OnHost(host, shape) = &*held {
                *held = SavedTensor::Coming(host.fetch(), *shape);
            }
        }
    }

    /// Returns one of the tensors, and starts fetching the tensors of the part before it.
    fn take(&self, place: usize) -> Tensor<2> {
        self.fetch();
        if let Some(before) = self.before.as_ref().and_then(Weak::upgrade) {
            before.fetch();
        }
        let mut held = self.tensors[place]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *held, SavedTensor::Gone) {
            SavedTensor::Here(x) => x,
            #[cfg(feature = "cuda")]
            SavedTensor::Coming(started, shape) => {
                let x = Tensor::<1>::from_primitive::<Cube>(into_backend(started.wait()));
                x.reshape(shape)
            }
            #[cfg(feature = "cuda")]
            SavedTensor::OnHost(..) => unreachable!("the tensor has been fetched"),
            SavedTensor::Gone => unreachable!("backward runs only once through a graph"),
        }
    }
}

impl fmt::Debug for OffloadState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").finish_non_exhaustive()
    }
}
