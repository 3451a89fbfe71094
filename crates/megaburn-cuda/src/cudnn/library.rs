//! cuDNN on a device thread: its handle, and the plans for all shapes used so far.

use std::{cell::RefCell, collections::HashMap, ffi::c_void, ptr};

use super::{
    api::Api,
    attention::AttentionShape,
    graph::{ALIGNMENT, Number, Role},
    names::{Address, DataType, Handle},
    plan::{self, Plan, Target},
};
use crate::{
    error::CudaError,
    queue::{Buffers, RawBuffer},
    streams::Stream,
};

/// The forward or backward pass of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttentionPass {
    Forward,
    Backward,
}

impl AttentionPass {
    /// The tensors that the pass reads, and those that it writes; the workspace follows them.
    pub(super) fn roles(self) -> (&'static [Role], &'static [Role]) {
        use Role::*;
        match self {
            Self::Forward => (&[Queries, Keys, Values], &[Out, Lse]),
            Self::Backward => (
                &[Queries, Keys, Values, Out, Lse, OutGradient],
                &[
                    QueriesGradient,
                    KeysGradient,
                    ValuesGradient,
                    Delta,
                    QueriesSum,
                ],
            ),
        }
    }
}

/// The plans for both passes of an attention.
#[derive(Debug)]
struct Plans {
    forward: Plan,
    backward: Plan,
}

impl Plans {
    fn workspaces(&self) -> Workspaces {
        Workspaces {
            forward: self.forward.workspace,
            backward: self.backward.workspace,
        }
    }
}

/// cuDNN's state on a device thread. It lives as long as the thread, i.e. as the process.
struct Library {
    api: &'static Api,
    handle: Handle,
    plans: HashMap<AttentionShape, Plans>,
}

thread_local! {
    static LIBRARY: RefCell<Option<Library>> = const { RefCell::new(None) };
}

fn with<T>(task: impl FnOnce(&mut Library) -> Result<T, CudaError>) -> Result<T, CudaError> {
    LIBRARY.with_borrow_mut(|library| {
        let library = match library {
            Some(library) => library,
            None => {
                let api = Api::get()?;
                let handle = plan::handle(api)?;
                library.insert(Library {
                    api,
                    handle,
                    plans: HashMap::new(),
                })
            }
        };
        task(library)
    })
}

/// The device memory that the passes need in addition to their tensors, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Workspaces {
    pub(super) forward: u64,
    pub(super) backward: u64,
}

/// Builds the plans of both passes, which takes a second or two. Call it on the device thread with
/// its context current.
pub(super) fn prepare(attention: &AttentionShape) -> Result<Workspaces, CudaError> {
    with(|library| {
        // Another thread may have built the plans already, and they may be in use.
        if let Some(plans) = library.plans.get(attention) {
            return Ok(plans.workspaces());
        }
        let api = library.api;
        let target = Target::Gpu(library.handle);
        let plans = Plans {
            forward: Plan::find(api, &target, attention.forward(api)?)?,
            backward: Plan::find(api, &target, attention.backward(api)?)?,
        };
        Ok(library
            .plans
            .entry(*attention)
            .or_insert(plans)
            .workspaces())
    })
}

/// Enqueues a pass of a prepared attention on `stream`. The buffers are in the order of
/// [`AttentionPass::roles`], with the workspace last.
pub(super) fn run(
    attention: &AttentionShape,
    pass: AttentionPass,
    scale: f32,
    stream: Stream,
    buffers: &Buffers,
) -> Result<(), CudaError> {
    let (reads, writes) = pass.roles();
    let roles = reads.iter().chain(writes);
    let mut tensors = Vec::with_capacity(reads.len() + writes.len() + 3);
    for (&role, buffer) in roles.zip(buffers.reads.iter().chain(&buffers.writes)) {
        check_bounds(attention, role, buffer)?;
        tensors.push((role as i64, on_device(buffer)));
    }
    let numbers = [
        (Number::Scale, scale),
        (Number::One, 1.0),
        (Number::Unseen, f32::NEG_INFINITY),
    ];
    let is_used = |number| match number {
        Number::Scale => true,
        Number::One => pass == AttentionPass::Backward,
        Number::Unseen => attention.causal,
    };
    for (number, value) in &numbers {
        if is_used(*number) {
            tensors.push((
                *number as i64,
                Address(ptr::from_ref(value).cast_mut().cast()),
            ));
        }
    }
    let workspace = buffers.writes[writes.len()];
    with(|library| {
        let Some(plans) = library.plans.get(attention) else {
            return Err(CudaError::Refused("its plan was not created".into()));
        };
        let plan = match pass {
            AttentionPass::Forward => &plans.forward,
            AttentionPass::Backward => &plans.backward,
        };
        if plan.workspace > workspace.bytes {
            let needed = plan.workspace;
            let found = workspace.bytes;
            return Err(CudaError::Refused(format!(
                "the workspace has {found} bytes, but the plan needs {needed}"
            )));
        }
        // SAFETY: the stream belongs to the current context.
        let status = unsafe { (library.api.set_stream)(library.handle, stream.0.cast()) };
        library.api.check("cudnnSetStream", status)?;
        // SAFETY: the tensors belong to the pass and lie inside their buffers, as checked above.
        // The queue keeps them and the workspace, which has the plan's size, alive until the stream
        // has run the pass.
        unsafe { plan.enqueue(library.api, library.handle, &tensors, on_device(&workspace)) }
    })
}

fn on_device(buffer: &RawBuffer) -> Address {
    Address(buffer.ptr as *mut c_void)
}

/// Refuses a tensor that exceeds its buffer or is not aligned to 16 bytes; cuDNN does not check
/// this.
fn check_bounds(
    attention: &AttentionShape,
    role: Role,
    buffer: &RawBuffer,
) -> Result<(), CudaError> {
    let (layout, dtype) = attention.memory(role);
    let size = if dtype == DataType::F32 { 4 } else { 2 };
    if layout.extent() as u64 * size > buffer.bytes || !buffer.ptr.is_multiple_of(ALIGNMENT as u64)
    {
        return Err(CudaError::Refused(format!(
            "{role:?} of {layout:?} does not fit in {buffer:?}"
        )));
    }
    Ok(())
}
