use burn::tensor::{Device, Tensor};
use megaburn_collective::{CollectiveError, Group, ReduceOp, tensors};

use super::{
    Of, Slots, Way,
    plan::{Exchange, Place},
    rows::{lengthened, shortened, told},
    sorted::{Arranged, Sorted},
};
use crate::moe::ExpertGroups;

/// Each row goes to the rank of its expert and no other (all-to-all over `ep`), and from there to those that share
/// the expert's matrices (all-gather over `etp`).
#[derive(Debug)]
pub(super) struct Exchanged {
    sent: Sorted,
    exchange: Exchange,
    arranged: Option<Arranged>,
    groups: ExpertGroups,
}

impl Exchanged {
    /// # Collective
    /// All ranks of `groups.experts`, which tell each other how many rows go where.
    pub(super) fn new(
        slots: Slots,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Result<Self, CollectiveError> {
        let (sent, counts) = Sorted::new(slots.experts, slots.num_experts);
        let counts = told(counts, &groups.experts)?;
        let counts: Vec<_> = counts.chunks(slots.num_experts).map(<[usize]>::to_vec).collect();
        let place = |group: &Group| Place { rank: group.rank(), ranks: group.size() };
        let mut exchange = Exchange::new(&counts, place(&groups.ep), place(&groups.etp));
        if let Some(rows) = slots.padded {
            exchange.order = exchange.order.padded(rows);
        }
        Ok(Self {
            sent: sent.with_rows(exchange.send.iter().sum()),
            arranged: Arranged::new(&exchange.order, device),
            exchange,
            groups: groups.clone(),
        })
    }
}

impl Way for Exchanged {
    fn rows_of_experts(&self) -> &[usize] {
        &self.exchange.order.rows
    }

    fn there(&self, x: Tensor<2>, of: Of) -> Result<Tensor<2>, CollectiveError> {
        let Self { sent, exchange: Exchange { send, recv, shown, .. }, arranged, groups } = self;
        let mut came = tensors::all_to_all(sent.there(x, of), send, recv, &groups.ep)?;
        if groups.etp.size() > 1 {
            came = tensors::all_gather(lengthened(came, *shown), &groups.etp)?;
        }
        Ok(match arranged {
            Some(arranged) => arranged.there(came),
            None => came,
        })
    }

    fn back(&self, y: Tensor<2>, of: Of) -> Result<Tensor<2>, CollectiveError> {
        let Self { sent, exchange: Exchange { send, recv, .. }, arranged, groups } = self;
        let mut came = match arranged {
            Some(arranged) => arranged.back(y),
            None => y,
        };
        if groups.etp.size() > 1 {
            let shown = tensors::reduce_scatter(came, ReduceOp::Sum, &groups.etp)?;
            came = shortened(shown, recv.iter().sum());
        }
        Ok(sent.back(tensors::all_to_all(came, recv, send, &groups.ep)?, of))
    }
}
