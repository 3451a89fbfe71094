//! The common parts of all calls of a communicator: label, stream and checks.

use std::{
    ffi::{c_int, c_void},
    fmt,
    sync::Arc,
};

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t};

use super::{
    api::{Api, Code},
    communicator::Communicator,
    lane::Lane,
};
use crate::{
    async_op::{AsyncOp, Done, Join},
    error::CudaError,
    events::PooledEvent,
    queue::{Buffers, CudaQueue, Op, Retained},
    streams::Stream,
    tensor::empty,
};

/// Identifies a call.
#[derive(Clone, Debug)]
pub struct Label {
    /// The id under which the watchdog's observer knows the call.
    pub id: u64,
    /// Operation, shapes and group, for messages.
    pub text: Arc<str>,
}

impl Label {
    /// Creates a label.
    pub fn new(id: u64, text: impl Into<Arc<str>>) -> Self {
        Self {
            id,
            text: text.into(),
        }
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Whether collectives support elements of this type.
pub fn takes(dtype: DType) -> bool {
    data_type(dtype).is_some()
}

fn data_type(dtype: DType) -> Option<ncclDataType_t> {
    Some(match dtype {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::U8 => ncclDataType_t::ncclUint8,
        _ => return None,
    })
}

/// A call into NCCL. Its pointers are the input, the output and the stream.
pub(super) type Call =
    Box<dyn FnOnce(&Api, ncclComm_t, *const c_void, *mut c_void, *mut c_void) -> Code + Send>;

impl Communicator {
    /// Enqueues `call` on the addresses of `x` and `out`.
    ///
    /// The call is safe for these reasons. The communicator is live during the call: the thread
    /// that ends it waits for the call and frees nothing if the call does not return
    /// ([`super::handles`]). The buffers are not moved or freed before the stream has run the call,
    /// and they are as long as their contiguous tensors, from which the element counts are taken.
    pub(super) fn call(
        &self,
        label: Label,
        lane: Lane,
        x: CubeTensor,
        out: CubeTensor,
        call: Call,
    ) -> Result<AsyncOp, CudaError> {
        let queue = self.queue_of(&x, &label)?;
        if elements(&x) == 0 && elements(&out) == 0 {
            return Ok(AsyncOp::done(out));
        }
        let op = self.op(&label).reads(&x).writes(&out);
        let calls = self.calls.clone();
        let id = label.id;
        let make = move |stream: Stream, buffers: &Buffers| {
            let x = buffers.reads[0].ptr as *const c_void;
            let out = buffers.writes[0].ptr;
            let run = |api: &Api, comm| call(api, comm, x, out as *mut c_void, stream.0.cast());
            calls.make(id, stream, run)
        };
        self.start(&queue, label, lane, op, out, make)
    }

    /// Enqueues the call that `make` puts on the given stream, which fills `out`.
    pub(super) fn start(
        &self,
        queue: &CudaQueue,
        label: Label,
        lane: Lane,
        op: Op,
        out: CubeTensor,
        make: impl FnOnce(Stream, &Buffers) -> Result<Arc<PooledEvent>, CudaError> + Send + 'static,
    ) -> Result<AsyncOp, CudaError> {
        let started = match lane {
            Lane::InOrder => {
                queue.enqueue(op, move |stream, buffers| make(stream, buffers).map(drop));
                AsyncOp::done(out)
            }
            Lane::Overlapped => {
                let side = self.side_stream()?;
                let retained = Retained::default();
                let done = Done::default();
                let point = done.clone();
                queue.enqueue_retaining(op, &retained, move |stream, buffers| {
                    side.wait_for(stream)?;
                    *point
                        .lock()
                        .expect("no thread panics while holding the lock") =
                        Some(make(side, buffers)?);
                    Ok(())
                });
                AsyncOp::overlapped(out, Join::new(queue.clone(), label.text, done, retained))
            }
        };
        queue.flush();
        Ok(started)
    }

    pub(super) fn op(&self, label: &Label) -> Op {
        let text = label.text.clone();
        let calls = self.calls.clone();
        Op::new(move || text.to_string()).on_failure(move |why| calls.note_fault(&cause(why)))
    }

    /// An empty tensor like `x` with another number of rows.
    pub(super) fn rows(&self, x: &CubeTensor, rows: usize) -> CubeTensor {
        let mut shape = x.meta.shape().clone();
        shape[0] = rows;
        empty(x, shape, x.dtype)
    }

    pub(super) fn queue_of(&self, x: &CubeTensor, label: &Label) -> Result<CudaQueue, CudaError> {
        let queue = CudaQueue::of(x);
        let same = queue.filter(|queue| queue.device_id() == self.queue.device_id());
        same.ok_or_else(|| {
            refused(
                label,
                &format!(
                    "the tensor is on {:?}, not on the communicator's GPU",
                    x.device
                ),
            )
        })
    }

    pub(super) fn data_type(
        &self,
        x: &CubeTensor,
        label: &Label,
    ) -> Result<ncclDataType_t, CudaError> {
        data_type(x.dtype).ok_or_else(|| refused(label, "NCCL does not support the element type"))
    }

    pub(super) fn peer(&self, member: usize, label: &Label) -> Result<c_int, CudaError> {
        let fits = c_int::try_from(member)
            .ok()
            .filter(|_| member < self.members.size);
        fits.ok_or_else(|| {
            refused(
                label,
                &format!(
                    "member {member} does not exist: the group has {} members",
                    self.members.size
                ),
            )
        })
    }
}

pub(super) fn elements(x: &CubeTensor) -> usize {
    x.meta.shape().num_elements()
}

pub(super) fn refused(label: &Label, why: &str) -> CudaError {
    CudaError::Refused(format!("{label}: {why}"))
}

/// The text after the last "Caused by" in CubeCL's long messages, without stack traces.
fn cause(text: &str) -> String {
    let is_trace = |line: &&str| {
        let number = line.split(':').next().unwrap_or_default();
        let numbered = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        numbered
            || ["Backtrace", "No backtrace", "Asked at"]
                .iter()
                .any(|t| line.starts_with(t))
    };
    let last = text.rsplit("Caused by:").next().unwrap_or(text);
    let lines = last.lines().map(str::trim).filter(|line| !line.is_empty());
    lines
        .take_while(|line| !is_trace(line))
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_told_by_its_cause() {
        let text = "An error happened during execution\nCaused by:\n  The bytes were never written\n\
            Caused by:\n  out of device memory\n  allocating 7 bytes\n   0: core::ops\nAsked at:\n   0: main";
        assert_eq!(cause(text), "out of device memory allocating 7 bytes");
        assert_eq!(cause("plain"), "plain");
        let foreign = "group tp: all_reduce #3: NCCL failed\nBacktrace:\n   0: main";
        assert_eq!(cause(foreign), "group tp: all_reduce #3: NCCL failed");
    }

    #[test]
    fn every_type_that_models_have_is_taken() {
        let taken = [
            DType::F32,
            DType::BF16,
            DType::F16,
            DType::F64,
            DType::I32,
            DType::I64,
            DType::U8,
        ];
        assert!(taken.into_iter().all(takes));
        assert!(!takes(DType::I16));
    }
}
