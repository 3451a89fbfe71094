//! Tables that tell a kernel where many tensors are, which would be too many arguments.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use crate::{CudaQueue, Op, host::staged, tensor};

/// A number of a [`table`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Where the first element of a tensor is, by its index.
    Address(usize),
    /// So many bytes behind that.
    Offset(usize, u64),
    /// Itself.
    Number(u64),
}

/// What is done to a table's tensors by the kernel that it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// They are read.
    Read,
    /// They are written, or read and written.
    Write,
}

/// The numbers in memory of the GPU that the tensors are on, for kernels launched behind this. The tensors
/// must be held until those kernels are launched, and no memory asked for in between, for which they might be moved;
/// one that was never written fails the table, and with it
/// what is computed by it. Tensors that a kernel writes by a table are no arguments of it: [`written_by`] says
/// of what they are.
///
/// # Shapes
/// `[entries.len()]` in u64; on the device of the first tensor
///
/// # Panics
/// If the first tensor is on no CUDA device, or an index is that of no tensor.
pub fn table(tensors: &[CubeTensor], access: Access, entries: Vec<Entry>) -> CubeTensor {
    let queue = CudaQueue::of(&tensors[0]).expect("a table is asked for where a GPU is");
    let table = tensor::empty(&tensors[0], [entries.len()], DType::U64);
    let num_tensors = tensors.len();
    let len = entries.len();
    let op = Op::new(move || format!("a table of {len} numbers for {num_tensors} tensors"));
    let op = tensors
        .iter()
        .fold(op.writes(&table), |op, tensor| match access {
            Access::Read => op.reads(tensor),
            Access::Write => op.writes(tensor),
        });
    queue.enqueue(op, move |stream, buffers| {
        let (table, others) = buffers.writes.split_first().expect("the table is written");
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
        // SAFETY: the table has room for as many numbers as it was made for, and only what is put on the
        // stream from now on reads it.
        unsafe { staged::copy(&numbers, table.ptr, stream) }
    });
    table
}

/// Says that tensors were written by the kernel that wrote `done`, which knew them by a [`table`]: if it failed, or
/// could not run because something that it reads was never written, that goes on in them.
///
/// # Panics
/// If `done` is on no CUDA device.
pub fn written_by(done: &CubeTensor, tensors: &[CubeTensor]) {
    let queue = CudaQueue::of(done).expect("a kernel wrote it");
    let len = tensors.len();
    let op = Op::new(move || format!("{len} tensors that a kernel wrote")).reads(done);
    queue.enqueue(tensors.iter().fold(op, Op::writes), |_, _| Ok(()));
}
