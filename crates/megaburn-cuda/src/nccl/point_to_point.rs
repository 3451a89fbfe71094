//! Calls between pairs of members.

use std::{
    ffi::{c_int, c_void},
    ops::Range,
};

use burn_cubecl::tensor::CubeTensor;

use super::{
    Communicator,
    api::{Api, Code},
    call::{Call, Label, elements, refused},
    lane::Lane,
};
use crate::{
    Buffers, CudaError, Started,
    streams::Stream,
    tensor::{contiguous, empty},
};

impl Communicator {
    /// Sends `send[i]` rows to member `i`, one stretch behind the other, and puts the `recv[i]` rows
    /// that come from member `i` one behind the other. Zero rows are no message.
    ///
    /// # Shapes
    /// `[sum of send, ..]` to `[sum of recv, ..]`; `recv[i]` is what member `i` sends here.
    /// # Errors
    /// As [`Communicator::all_reduce`]; counts that do not fit the tensor or the members.
    pub fn all_to_all(
        &self,
        label: Label,
        x: CubeTensor,
        send: &[usize],
        recv: &[usize],
        lane: Lane,
    ) -> Result<Started, CudaError> {
        let dtype = self.data_type(&x, &label)?;
        let (rows, size) = (x.meta.shape()[0], self.members.size);
        if send.len() != size || recv.len() != size || send.iter().sum::<usize>() != rows {
            let why =
                format!("{send:?} to send and {recv:?} to receive, of {rows} rows, by {size}");
            return Err(refused(&label, &why));
        }
        let x = contiguous(x);
        let out = self.rows(&x, recv.iter().sum());
        let row: usize = x.meta.shape()[1..].iter().product();
        let (send, recv) = (stretches(send, row), stretches(recv, row));
        let bytes = x.dtype.size();
        let call: Call = Box::new(move |api, comm, x, out, stream| {
            let parts = send.into_iter().zip(recv).enumerate();
            grouped(api, |code| {
                parts.fold(code, |code, (peer, (send, recv))| {
                    let peer = peer as c_int;
                    let from = x.wrapping_byte_add(send.start * bytes);
                    let to = out.wrapping_byte_add(recv.start * bytes);
                    let sent = code.and(|| match send.len() {
                        0 => code,
                        // SAFETY: see `Communicator::call`; the stretch lies inside the input.
                        count => unsafe { (api.send)(from, count, dtype, peer, comm, stream) },
                    });
                    sent.and(|| match recv.len() {
                        0 => sent,
                        // SAFETY: as above, inside the output.
                        count => unsafe { (api.recv)(to, count, dtype, peer, comm, stream) },
                    })
                })
            })
        });
        self.call(label, lane, x, out, call)
    }

    /// Sends a tensor to one member and receives one of the same shape from another.
    ///
    /// # Shapes
    /// Any, the same on all members of the ring; unchanged.
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn pass_on(
        &self,
        label: Label,
        x: CubeTensor,
        to: usize,
        from: usize,
        lane: Lane,
    ) -> Result<Started, CudaError> {
        let (dtype, to) = (self.data_type(&x, &label)?, self.peer(to, &label)?);
        let from = self.peer(from, &label)?;
        let (count, x) = (elements(&x), contiguous(x));
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
    /// As [`Communicator::all_reduce`].
    pub fn send(
        &self,
        label: Label,
        x: CubeTensor,
        to: usize,
        lane: Lane,
    ) -> Result<Started, CudaError> {
        let (dtype, to) = (self.data_type(&x, &label)?, self.peer(to, &label)?);
        let (count, x) = (elements(&x), contiguous(x));
        // Nothing is written: an empty tensor stands for it.
        let out = empty(&x, [1], x.dtype);
        let call: Call = Box::new(move |api, comm, x, _, stream| {
            // SAFETY: see `Communicator::call`.
            unsafe { (api.send)(x, count, dtype, to, comm, stream) }
        });
        self.call(label, lane, x, out, call)
    }

    /// The tensor that a member sends, into `out`, new memory that nobody else holds.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn recv(
        &self,
        label: Label,
        out: CubeTensor,
        from: usize,
        lane: Lane,
    ) -> Result<Started, CudaError> {
        let (dtype, from) = (self.data_type(&out, &label)?, self.peer(from, &label)?);
        let count = elements(&out);
        if count == 0 {
            return Ok(Started::done(out));
        }
        let (queue, op) = (self.queue_of(&out, &label)?, self.op(&label).writes(&out));
        let (calls, id) = (self.calls.clone(), label.id);
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

/// Runs `calls` as one: NCCL starts them together, so that no order among them can hang.
fn grouped(api: &Api, calls: impl FnOnce(Code) -> Code) -> Code {
    // SAFETY: a group may be opened anywhere; it is closed on every way out.
    let code = calls(unsafe { (api.group_start)() });
    // SAFETY: the group was opened.
    let end = unsafe { (api.group_end)() };
    if code.is_fine() { end } else { code }
}

/// Stretches of elements one behind the other, each of so many rows.
fn stretches(rows: &[usize], row: usize) -> Vec<Range<usize>> {
    let ends = rows.iter().scan(0, |end, rows| {
        let start = *end;
        *end += rows * row;
        Some(start..*end)
    });
    ends.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uneven_parts_lie_one_behind_the_other() {
        assert_eq!(stretches(&[2, 0, 3], 5), [0..10, 10..10, 10..25]);
        assert_eq!(stretches(&[0, 0], 7), [0..0, 0..0]);
        assert_eq!(stretches(&[1, 4], 0), [0..0, 0..0]);
        assert!(stretches(&[], 3).is_empty());
    }
}
