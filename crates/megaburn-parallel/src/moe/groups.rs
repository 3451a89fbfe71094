use megaburn_collective::{Group, ProcessGroups};

/// The groups that a layer of experts works in. Ranks hold tokens of their own (a share of the batch, of each
/// sequence, or of both) and experts of their own.
#[derive(Clone, Debug)]
pub struct ExpertGroups {
    /// Shares the dense layers' matrices, and here stretches of the sequence.
    pub tp: Group,
    /// Shares each expert's matrices.
    pub etp: Group,
    /// Shares the experts.
    pub ep: Group,
    /// Both: what a token's experts are on. In rank order, those of one `ep` coordinate side by side.
    pub experts: Group,
    /// Holds the tokens of a micro-batch between them.
    pub tp_cp: Group,
}

impl ExpertGroups {
    /// Of `num_experts` those that this rank has, of which there are as many on each.
    ///
    /// # Panics
    /// If the ranks do not divide them.
    pub(super) fn own(&self, num_experts: usize) -> std::ops::Range<usize> {
        let rank = self.ep.rank();
        let ranks = self.ep.size();
        assert!(
            num_experts.is_multiple_of(ranks),
            "{num_experts} experts on {ranks} ranks"
        );
        let len = num_experts / ranks;
        rank * len..(rank + 1) * len
    }
}

/// Every rank of a tensor-parallel group has all experts whole.
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
