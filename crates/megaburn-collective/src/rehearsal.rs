//! One rank of a world whose other ranks do not run. Its calls are recorded, and return values of the
//! right shapes.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use crate::{
    activity::Activity,
    deadline::Deadline,
    fault::{Channel, TransportError},
    group::Group,
    mailbox::Mailbox,
    message::Message,
    options::GroupOptions,
    rank_context::RankContext,
    transport::{TimeoutProbe, Transport},
};

/// The transport of a rank without peers.
#[derive(Debug)]
struct Rehearsal {
    rank: usize,
    world_size: usize,
    mailbox: Mailbox<Message>,
    activity: Arc<Activity>,
    groups: Mutex<BTreeMap<String, Vec<usize>>>,
}

impl Group {
    /// Rank `rank` of a world of `size` ranks that do not run, for a walk through the code of one
    /// rank of a large world. Every collective returns at once, with values of the right shapes:
    ///
    /// - the others contribute nothing to a sum, a maximum or a mean;
    /// - they contribute what this rank contributes to a gather, a broadcast or an all-to-all;
    /// - a message from another rank contains zeros.
    ///
    /// [`trace_calls`](Self::trace_calls) records the calls. What a model computes with these values
    /// means nothing.
    ///
    /// # Panics
    /// `rank` is not below `size`.
    pub fn rehearsal(rank: usize, size: usize, options: GroupOptions) -> Self {
        assert!(rank < size, "rank {rank} of {size}");
        let transport = Rehearsal {
            rank,
            world_size: size,
            mailbox: Mailbox::default(),
            activity: Activity::new(rank, options),
            groups: Mutex::default(),
        };
        transport.note_group("world", &(0..size).collect::<Vec<_>>());
        Self::world(Arc::new(RankContext::new(Arc::new(transport))), options)
    }

    /// The members of each group that was created in a [`rehearsal`](Self::rehearsal), by its name;
    /// none in other worlds.
    pub fn rehearsed_groups(&self) -> BTreeMap<String, Vec<usize>> {
        let link = self.0.link.as_ref();
        link.map(|link| link.transport.noted_groups())
            .unwrap_or_default()
    }

    /// Whether the other ranks do not run ([`rehearsal`](Self::rehearsal)).
    pub fn is_rehearsal(&self) -> bool {
        let link = self.0.link.as_ref();
        link.is_some_and(|link| link.transport.is_rehearsal())
    }
}

impl Transport for Rehearsal {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn mailbox(&self) -> &Mailbox<Message> {
        &self.mailbox
    }

    fn activity(&self) -> &Arc<Activity> {
        &self.activity
    }

    fn send(
        &self,
        _to: usize,
        _channel: Channel,
        _message: Message,
        _deadline: Deadline,
    ) -> Result<(), TransportError> {
        Ok(())
    }

    fn say(&self, _to: usize, _overdue: TimeoutProbe) {}

    fn abort(&self, by: usize, reason: &str, is_hang: bool) {
        self.mailbox.abort(by, reason, is_hang);
    }

    fn is_rehearsal(&self) -> bool {
        true
    }

    fn note_group(&self, name: &str, members: &[usize]) {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.insert(name.to_string(), members.to_vec());
    }

    fn noted_groups(&self) -> BTreeMap<String, Vec<usize>> {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.clone()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, TensorData};

    use super::*;
    use crate::{call::ReduceOp, objects};

    #[test]
    fn a_rank_without_peers_gets_values_of_the_right_shapes() {
        let world = Group::rehearsal(5, 16384, GroupOptions::default());
        let tp = world.subgroup("tp", &[4, 5, 6, 7]).unwrap();
        let x = || TensorData::from([[1.0_f32, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]);
        world.trace_calls();
        assert_eq!(tp.all_reduce(x(), ReduceOp::Sum).unwrap(), x());
        assert_eq!(tp.all_gather(x()).unwrap().shape().to_vec(), [16, 2]);
        let shard = tp.reduce_scatter(x(), ReduceOp::Sum).unwrap();
        assert_eq!(shard, TensorData::from([[3.0_f32, 4.0]]));
        assert_eq!(tp.broadcast(x(), 0).unwrap(), x());
        let parts = tp.all_to_all(vec![x(); 4]).unwrap();
        assert_eq!(parts, vec![x(); 4]);
        let received = tp.recv(0, Some(&[3, 2]), DType::F32).unwrap();
        assert_eq!(received, TensorData::from([[0.0_f32; 2]; 3]));
        tp.send(x(), 2).unwrap();
        world.barrier().unwrap();
        assert_eq!(
            objects::broadcast(&world, &"text".to_string()).unwrap(),
            "text"
        );
        let pair = world.subgroup("pair", &[5, 6]).unwrap();
        assert_eq!(objects::gather(&pair, &7).unwrap(), [7; 2]);
        let groups = world.rehearsed_groups();
        assert_eq!(groups["tp"], [4, 5, 6, 7]);
        assert_eq!(groups["world"].len(), 16384);
        assert!(world.failure().is_none());
        assert!(world.flight_records().len() > 10);
    }
}
