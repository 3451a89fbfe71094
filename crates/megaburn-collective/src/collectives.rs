//! The collectives of a [`Group`] on host data, each built from one or two exchanges.

use burn::tensor::{Bytes, DType, TensorData};

use crate::{
    call::{Call, Collective, ReduceOp},
    error::CollectiveError,
    group::Group,
    joined::joined,
    message::Payload,
    reduce::reduce,
};

/// Up to this many bytes, an all-reduce sends all data to every member (one exchange). Above, each
/// member reduces its shard and sends the result to all (two exchanges, `2 / size` of the bytes).
const SINGLE_EXCHANGE: usize = 16 << 10;

impl Group {
    /// Runs a collective to which each member gives one value; an all-to-all exchanges equal parts
    /// of the first dimension.
    pub(crate) fn run_on_host(
        &self,
        op: Collective,
        data: TensorData,
    ) -> Result<TensorData, CollectiveError> {
        match op {
            Collective::AllReduce(op) => self.all_reduce(data, op),
            Collective::AllGather => self.all_gather(data),
            Collective::ReduceScatter(op) => self.reduce_scatter(data, op),
            Collective::AllToAll => {
                let rows = self.equal_rows(data.shape()[0]);
                self.all_to_all_rows(data, &rows, &rows)
            }
            Collective::Broadcast { root } => self.broadcast(data, root),
            Collective::Shift { by } => {
                let (shape, dtype) = (data.shape().to_vec(), data.dtype());
                self.send(data, self.at(by))?;
                self.recv(self.at(-by), Some(&shape), dtype)
            }
            Collective::Send | Collective::Barrier => {
                let call = self.next_call(op, data.dtype(), data.shape());
                self.refuse(&call, "it returns no value")
            }
        }
    }

    /// Reduces the members' values; every member gets the result.
    ///
    /// # Shapes
    /// Any, the same on every member (also with zero elements); the result has the same shape.
    /// # Errors
    /// See [`CollectiveError`]; a mean of integers is refused.
    /// # Collective
    /// All members; sends the data once (small) or `2 (n - 1) / n` of it.
    /// # Determinism
    /// Bit-identical on all members, transports and runs.
    pub fn all_reduce(
        &self,
        data: TensorData,
        op: ReduceOp,
    ) -> Result<TensorData, CollectiveError> {
        if self.size() == 1 {
            return Ok(data);
        }
        let call = self.next_call(Collective::AllReduce(op), data.dtype(), data.shape());
        let (bytes, shape, dtype) = data.into_parts();
        self.run(&call, |link, deadline| {
            if link.transport.is_rehearsal() {
                return Ok(TensorData::from_bytes(bytes, shape, dtype));
            }
            let sum_of = |parts: &[Payload]| {
                let refused = || self.unsupported(&call);
                reduce(parts, dtype, op).ok_or_else(refused)
            };
            let mine = Payload::new(bytes);
            let len = mine.as_slice().len();
            if len <= SINGLE_EXCHANGE {
                let sum = if self.is_along_tree(len) {
                    let sum = |parts: Vec<Payload>| sum_of(&parts).map(Payload::new);
                    self.along_tree(link, &call, deadline, Some(mine), sum)?
                        .into_bytes()
                } else {
                    sum_of(&self.exchange(link, &call, deadline, |_| mine.clone())?)?
                };
                return Ok(TensorData::from_bytes(sum, shape, dtype));
            }
            let elements = len / dtype.size();
            let stretch = |member: usize| {
                let at = |i: usize| elements * i / self.size() * dtype.size();
                at(member)..at(member + 1)
            };
            let parts = self.exchange(link, &call, deadline, |to| mine.slice(stretch(to)))?;
            let sum = Payload::new(sum_of(&parts)?);
            let all = self.exchange(link, &call, deadline, |_| sum.clone())?;
            Ok(TensorData::from_bytes(
                concatenate(&all, dtype),
                shape,
                dtype,
            ))
        })
    }

    /// Concatenates the members' values along the first dimension; every member gets the result.
    ///
    /// # Shapes
    /// `[d, ..]`, the same on every member; the result is `[size * d, ..]`.
    /// # Errors
    /// See [`CollectiveError`].
    /// # Collective
    /// All members; each sends its data to every other, or along a tree if the data is small and the
    /// group large.
    pub fn all_gather(&self, data: TensorData) -> Result<TensorData, CollectiveError> {
        if self.size() == 1 {
            return Ok(data);
        }
        let call = self.next_call(Collective::AllGather, data.dtype(), data.shape());
        let (bytes, mut shape, dtype) = data.into_parts();
        self.run(&call, |link, deadline| {
            let mine = Payload::new(bytes);
            let all = if self.is_along_tree(mine.as_slice().len()) {
                let all = |parts: Vec<Payload>| Ok(Payload::new(concatenate(&parts, dtype)));
                self.along_tree(link, &call, deadline, Some(mine), all)?
                    .into_bytes()
            } else {
                let all = self.exchange(link, &call, deadline, |_| mine.clone())?;
                concatenate(&all, dtype)
            };
            let Some(first) = shape.first_mut() else {
                return Err(self.bad_argument(&call, "a scalar has no dimension to gather along"));
            };
            *first *= self.size();
            Ok(TensorData::from_bytes(all, shape, dtype))
        })
    }

    /// Reduces the members' values and gives each member its shard of the first dimension.
    ///
    /// # Shapes
    /// `[size * d, ..]`, the same on every member; the result is `[d, ..]`.
    /// # Errors
    /// See [`CollectiveError`]; a first dimension that the members do not divide is refused.
    /// # Collective
    /// All members; sends `(n - 1) / n` of the data.
    /// # Determinism
    /// Bit-identical to the member's shard of [`Group::all_reduce`].
    pub fn reduce_scatter(
        &self,
        data: TensorData,
        op: ReduceOp,
    ) -> Result<TensorData, CollectiveError> {
        if self.size() == 1 {
            return Ok(data);
        }
        let call = self.next_call(Collective::ReduceScatter(op), data.dtype(), data.shape());
        let (bytes, mut shape, dtype) = data.into_parts();
        self.run(&call, |link, deadline| {
            match shape.first_mut() {
                Some(first) if first.is_multiple_of(self.size()) => *first /= self.size(),
                _ => {
                    let why = format!("dimension 0 is not divisible by {} members", self.size());
                    return Err(self.bad_argument(&call, why));
                }
            }
            let share = bytes.len() / self.size();
            let mine = Payload::new(bytes);
            if link.transport.is_rehearsal() {
                let own = mine.slice(self.rank() * share..(self.rank() + 1) * share);
                return Ok(TensorData::from_bytes(own.into_bytes(), shape, dtype));
            }
            let parts = self.exchange(link, &call, deadline, |to| {
                mine.slice(to * share..(to + 1) * share)
            })?;
            let sum = reduce(&parts, dtype, op).ok_or_else(|| self.unsupported(&call))?;
            Ok(TensorData::from_bytes(sum, shape, dtype))
        })
    }

    /// Sends `parts[i]` to member `i` and returns what each member sent here. Parts may differ in
    /// size and may be empty.
    ///
    /// # Shapes
    /// Any; all have the same element type.
    /// # Errors
    /// See [`CollectiveError`]; the number of parts must equal the number of members.
    /// # Collective
    /// All members; each part is sent once.
    pub fn all_to_all(&self, parts: Vec<TensorData>) -> Result<Vec<TensorData>, CollectiveError> {
        let dtype = parts.first().map_or(DType::U8, TensorData::dtype);
        let call = self.next_call(Collective::AllToAll, dtype, &[0]);
        if parts.len() != self.size() {
            let why = format!(
                "{} parts were given for {} members",
                parts.len(),
                self.size()
            );
            return self.refuse(&call, why);
        }
        if parts.iter().any(|part| part.dtype() != dtype) {
            let why = "the parts have different element types";
            return self.refuse(&call, why);
        }
        if self.size() == 1 {
            return Ok(parts);
        }
        self.run(&call, |link, deadline| {
            let mut own = None;
            let size = self.size();
            if link.transport.is_rehearsal() {
                return Ok(vec![parts[self.rank()].clone(); size]);
            }
            let mut parts: Vec<Option<TensorData>> = parts.into_iter().map(Some).collect();
            for step in 1..size {
                let to = (self.rank() + step) % size;
                let part = parts[to].take().expect("each part is sent once");
                let mut call = call.clone();
                call.shape = part.shape().to_vec();
                let payload = Payload::new(part.into_parts().0);
                self.send_to(link, &call, to, payload, deadline)?;
            }
            own.clone_from(&parts[self.rank()]);
            (0..size)
                .map(|from| {
                    if from == self.rank() {
                        return Ok(own.take().expect("the own part is kept"));
                    }
                    let message = self.receive_from(link, &call, from, deadline)?;
                    let bytes = message.payload.into_bytes();
                    Ok(TensorData::from_bytes(bytes, message.call.shape, dtype))
                })
                .collect()
        })
    }

    /// Every member gets the value of member `root`.
    ///
    /// # Shapes
    /// Any, the same on every member; the values of the others are ignored.
    /// # Errors
    /// See [`CollectiveError`].
    /// # Collective
    /// All members; the root sends its data to every other, in a large group along a tree.
    pub fn broadcast(&self, data: TensorData, root: usize) -> Result<TensorData, CollectiveError> {
        if self.size() == 1 && root == 0 {
            return Ok(data);
        }
        let call = self.next_call(Collective::Broadcast { root }, data.dtype(), data.shape());
        let (bytes, shape, dtype) = data.into_parts();
        self.run(&call, |link, deadline| {
            if root >= self.size() {
                let why = format!(
                    "root {root} does not exist: the group has {} members",
                    self.size()
                );
                return Err(self.bad_argument(&call, why));
            }
            let is_root = self.rank() == root || link.transport.is_rehearsal();
            let mine = if is_root {
                Payload::new(bytes)
            } else {
                Payload::empty()
            };
            let value = self.given_by_root(link, &call, deadline, mine, root)?;
            Ok(TensorData::from_bytes(value.into_bytes(), shape, dtype))
        })
    }

    /// Returns when every member has called it.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    /// # Collective
    /// All members; sends no data.
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        if self.size() == 1 {
            return Ok(());
        }
        let call = self.next_call(Collective::Barrier, DType::U8, &[0]);
        self.run(&call, |link, deadline| self.meet(link, &call, deadline))
    }

    /// Exchanges a message with every other member, as a barrier of two for each pair. A barrier of a
    /// large group exchanges messages with three members only.
    ///
    /// # Errors
    /// See [`CollectiveError`]; a member that cannot be reached is named.
    /// # Collective
    /// All members; sends no data.
    pub fn meet_all(&self) -> Result<(), CollectiveError> {
        if self.size() == 1 {
            return Ok(());
        }
        let call = self.next_call(Collective::Barrier, DType::U8, &[0]);
        self.run(&call, |link, deadline| {
            self.exchange(link, &call, deadline, |_| Payload::empty())
                .map(drop)
        })
    }

    /// Sends a value to member `to`, which calls [`Group::recv`].
    ///
    /// # Errors
    /// See [`CollectiveError`]; a rank cannot send to itself.
    /// # Collective
    /// This rank and `to`. Returns when the data is handed over, not when it is received.
    pub fn send(&self, data: TensorData, to: usize) -> Result<(), CollectiveError> {
        let call = self.pair_call(to, 0, data.dtype(), data.shape());
        self.run(&call, |link, deadline| {
            self.check_peer(&call, to)?;
            self.send_to(link, &call, to, Payload::new(data.into_parts().0), deadline)
        })
    }

    /// Receives the next value that member `from` sends, which must have this shape (`None`: any)
    /// and type.
    ///
    /// # Errors
    /// See [`CollectiveError`]; another shape or type is a mismatch.
    /// # Collective
    /// This rank and `from`.
    pub fn recv(
        &self,
        from: usize,
        shape: Option<&[usize]>,
        dtype: DType,
    ) -> Result<TensorData, CollectiveError> {
        let call = self.pair_call(from, 1, dtype, shape.unwrap_or_default());
        self.run(&call, |link, deadline| {
            self.check_peer(&call, from)?;
            let message = self.receive_from(link, &call, from, deadline)?;
            if shape.is_some_and(|shape| shape != message.call.shape) {
                return Err(self.mismatch(&call, from, message.call));
            }
            let bytes = message.payload.into_bytes();
            Ok(TensorData::from_bytes(bytes, message.call.shape, dtype))
        })
    }

    /// The description of this rank's next transfer to (direction 0) or from (1) a member.
    pub(crate) fn pair_call(
        &self,
        member: usize,
        direction: usize,
        dtype: DType,
        shape: &[usize],
    ) -> Call {
        let is_member = member < self.size();
        Call {
            op: Collective::Send,
            seq: if is_member {
                self.next_pair(member, direction)
            } else {
                0
            },
            dtype,
            shape: shape.to_vec(),
        }
    }

    fn unsupported(&self, call: &Call) -> CollectiveError {
        let why = format!("{:?} does not support this reduction", call.dtype);
        self.bad_argument(call, why)
    }

    fn check_peer(&self, call: &Call, member: usize) -> Result<(), CollectiveError> {
        if member < self.size() && member != self.rank() {
            return Ok(());
        }
        let why = format!(
            "member {member} is not a peer of member {} of {}",
            self.rank(),
            self.size()
        );
        Err(self.bad_argument(call, why))
    }
}

fn concatenate(parts: &[Payload], dtype: DType) -> Bytes {
    joined(parts.iter().map(Payload::as_slice), dtype)
}
