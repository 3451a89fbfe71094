use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use megaburn_collective::{CollectiveError, ReduceOp, tensors};

use super::{
    DROPPED, Of, Slots, Way,
    plan::Order,
    rows::{index, lengthened, read, shortened, told},
    sorted::{Arranged, Sorted},
};
use crate::moe::ExpertGroups;

/// All tokens go to all ranks, each of which takes those of its experts; sums of what they made of them come back.
#[derive(Debug)]
pub(super) struct Gathered {
    taken: Sorted,
    rows_of_experts: Vec<usize>,
    /// Where there is padding.
    arranged: Option<Arranged>,
    top_k: usize,
    /// Tokens of this rank, and of the one that has the most: as many each shows the others.
    tokens: usize,
    shown: usize,
    groups: ExpertGroups,
}

impl Gathered {
    /// # Collective
    /// All ranks of `groups.experts`, which tell each other the experts of their tokens.
    pub(super) fn new(
        slots: Slots,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Result<Self, CollectiveError> {
        let [tokens, top_k] = slots.experts.dims();
        let all = told(index([tokens], device), &groups.experts)?;
        let shown = all.into_iter().max().expect("this rank is one of them");
        let own = groups.own(slots.num_experts);
        let all = tensors::all_gather(with_nobodys(slots.experts, shown), &groups.experts)?;
        // Numbers of others' experts are none of this rank's.
        let all = if shown == 0 { all } else { all - own.start as i32 };
        let (taken, counts) = Sorted::new(all, own.len());
        let counts = read(counts);
        let order = Order::as_they_are(counts.clone());
        let order = match slots.padded {
            Some(rows) => order.padded(rows),
            None => order,
        };
        Ok(Self {
            taken: taken.with_rows(counts.iter().sum()),
            arranged: Arranged::new(&order, device),
            rows_of_experts: order.rows,
            top_k,
            tokens,
            shown,
            groups: groups.clone(),
        })
    }

    /// Rows that this rank has of what is sent, and that each shows.
    fn lens(&self, of: Of) -> [usize; 2] {
        let of_token = match of {
            Of::Tokens => 1,
            Of::Slots => self.top_k,
        };
        [self.tokens * of_token, self.shown * of_token]
    }
}

impl Way for Gathered {
    fn there(&self, x: Tensor<2>, of: Of) -> Result<Tensor<2>, CollectiveError> {
        let [_, shown] = self.lens(of);
        let all = tensors::all_gather(lengthened(x, shown), &self.groups.experts)?;
        let rows = self.taken.there(all, of);
        Ok(match &self.arranged {
            Some(arranged) => arranged.there(rows),
            None => rows,
        })
    }

    fn back(&self, y: Tensor<2>, of: Of) -> Result<Tensor<2>, CollectiveError> {
        let [own, _] = self.lens(of);
        let rows = match &self.arranged {
            Some(arranged) => arranged.back(y),
            None => y,
        };
        let all = self.taken.back(rows, of);
        let shown = tensors::reduce_scatter(all, ReduceOp::Sum, &self.groups.experts)?;
        Ok(shortened(shown, own))
    }

    fn rows_of_experts(&self) -> &[usize] {
        &self.rows_of_experts
    }
}

/// With tokens behind that go to nobody, so that there are `len`.
fn with_nobodys(experts: Tensor<2, Int>, len: usize) -> Tensor<2, Int> {
    let [tokens, top_k] = experts.dims();
    if tokens == len {
        return experts;
    }
    let nobodys = vec![DROPPED; (len - tokens) * top_k];
    let nobodys = TensorData::new(nobodys, [len - tokens, top_k]);
    let nobodys = Tensor::from_data(nobodys, (&experts.device(), DType::I32));
    if tokens == 0 { nobodys } else { Tensor::cat(vec![experts, nobodys], 0) }
}
