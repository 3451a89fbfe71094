//! Tables of addresses in GPU memory, for kernels on more tensors than fit into their arguments.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use crate::{
    host::staged,
    queue::{CudaQueue, Op},
    tensor,
};

/// An entry of a [`table`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// The address of the first element of a tensor, given by its index.
    Address(usize),
    /// The address this number of bytes after the first element of a tensor.
    Offset(usize, u64),
    /// A plain number.
    Number(u64),
}

/// How the kernel that uses a table accesses the tensors in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The tensors are read.
    Read,
    /// The tensors are written, or read and written.
    Write,
}

/// Builds a table of `entries` in GPU memory, for kernels that are launched after this call.
///
/// The tensors must stay alive until those kernels are launched, and nothing may be allocated in
/// between, because an allocation may move them. A tensor that was never written makes the table
/// fail, and with it everything computed from it. Tensors that a kernel writes through a table are
/// not among its arguments; [`written_by`] records which kernel wrote them.
///
/// # Shapes
/// `[entries.len()]` in u64, on the device of the first tensor.
///
/// # Panics
/// If the first tensor is not on a CUDA device, or an index is out of range.
pub fn table(tensors: &[CubeTensor], access: Access, entries: Vec<Entry>) -> CubeTensor {
    let queue = CudaQueue::of(&tensors[0]).expect("the first tensor must be on a CUDA device");
    let table = tensor::empty(&tensors[0], [entries.len()], DType::U64);
    let num_tensors = tensors.len();
    let len = entries.len();
    let op = Op::new(move || format!("a table of {len} entries for {num_tensors} tensors"));
    let op = tensors
        .iter()
        .fold(op.writes(&table), |op, tensor| match access {
            Access::Read => op.reads(tensor),
            Access::Write => op.writes(tensor),
        });
    queue.enqueue(op, move |stream, buffers| {
        let (table, others) = buffers
            .writes
            .split_first()
            .expect("the table is the first output");
        let tensors = if access == Access::Read {
            &buffers.reads
        } else {
            others
        };
        let number = |entry| match entry {
            Entry::Address(i) => tensors[i].ptr,
            Entry::Offset(i, bytes) => tensors[i].ptr + bytes,
            Entry::Number(number) => number,
        };
        let numbers: Vec<u64> = entries.into_iter().map(number).collect();
        // SAFETY: the table was allocated for this number of entries, and only work that is
        // enqueued from now on reads it.
        unsafe { staged::copy(&numbers, table.ptr, stream) }
    });
    table
}

/// Records that `tensors` were written, through a [`table`], by the kernel that wrote `done`. If
/// that kernel failed, or could not run because one of its inputs was never written, the failure
/// carries over to the tensors.
///
/// # Panics
/// If `done` is not on a CUDA device.
pub fn written_by(done: &CubeTensor, tensors: &[CubeTensor]) {
    let queue = CudaQueue::of(done).expect("the tensor must be on a CUDA device");
    let len = tensors.len();
    let op = Op::new(move || format!("{len} tensors written by a kernel")).reads(done);
    queue.enqueue(tensors.iter().fold(op, Op::writes), |_, _| Ok(()));
}
