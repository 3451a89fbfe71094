//! Calls between pairs of members.

use std::{
    ffi::{c_int, c_void},
    ops::Range,
};

use burn_cubecl::tensor::CubeTensor;

use super::{
    api::{Api, Code},
    call::{Call, Label, elements, refused},
    communicator::Communicator,
    lane::Lane,
};
use crate::{
    async_op::AsyncOp,
    error::CudaError,
    queue::Buffers,
    streams::Stream,
    tensor::{contiguous, empty},
};

impl Communicator {
    /// Exchanges row ranges between all members: sends the ranges `send[i]` to member `i`, one
    /// message per range, and stores the messages from member `i` in the ranges `recv[i]`. An empty
    /// range is no message.
    ///
    /// # Shapes
    /// `[rows of all send, ..]` to `[rows of all recv, ..]`. The ranges `recv[i]` must have the
    /// lengths of those that member `i` sends here, in order; together, all `recv` ranges must
    /// cover each row once.
    /// # Errors
    /// See [`Communicator::all_reduce`]; also if ranges do not fit the tensor or the members.
    pub fn all_to_all(
        &self,
        label: Label,
        x: CubeTensor,
        send: &[Vec<Range<usize>>],
        recv: &[Vec<Range<usize>>],
        lane: Lane,
    ) -> Result<AsyncOp, CudaError> {
        let dtype = self.data_type(&x, &label)?;
        let rows = x.meta.shape()[0];
        let size = self.members.size;
        let num_rows = recv.iter().flatten().map(Range::len).sum();
        let are_of = |all: &[Vec<Range<usize>>], rows| {
            all.len() == size && all.iter().flatten().all(|part| part.end <= rows)
        };
        if !are_of(send, rows) || !are_of(recv, num_rows) {
            let why = format!(
                "cannot send {send:?} and receive {recv:?} of {rows} rows among {size} \
                        members"
            );
            return Err(refused(&label, &why));
        }
        let x = contiguous(x);
        let out = self.rows(&x, num_rows);
        let row: usize = x.meta.shape()[1..].iter().product();
        let send = messages(send, row);
        let recv = messages(recv, row);
        let bytes = x.dtype.size();
        let call: Call = Box::new(move |api, comm, x, out, stream| {
            grouped(api, |code| {
                let code = send.into_iter().fold(code, |code, (peer, elements)| {
                    let from = x.wrapping_byte_add(elements.start * bytes);
                    let count = elements.len();
                    // SAFETY: see `Communicator::call`; the range lies inside the input.
                    code.and(|| unsafe { (api.send)(from, count, dtype, peer, comm, stream) })
                });
                recv.into_iter().fold(code, |code, (peer, elements)| {
                    let to = out.wrapping_byte_add(elements.start * bytes);
                    let count = elements.len();
                    // SAFETY: as above; the range lies inside the output.
                    code.and(|| unsafe { (api.recv)(to, count, dtype, peer, comm, stream) })
                })
            })
        });
        self.call(label, lane, x, out, call)
    }

    /// Sends a tensor to one member and receives one of the same shape from another.
    ///
    /// # Shapes
    /// Any, but equal on all members of the ring; the result has the same shape.
    /// # Errors
    /// See [`Communicator::all_reduce`].
    pub fn pass_on(
        &self,
        label: Label,
        x: CubeTensor,
        to: usize,
        from: usize,
        lane: Lane,
    ) -> Result<AsyncOp, CudaError> {
        let dtype = self.data_type(&x, &label)?;
        let to = self.peer(to, &label)?;
        let from = self.peer(from, &label)?;
        let count = elements(&x);
        let x = contiguous(x);
        let out = empty(&x, x.meta.shape().clone(), x.dtype);
        let call: Call = Box::new(move |api, comm, x, out, stream| {
            grouped(api, |code| {
                // SAFETY: see `Communicator::call`.
                let sent = code.and(|| unsafe { (api.send)(x, count, dtype, to, comm, stream) });
                // SAFETY: as above.
                sent.and(|| unsafe { (api.recv)(out, count, dtype, from, comm, stream) })
            })
        });
        self.call(label, lane, x, out, call)
    }

    /// Sends a tensor to a member, which calls [`Communicator::recv`].
    ///
    /// # Errors
    /// See [`Communicator::all_reduce`].
    pub fn send(
        &self,
        label: Label,
        x: CubeTensor,
        to: usize,
        lane: Lane,
    ) -> Result<AsyncOp, CudaError> {
        let dtype = self.data_type(&x, &label)?;
        let to = self.peer(to, &label)?;
        let count = elements(&x);
        let x = contiguous(x);
        // A send writes nothing, so its output is a dummy tensor.
        let out = empty(&x, [1], x.dtype);
        let call: Call = Box::new(move |api, comm, x, _, stream| {
            // SAFETY: see `Communicator::call`.
            unsafe { (api.send)(x, count, dtype, to, comm, stream) }
        });
        self.call(label, lane, x, out, call)
    }

    /// Receives the tensor that a member sends into `out`, which must be new, unshared memory.
    ///
    /// # Errors
    /// See [`Communicator::all_reduce`].
    pub fn recv(
        &self,
        label: Label,
        out: CubeTensor,
        from: usize,
        lane: Lane,
    ) -> Result<AsyncOp, CudaError> {
        let dtype = self.data_type(&out, &label)?;
        let from = self.peer(from, &label)?;
        let count = elements(&out);
        if count == 0 {
            return Ok(AsyncOp::done(out));
        }
        let queue = self.queue_of(&out, &label)?;
        let op = self.op(&label).writes(&out);
        let calls = self.calls.clone();
        let id = label.id;
        let make = move |stream: Stream, buffers: &Buffers| {
            let out = buffers.writes[0].ptr as *mut c_void;
            // SAFETY: see `Communicator::call`.
            let call = move |api: &Api, comm| unsafe {
                (api.recv)(out, count, dtype, from, comm, stream.0.cast())
            };
            calls.make(id, stream, call)
        };
        self.start(&queue, label, lane, op, out, make)
    }
}

/// Runs `calls` as one NCCL group: they start together, so their order cannot deadlock.
fn grouped(api: &Api, calls: impl FnOnce(Code) -> Code) -> Code {
    // SAFETY: a group may be started anywhere; it is ended on every path.
    let code = calls(unsafe { (api.group_start)() });
    // SAFETY: the group was started.
    let end = unsafe { (api.group_end)() };
    if code.is_fine() { end } else { code }
}

/// Converts the row ranges of each member to element ranges; empty ranges are dropped.
fn messages(of_members: &[Vec<Range<usize>>], row: usize) -> Vec<(c_int, Range<usize>)> {
    let all = of_members.iter().enumerate().flat_map(|(peer, stretches)| {
        let elements = stretches
            .iter()
            .map(move |rows| rows.start * row..rows.end * row);
        elements.map(move |elements| (peer as c_int, elements))
    });
    all.filter(|(_, elements)| !elements.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_are_messages_in_their_order() {
        let of_members = [vec![0..2, 7..8], vec![2..2, 3..3], vec![5..7, 2..5]];
        let expected = [(0, 0..10), (0, 35..40), (2, 25..35), (2, 10..25)];
        assert_eq!(messages(&of_members, 5), expected);
        assert!(messages(&of_members, 0).is_empty() && messages(&[], 3).is_empty());
    }
}
