//! How every collective communicates with its peers: one exchange of messages that is checked and
//! recorded, and whose failure is reported to all ranks.

use std::time::Duration;

use burn::tensor::Bytes;

use crate::{
    busy::Busy,
    call::Call,
    deadline::Deadline,
    error::CollectiveError,
    fault::TransportError,
    group::Group,
    message::{Message, Payload},
    rank_context::{RankContext, fail},
};

/// The error of a call that failed in the transport; `timeout` makes it of a wait that took too
/// long.
pub(crate) fn transport_error(
    rank: usize,
    group: String,
    call: Call,
    error: TransportError,
    timeout: impl FnOnce(usize, String, Box<Call>) -> CollectiveError,
) -> CollectiveError {
    let call = Box::new(call);
    match error {
        TransportError::Timeout => timeout(rank, group, call),
        TransportError::Stalled(busy) => stalled(rank, group, call, &busy),
        TransportError::Lost { peer, why } => CollectiveError::PeerLost {
            rank,
            group,
            call,
            peer,
            why,
        },
        TransportError::Aborted {
            by,
            reason,
            is_hang,
        } => CollectiveError::Aborted {
            rank,
            group,
            call,
            by,
            reason,
            is_hang,
        },
    }
}

/// The error of a rank that waits for a busy rank that makes no progress.
pub(crate) fn stalled(rank: usize, group: String, call: Box<Call>, busy: &Busy) -> CollectiveError {
    let peer = busy.rank;
    let limit_key = busy.limit_key();
    let what = busy.to_string();
    CollectiveError::Stalled {
        rank,
        group,
        call,
        peer,
        limit_key,
        what,
    }
}

impl Group {
    /// Runs `body` as `call`: records it, refuses it after an earlier failure, and reports a
    /// failure to every rank.
    pub(crate) fn run<T>(
        &self,
        call: &Call,
        body: impl FnOnce(&RankContext, Deadline) -> Result<T, CollectiveError>,
    ) -> Result<T, CollectiveError> {
        let Some(link) = &self.0.link else {
            let why = match self.size() {
                1 => "a group of one has no peers",
                _ => "the other members of this group do not run",
            };
            return Err(self.bad_argument(call, why));
        };
        self.check_usable()?;
        let id = link.recorder.start(self.name(), call);
        let _wait = self.0.activity.wait();
        let result = body(link, Deadline::after(self.0.options.timeout));
        link.recorder
            .finish(id, result.as_ref().err().map(ToString::to_string));
        if let Err(error) = &result {
            self.0.activity.freeze();
            self.record_failure(link, error);
        }
        result
    }

    /// Fails as `call`, on every rank, because of an argument.
    pub(crate) fn refuse<T>(
        &self,
        call: &Call,
        why: impl Into<String>,
    ) -> Result<T, CollectiveError> {
        self.run(call, |_, _| Err(self.bad_argument(call, why)))
    }

    /// Returns the error of this rank's first failure, if there was one.
    pub(crate) fn check_usable(&self) -> Result<(), CollectiveError> {
        let Some(first) = self.failure() else {
            return Ok(());
        };
        Err(CollectiveError::Unusable {
            rank: self.global_rank(),
            group: self.name().to_string(),
            first: Box::new(first),
        })
    }

    /// Records this rank's first failure and reports it to the others.
    pub(crate) fn record_failure(&self, link: &RankContext, error: &CollectiveError) {
        // Dump the recorder for the first failure only; later dumps would repeat it.
        if fail(self.global_rank(), &*link.transport, &link.failure, error) && !error.is_echo() {
            let dump = link.recorder.dump_after(self.global_rank(), error);
            tracing::error!("{error}\n{dump}");
        }
    }

    /// Sends `outgoing(member)` to every other member and returns what they sent, in member order.
    /// This rank's own contribution is at its own index.
    pub(crate) fn exchange(
        &self,
        link: &RankContext,
        call: &Call,
        deadline: Deadline,
        outgoing: impl Fn(usize) -> Payload,
    ) -> Result<Vec<Payload>, CollectiveError> {
        let size = self.size();
        if link.transport.is_rehearsal() {
            return Ok(vec![outgoing(self.rank()); size]);
        }
        for step in 1..size {
            // Each rank starts with a different peer, so that no rank is the first target of all
            // others.
            let to = (self.rank() + step) % size;
            self.send_to(link, call, to, outgoing(to), deadline)?;
        }
        (0..size)
            .map(|from| {
                if from == self.rank() {
                    return Ok(outgoing(from));
                }
                self.receive_from(link, call, from, deadline)
                    .map(|message| message.payload)
            })
            .collect()
    }

    pub(crate) fn send_to(
        &self,
        link: &RankContext,
        call: &Call,
        to: usize,
        payload: Payload,
        deadline: Deadline,
    ) -> Result<(), CollectiveError> {
        let message = Message {
            call: call.clone(),
            payload,
        };
        let deadline = deadline.or_after(self.0.options.timeout);
        link.transport
            .send(self.0.members[to], self.0.channel, message, deadline)
            .map_err(|error| self.transport_error(call, to, error, deadline.waited()))
    }

    pub(crate) fn receive_from(
        &self,
        link: &RankContext,
        call: &Call,
        from: usize,
        deadline: Deadline,
    ) -> Result<Message, CollectiveError> {
        let peer = self.0.members[from];
        if link.transport.is_rehearsal() {
            let bytes = call.shape.iter().product::<usize>() * call.dtype.size();
            return Ok(Message {
                call: call.clone(),
                payload: Payload::new(Bytes::from_bytes_vec(vec![0; bytes])),
            });
        }
        let deadline = deadline.or_after(self.0.options.timeout);
        self.0.activity.await_rank(peer);
        let message = link
            .transport
            .receive(peer, self.0.channel, deadline)
            .map_err(|error| self.transport_error(call, from, error, deadline.waited()));
        if message.is_err() {
            self.0.activity.freeze();
        }
        self.0.activity.end_await(peer);
        let message = message?;
        link.recorder.hear(self.0.channel, peer, &message.call);
        if !call.agrees(&message.call) {
            return Err(self.mismatch(call, from, message.call));
        }
        Ok(message)
    }

    /// The error of a member that made another call.
    pub(crate) fn mismatch(&self, mine: &Call, from: usize, theirs: Call) -> CollectiveError {
        CollectiveError::Mismatch {
            rank: self.global_rank(),
            group: self.name().to_string(),
            mine: Box::new(mine.clone()),
            peer: self.0.members[from],
            theirs: Box::new(theirs),
        }
    }

    pub(crate) fn transport_error(
        &self,
        call: &Call,
        member: usize,
        error: TransportError,
        waited: Duration,
    ) -> CollectiveError {
        let timeout = |rank, group, call| CollectiveError::Timeout {
            rank,
            group,
            call,
            peer: self.0.members[member],
            seconds: waited.as_secs_f64(),
        };
        let group = self.name().to_string();
        transport_error(self.global_rank(), group, call.clone(), error, timeout)
    }

    pub(crate) fn bad_argument(&self, call: &Call, why: impl Into<String>) -> CollectiveError {
        CollectiveError::BadArgument {
            rank: self.global_rank(),
            group: self.name().to_string(),
            call: Box::new(call.clone()),
            why: why.into(),
        }
    }
}
