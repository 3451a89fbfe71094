use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::Device;
use megaburn_collective::{CollectiveError, Group, tensors};

use crate::stages::Stages;

/// The groups on which a rank of a pipeline sends and receives. Each direction between two ranks
/// has a group of its own, so that on GPUs transfers in different directions do not wait for each
/// other.
#[derive(Clone, Debug)]
pub struct P2pGroups {
    group: Group,
    /// By the sender's and the receiver's rank in the pipeline.
    links: BTreeMap<(usize, usize), Group>,
}

impl P2pGroups {
    /// Creates the groups of this rank; `group` has the ranks of the pipeline.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    /// # Collective
    /// Nothing is sent; every rank of the pipeline must have the same stages.
    ///
    /// # Panics
    /// If `stages` has another number of ranks than `group`.
    pub fn new(group: &Group, stages: Stages) -> Result<Self, CollectiveError> {
        assert!(
            stages.num_ranks == group.size(),
            "the number of ranks in the stages and in the \
            group differ"
        );
        let ranks: Vec<usize> = (0..stages.num_stages())
            .map(|of| stages.rank_of(of))
            .collect();
        let both = |two: &[usize]| [(two[0], two[1]), (two[1], two[0])];
        let links: BTreeSet<_> = ranks.windows(2).flat_map(both).collect();
        let mine = links.into_iter().filter(|(from, to)| {
            from != to && [from, to].into_iter().any(|rank| *rank == group.rank())
        });
        let link = |(from, to): (usize, usize)| {
            let mut members = [from, to].map(|rank| group.members()[rank]);
            members.sort_unstable();
            let pair = group.subgroup(&format!("pp {from} to {to}"), &members)?;
            Ok::<_, CollectiveError>(((from, to), pair))
        };
        Ok(Self {
            group: group.clone(),
            links: mine.map(link).collect::<Result<_, _>>()?,
        })
    }

    /// The ranks of the pipeline.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Connects the GPUs of neighbours before anything is sent. Otherwise a rank that connects to
    /// one neighbour at its first transfer would delay another.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    /// # Collective
    /// All ranks of the pipeline.
    pub fn rendezvous(&self, device: &Device) -> Result<(), CollectiveError> {
        self.links
            .values()
            .try_for_each(|link| tensors::rendezvous(device, link))
    }

    /// The group in which this rank sends to `peer`, and the peer's number there.
    pub(crate) fn to(&self, peer: usize) -> (&Group, usize) {
        self.link((self.group.rank(), peer))
    }

    /// The group in which this rank receives from `peer`, and the peer's number there.
    pub(crate) fn from(&self, peer: usize) -> (&Group, usize) {
        self.link((peer, self.group.rank()))
    }

    fn link(&self, link: (usize, usize)) -> (&Group, usize) {
        let group = self
            .links
            .get(&link)
            .expect("consecutive stages have a link");
        (group, 1 - group.rank())
    }
}
