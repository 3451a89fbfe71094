use megaburn_collective::{Group, ProcessGroups};

/// The groups in which a layer of experts works. Each rank has its own tokens (a share of the
/// batch, of each sequence, or of both) and its own experts.
#[derive(Clone, Debug)]
pub struct ExpertGroups {
    /// The ranks that split the matrices of dense layers, and here the sequence.
    pub tp: Group,
    /// The ranks that split each expert's matrices.
    pub etp: Group,
    /// The ranks over which the experts are distributed.
    pub ep: Group,
    /// `ep` and `etp` together: all ranks that hold the experts of a token. In rank order, the
    /// ranks of one `ep` coordinate are adjacent.
    pub experts: Group,
    /// The ranks that share the tokens of a micro-batch.
    pub tp_cp: Group,
}

impl ExpertGroups {
    /// The indices of this rank's experts, out of `num_experts`; every rank has the same number.
    ///
    /// # Panics
    /// If the ranks do not divide the experts.
    pub(super) fn own(&self, num_experts: usize) -> std::ops::Range<usize> {
        let rank = self.ep.rank();
        let ranks = self.ep.size();
        assert!(
            num_experts.is_multiple_of(ranks),
            "{num_experts} experts are not divisible by {ranks} expert-parallel ranks"
        );
        let len = num_experts / ranks;
        rank * len..(rank + 1) * len
    }
}

/// Every rank of a tensor-parallel group has all experts, unsharded.
impl From<&Group> for ExpertGroups {
    fn from(tp: &Group) -> Self {
        let alone = Group::single(tp.seed());
        Self {
            tp: tp.clone(),
            etp: alone.clone(),
            ep: alone.clone(),
            experts: alone,
            tp_cp: tp.clone(),
        }
    }
}

impl From<&ProcessGroups> for ExpertGroups {
    fn from(groups: &ProcessGroups) -> Self {
        let ProcessGroups {
            tp,
            etp,
            ep,
            experts,
            tp_cp,
            ..
        } = groups.clone();
        Self {
            tp,
            etp,
            ep,
            experts,
            tp_cp,
        }
    }
}
