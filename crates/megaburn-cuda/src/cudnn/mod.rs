//! Attention through cuDNN's fused engines, as an alternative to CubeCL's kernels: bf16 and f16,
//! causal or full, grouped queries, strided inputs without copies.
//!
//! cuDNN is loaded on first use: the newest `libcudnn.so.9` in the loader's folders and in Python's
//! wheels, or the one that [`VARIABLE`] names. An attention is described as a graph of operations
//! through cuDNN's C interface, which returns an engine; the plan is reused for all attentions with
//! the same shapes and strides. If cuDNN cannot compute an attention, the call returns an error
//! before anything is launched, so that the caller can use another kernel.
//!
//! The backward pass sums the gradients of queries with atomics, so their last bits vary between
//! runs.

mod api;
mod attention;
mod choice;
mod descriptor;
mod files;
mod graph;
mod library;
mod names;
mod plan;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    fmt,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
};

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl_common::device::DeviceId;

use crate::{
    error::CudaError,
    queue::{CudaQueue, Op},
    tensor::{contiguous, empty},
};
pub use api::{FoundCudnn, found, is_available, others};
pub use attention::{AttentionShape, Heads};
pub use choice::VARIABLE;
use library::{AttentionPass, Workspaces};

impl AttentionShape {
    /// The attention of these tensors.
    ///
    /// # Shapes
    /// `q: [s_q, b, hq, d]`, `k: [s_k, b, hkv, d]`, `v: [s_k, b, hkv, d_v]`; the last dimension is
    /// contiguous, and the other strides are multiples of 8 elements (16 bytes).
    ///
    /// # Errors
    /// cuDNN does not support such tensors.
    pub fn of([q, k, v]: [&CubeTensor; 3], causal: bool) -> Result<Self, CudaError> {
        let heads = |x: &CubeTensor| -> Option<Heads> {
            let sizes = x.meta.shape().as_slice().try_into().ok()?;
            Some(Heads {
                sizes,
                strides: x.meta.strides().as_ref().try_into().ok()?,
            })
        };
        let refused = |why: String| {
            let shapes = [q, k, v].map(|x| x.meta.shape().as_slice().to_vec());
            CudaError::Refused(format!("attention of {shapes:?} through cuDNN: {why}"))
        };
        let (Some(of_q), Some(of_k), Some(of_v)) = (heads(q), heads(k), heads(v)) else {
            return Err(refused("its tensors must have four dimensions".into()));
        };
        if [k, v].iter().any(|x| x.dtype != q.dtype) {
            return Err(refused(
                "its tensors must have the same element type".into(),
            ));
        }
        Self::new([of_q, of_k, of_v], q.dtype, causal).map_err(refused)
    }
}

impl fmt::Display for AttentionShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.causal { "causal " } else { "" };
        let dtype = self.dtype.name();
        let [q, k, v] = [self.q, self.k, self.v].map(|heads| heads.sizes);
        write!(
            f,
            "{kind}attention of {q:?}, {k:?}, {v:?} {dtype} through cuDNN"
        )
    }
}

/// cuDNN's answer for each attention that it was asked for.
static ANSWERS: LazyLock<Mutex<HashMap<(DeviceId, AttentionShape), Answer>>> =
    LazyLock::new(Mutex::default);

type Answer = Result<Workspaces, CudaError>;

fn answers() -> MutexGuard<'static, HashMap<(DeviceId, AttentionShape), Answer>> {
    ANSWERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Logs, once per reason, that CubeCL's kernel computes an attention instead of cuDNN. It is a
/// warning if cuDNN was requested by name.
pub fn fallback_reason(why: &'static str, by_name: bool) {
    static SAID: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.contains(&why) {
        return;
    }
    said.push(why);
    let text = format!("attention with {why} runs in CubeCL's kernel, not in cuDNN");
    if by_name {
        tracing::warn!("{text}")
    } else {
        tracing::info!("{text}")
    }
}

/// The number of attentions for which this process has cuDNN plans.
pub fn num_plans() -> usize {
    answers().values().filter(|answer| answer.is_ok()).count()
}

/// The number of attentions that this process has asked cuDNN for, whatever the answer.
pub fn num_asked() -> usize {
    answers().len()
}

/// Whether cuDNN was asked for this attention.
pub fn is_known(inputs: [&CubeTensor; 3], causal: bool) -> bool {
    let key = |attention| Some((CudaQueue::of(inputs[0])?.device_id(), attention));
    let key = AttentionShape::of(inputs, causal).ok().and_then(key);
    key.is_some_and(|key| answers().contains_key(&key))
}

/// The queue of the tensor's GPU, and the workspaces of both passes. The first call for a shape
/// waits a second or two for the device thread.
fn prepared(
    attention: AttentionShape,
    on: &CubeTensor,
) -> Result<(CudaQueue, Workspaces), CudaError> {
    let Some(queue) = CudaQueue::of(on) else {
        return Err(CudaError::Refused(format!(
            "{attention}: its tensors are not on a CUDA device"
        )));
    };
    let key = (queue.device_id(), attention);
    let known = answers().get(&key).cloned();
    let answer = known.unwrap_or_else(|| {
        // Not locked here: the device thread may have to wait for another rank, which may in turn
        // wait for this lock.
        let answer = queue.on_device_thread(|| library::prepare(&attention));
        let answer = answer.map_err(|error| CudaError::Refused(format!("{attention}: {error}")));
        if let Err(error) = &answer {
            tracing::warn!("{error}");
        }
        answers().entry(key).or_insert(answer).clone()
    });
    answer.map(|workspaces| (queue, workspaces))
}

/// Computes `softmax(q k^T * scale) v` and the LSE (natural logarithm).
///
/// # Shapes
/// - inputs: see [`AttentionShape::of`]
/// - result: `[s_q, b, hq, d_v]`, and `[b, hq, s_q]` in f32
///
/// # Errors
/// cuDNN is missing, or cannot compute this attention or its gradients. Later failures surface at
/// the next read of a result.
pub fn forward(
    inputs: [&CubeTensor; 3],
    causal: bool,
    scale: f32,
) -> Result<[CubeTensor; 2], CudaError> {
    let attention = AttentionShape::of(inputs, causal)?;
    let [q, _, _] = inputs;
    let (queue, workspaces) = prepared(attention, q)?;
    let [s_q, b, hq, _] = attention.q.sizes;
    let [.., d_v] = attention.v.sizes;
    let out = empty(q, [s_q, b, hq, d_v], q.dtype);
    let lse = empty(q, [b, hq, s_q], DType::F32);
    let call = Call {
        attention,
        pass: AttentionPass::Forward,
        scale,
    };
    call.submit(&queue, &inputs, &[&out, &lse], workspaces.forward);
    Ok([out, lse])
}

/// Computes the gradients of `q`, `k` and `v` of a [`forward`], without padding.
///
/// # Shapes
/// - inputs, `out` and `lse`: as in [`forward`], at the addresses it used
/// - `dout`: `[s_q, b, hq, d_v]`
///
/// # Errors
/// See [`forward`].
pub fn backward(
    inputs: [&CubeTensor; 3],
    out: &CubeTensor,
    lse: &CubeTensor,
    dout: CubeTensor,
    causal: bool,
    scale: f32,
) -> Result<[CubeTensor; 3], CudaError> {
    let attention = AttentionShape::of(inputs, causal)?;
    let [q, k, v] = inputs;
    let (queue, workspaces) = prepared(attention, q)?;
    let [out, lse, dout] = [out.clone(), lse.clone(), dout].map(contiguous);
    let gradients = inputs.map(|x| empty(x, x.meta.shape().clone(), x.dtype));
    let [s_q, b, hq, d] = attention.q.sizes;
    let delta = empty(q, [b, hq, s_q], DType::F32);
    let sum = empty(q, [b, hq, s_q, d], DType::F32);
    let call = Call {
        attention,
        pass: AttentionPass::Backward,
        scale,
    };
    let [dq, dk, dv] = &gradients;
    let reads = [q, k, v, &out, &lse, &dout];
    let writes = [dq, dk, dv, &delta, &sum];
    call.submit(&queue, &reads, &writes, workspaces.backward);
    Ok(gradients)
}

/// One pass of an attention, ready to be enqueued.
#[derive(Clone, Copy, Debug)]
struct Call {
    attention: AttentionShape,
    pass: AttentionPass,
    scale: f32,
}

impl Call {
    /// Enqueues the pass. The tensors are in the order of [`AttentionPass::roles`].
    fn submit(
        self,
        queue: &CudaQueue,
        reads: &[&CubeTensor],
        writes: &[&CubeTensor],
        workspace: u64,
    ) {
        let Self {
            attention,
            pass,
            scale,
        } = self;
        // An empty tensor has no address, so the workspace has at least one byte.
        let workspace = empty(writes[0], [workspace.max(1) as usize], DType::U8);
        let mut op = Op::new(move || format!("{pass:?} of {attention}"));
        for tensor in reads {
            op = op.reads(tensor);
        }
        for tensor in writes {
            op = op.writes(tensor);
        }
        queue.enqueue(op.writes(&workspace), move |stream, buffers| {
            library::run(&attention, pass, scale, stream, buffers)
        });
    }
}
