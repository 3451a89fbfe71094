//! Attention through cuDNN's fused engines, beside CubeCL's kernels: bf16 and f16, causal or whole,
//! grouped queries, tensors where they are.
//!
//! cuDNN is loaded when it is first asked for: the newest `libcudnn.so.9` in the loader's folders and in
//! Python's wheels, or the one that [`VARIABLE`] names. It is told of an attention as a graph of
//! operations in its C interface, and asked for an engine; the plan is kept for all attentions of
//! the same shapes and strides. What it cannot is an error before anything is launched, so that the
//! caller can take another way.
//!
//! The backward sums gradients of queries by atomics: other last bits each time.

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
    CudaError, CudaQueue, Op,
    tensor::{contiguous, empty},
};
pub use api::{FoundCudnn, found, is_available};
pub use attention::{AttentionShape, Heads};
pub use choice::VARIABLE;
use library::{AttentionPass, Workspaces};

impl AttentionShape {
    /// The attention of these tensors.
    ///
    /// # Shapes
    /// `q: [s_q, b, hq, d]`, `k: [s_k, b, hkv, d]`, `v: [s_k, b, hkv, d_v]`, their heads contiguous
    /// and 16 bytes the measure of all else
    ///
    /// # Errors
    /// cuDNN does not take such tensors.
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
            return Err(refused("its tensors have not four dimensions".into()));
        };
        if [k, v].iter().any(|x| x.dtype != q.dtype) {
            return Err(refused("its tensors are of several types".into()));
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

/// What cuDNN said of each attention that it was asked for.
static ANSWERS: LazyLock<Mutex<HashMap<(DeviceId, AttentionShape), Answer>>> =
    LazyLock::new(Mutex::default);

type Answer = Result<Workspaces, CudaError>;

fn answers() -> MutexGuard<'static, HashMap<(DeviceId, AttentionShape), Answer>> {
    ANSWERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says in the log, once for each reason, that CubeCL's kernel computes an attention in cuDNN's stead: as a
/// warning where cuDNN was asked for by name.
pub fn fallback_reason(why: &'static str, by_name: bool) {
    static SAID: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.contains(&why) {
        return;
    }
    said.push(why);
    let text =
        format!("attention with {why} goes through CubeCL's kernel: cuDNN is not used for it");
    if by_name {
        tracing::warn!("{text}")
    } else {
        tracing::info!("{text}")
    }
}

/// For how many attentions this process has plans of cuDNN's.
pub fn num_plans() -> usize {
    answers().values().filter(|answer| answer.is_ok()).count()
}

/// About how many attentions cuDNN was asked in this process, whatever it said.
pub fn num_asked() -> usize {
    answers().len()
}

/// Whether it was asked about this one.
pub fn is_known(inputs: [&CubeTensor; 3], causal: bool) -> bool {
    let key = |attention| Some((CudaQueue::of(inputs[0])?.device_id(), attention));
    let key = AttentionShape::of(inputs, causal).ok().and_then(key);
    key.is_some_and(|key| answers().contains_key(&key))
}

/// The queue of the tensor's GPU, and what both directions take there. The first time for a shape it
/// waits for the device thread, a second or two.
fn prepared(
    attention: AttentionShape,
    on: &CubeTensor,
) -> Result<(CudaQueue, Workspaces), CudaError> {
    let Some(queue) = CudaQueue::of(on) else {
        return Err(CudaError::Refused(format!(
            "{attention}: it is on no CUDA device"
        )));
    };
    let key = (queue.device_id(), attention);
    let known = answers().get(&key).cloned();
    let answer = known.unwrap_or_else(|| {
        // Unlocked: the device thread may have to wait for another rank, and that for an answer.
        let answer = queue.on_device_thread(|| library::prepare(&attention));
        let answer = answer.map_err(|error| CudaError::Refused(format!("{attention}: {error}")));
        if let Err(error) = &answer {
            tracing::warn!("{error}");
        }
        answers().entry(key).or_insert(answer).clone()
    });
    answer.map(|workspaces| (queue, workspaces))
}

/// `softmax(q k^T * scale) v` and the natural logarithms of the sums of exponentials.
///
/// # Shapes
/// - inputs as of [`AttentionShape::of`]
/// - result: `[s_q, b, hq, d_v]`, and `[b, hq, s_q]` in f32
///
/// # Errors
/// cuDNN is not there, or cannot compute this or its gradients. What fails later is found by the next
/// read of a result.
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

/// The gradients of `q`, `k` and `v` of a [`forward`], each without padding.
///
/// # Shapes
/// - inputs, `out` and `lse` as of [`forward`], where that left them
/// - `dout`: `[s_q, b, hq, d_v]`
///
/// # Errors
/// As [`forward`].
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

/// One pass over some tensors.
#[derive(Clone, Copy, Debug)]
struct Call {
    attention: AttentionShape,
    pass: AttentionPass,
    scale: f32,
}

impl Call {
    /// Tensors in the order of [`AttentionPass::roles`].
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
        // An empty tensor has no address.
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
