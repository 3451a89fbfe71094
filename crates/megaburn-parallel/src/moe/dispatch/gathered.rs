use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use megaburn_collective::{CollectiveError, ReduceOp, tensors};

use super::{
    Of, Slots, Way,
    plan::{DROPPED, Known},
    rows::{index, lengthened, shortened, summed, taken},
};
use crate::moe::ExpertGroups;

/// All tokens go to all ranks, each of which takes those of its experts; sums of what they made of them come back.
#[derive(Debug)]
pub(super) struct Gathered {
    known: Known,
    top_k: usize,
    /// Tokens of this rank, and of the one that has the most: as many each shows the others.
    tokens: usize,
    shown: usize,
    groups: ExpertGroups,
    /// On the device: where the token and the slot of each row stand among all, and the row of each slot.
    of_tokens: Tensor<1, Int>,
    of_slots: Tensor<1, Int>,
    rows: Tensor<1, Int>,
}

impl Gathered {
    /// # Collective
    /// All ranks of `groups.experts`, which tell each other the experts of their tokens.
    pub(super) fn new(
        slots: &Slots<'_>,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Result<Self, CollectiveError> {
        let top_k = slots.top_k;
        let tokens = slots.experts.len() / top_k;
        let all = told(&[tokens as i32], groups, device)?;
        let shown = all.into_iter().max().expect("this rank is one of them") as usize;
        // A number of i32 that no expert has.
        let number = |expert: &u32| if *expert == DROPPED { -1 } else { *expert as i32 };
        let mut own: Vec<i32> = slots.experts.iter().map(number).collect();
        own.resize(shown * top_k, -1);
        let all = told(&own, groups, device)?;
        let all: Vec<u32> =
            all.into_iter().map(|n| if n < 0 { DROPPED } else { n as u32 }).collect();
        let mut known = Known::new(&all, groups.own(slots.num_experts));
        if let Some(rows) = slots.padded {
            known = known.padded(rows, all.len());
        }
        let token = |slot: &usize| slot / top_k;
        Ok(Self {
            of_tokens: index(known.slots.iter().map(token), device),
            of_slots: index(known.slots.iter().copied(), device),
            rows: index(known.rows.iter().copied(), device),
            known,
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
        // Padding is the row behind all others.
        let rows = all.dims()[0] + usize::from(self.known.is_padded);
        Ok(match of {
            Of::Tokens => taken(lengthened(all, rows), &self.of_tokens),
            Of::Slots => taken(lengthened(all, rows), &self.of_slots),
        })
    }

    fn back(&self, y: Tensor<2>, of: Of) -> Result<Tensor<2>, CollectiveError> {
        let [own, _] = self.lens(of);
        let terms = match of {
            Of::Tokens => self.top_k,
            Of::Slots => 1,
        };
        let all = summed(y, &self.rows, terms);
        let shown = tensors::reduce_scatter(all, ReduceOp::Sum, &self.groups.experts)?;
        Ok(shortened(shown, own))
    }

    fn rows_of_experts(&self) -> &[usize] {
        &self.known.counts
    }
}

/// What all ranks tell of themselves, one rank's behind the other's.
fn told(own: &[i32], groups: &ExpertGroups, device: &Device) -> Result<Vec<i32>, CollectiveError> {
    if groups.experts.size() == 1 || own.is_empty() {
        return Ok(own.to_vec());
    }
    let own = Tensor::<1, Int>::from_data(
        TensorData::new(own.to_vec(), [own.len()]),
        (device, DType::I32),
    );
    let all = tensors::all_gather(own, &groups.experts)?;
    Ok(all.into_data().iter::<i32>().collect())
}
