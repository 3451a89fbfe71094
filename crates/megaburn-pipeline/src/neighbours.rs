use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::Device;
use megaburn_collective::{CollectiveError, Group, tensors};

use crate::Stages;

/// Whom a rank of a pipeline sends to and receives from. Each way between two ranks is a group of its
/// own, so that on GPUs what goes one way waits for nothing that goes another.
#[derive(Clone, Debug)]
pub struct Neighbours {
    group: Group,
    /// By the sender's and the receiver's rank in the pipeline.
    ways: BTreeMap<(usize, usize), Group>,
}

impl Neighbours {
    /// Of this rank of `group`, the ranks of the pipeline.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    /// # Collective
    /// Nothing is sent; every rank of the pipeline must have the same stages.
    ///
    /// # Panics
    /// If the stages are of another number of ranks.
    pub fn new(group: &Group, stages: Stages) -> Result<Self, CollectiveError> {
        assert!(stages.num_ranks == group.size(), "stages of other ranks");
        let ranks: Vec<usize> = (0..stages.num_stages())
            .map(|of| stages.rank_of(of))
            .collect();
        let both = |two: &[usize]| [(two[0], two[1]), (two[1], two[0])];
        let ways: BTreeSet<_> = ranks.windows(2).flat_map(both).collect();
        let mine = ways.into_iter().filter(|(from, to)| {
            from != to && [from, to].into_iter().any(|rank| *rank == group.rank())
        });
        let way = |(from, to): (usize, usize)| {
            let mut members = [from, to].map(|rank| group.members()[rank]);
            members.sort_unstable();
            let pair = group.subgroup(&format!("pp {from} to {to}"), &members)?;
            Ok::<_, CollectiveError>(((from, to), pair))
        };
        Ok(Self {
            group: group.clone(),
            ways: mine.map(way).collect::<Result<_, _>>()?,
        })
    }

    /// The ranks of the pipeline.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Lets neighbours know each other's GPUs before anything is sent: a rank that met one neighbour at
    /// its first transfer would hold up another's.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    /// # Collective
    /// All ranks of the pipeline.
    pub fn meet(&self, device: &Device) -> Result<(), CollectiveError> {
        self.ways
            .values()
            .try_for_each(|way| tensors::meet(device, way))
    }

    /// The group in which this rank sends to `peer`, and its number there.
    pub(crate) fn to(&self, peer: usize) -> (&Group, usize) {
        self.way((self.group.rank(), peer))
    }

    /// The group in which this rank receives from `peer`, and its number there.
    pub(crate) fn from(&self, peer: usize) -> (&Group, usize) {
        self.way((peer, self.group.rank()))
    }

    fn way(&self, way: (usize, usize)) -> (&Group, usize) {
        let group = self
            .ways
            .get(&way)
            .expect("stages that follow each other have a way");
        (group, 1 - group.rank())
    }
}
