use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use megaburn_collective::{CollectiveError, Group, ReduceOp, tensors};

use super::{
    Of, Slots, Way,
    plan::{Place, Read, Sent},
    rows::{index, lengthened, shortened, summed, taken},
};
use crate::moe::ExpertGroups;

/// Each row goes to the rank of its expert and no other (all-to-all over `ep`), and from there to those that share
/// the expert's matrices (all-gather over `etp`).
#[derive(Debug)]
pub(super) struct Exchanged {
    read: Read,
    top_k: usize,
    groups: ExpertGroups,
    /// On the device: of [`Sent::slots`] the tokens and themselves, [`Sent::rows`].
    tokens: Tensor<1, Int>,
    slots: Tensor<1, Int>,
    rows: Tensor<1, Int>,
    /// Where rows stand that experts read, and which of those each place has; none: they come in order.
    order: Option<[Tensor<1, Int>; 2]>,
}

impl Exchanged {
    /// # Collective
    /// All ranks of `groups.experts`, which tell each other how many rows go where.
    pub(super) fn new(
        slots: &Slots<'_>,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Result<Self, CollectiveError> {
        let sent = Sent::new(slots.experts, slots.num_experts);
        let counts = all_counts(&sent.counts, groups, device)?;
        let place = |group: &Group| Place { rank: group.rank(), ranks: group.size() };
        let etp = place(&groups.etp);
        let read = Read::new(&counts, place(&groups.ep), etp);
        let read = match slots.padded {
            Some(rows) => read.padded(rows, etp.ranks),
            None => read,
        };
        let num_places = read.shown * etp.ranks;
        let is_in_order = read.places.iter().copied().eq(0..num_places);
        let order = (!is_in_order).then(|| {
            // A place that is shown and has no row.
            let mut back = vec![read.places.len(); num_places];
            let rows = read.places.iter().enumerate().filter(|(_, place)| **place < num_places);
            rows.for_each(|(row, &place)| back[place] = row);
            [index(read.places.iter().copied(), device), index(back, device)]
        });
        Ok(Self {
            tokens: index(sent.slots.iter().map(|slot| slot / slots.top_k), device),
            slots: index(sent.slots, device),
            rows: index(sent.rows, device),
            order,
            read,
            top_k: slots.top_k,
            groups: groups.clone(),
        })
    }
}

impl Way for Exchanged {
    fn rows_of_experts(&self) -> &[usize] {
        &self.read.rows
    }

    fn there(&self, x: Tensor<2>, of: Of) -> Result<Tensor<2>, CollectiveError> {
        let Self { read: Read { send, recv, shown, .. }, groups, .. } = self;
        let index = match of {
            Of::Tokens => &self.tokens,
            Of::Slots => &self.slots,
        };
        let sent = taken(x, index);
        let mut came = tensors::all_to_all(sent, send, recv, &groups.ep)?;
        if groups.etp.size() > 1 {
            came = tensors::all_gather(lengthened(came, *shown), &groups.etp)?;
        }
        Ok(match &self.order {
            // Padding is the row behind all others.
            Some([order, _]) => {
                let rows = came.dims()[0] + usize::from(self.read.is_padded);
                taken(lengthened(came, rows), order)
            }
            None => came,
        })
    }

    fn back(&self, y: Tensor<2>, of: Of) -> Result<Tensor<2>, CollectiveError> {
        let Self { read: Read { send, recv, .. }, groups, rows, .. } = self;
        let mut came = match &self.order {
            Some([_, back]) => summed(y, back, 1),
            None => y,
        };
        if groups.etp.size() > 1 {
            let shown = tensors::reduce_scatter(came, ReduceOp::Sum, &groups.etp)?;
            came = shortened(shown, recv.iter().sum());
        }
        let sent = tensors::all_to_all(came, recv, send, &groups.ep)?;
        Ok(match of {
            Of::Tokens => summed(sent, rows, self.top_k),
            Of::Slots => summed(sent, rows, 1),
        })
    }
}

/// What each rank has for each expert.
fn all_counts(
    own: &[usize],
    groups: &ExpertGroups,
    device: &Device,
) -> Result<Vec<Vec<usize>>, CollectiveError> {
    if groups.experts.size() == 1 {
        return Ok(vec![own.to_vec()]);
    }
    let counts: Vec<i32> = own.iter().map(|&count| count as i32).collect();
    let counts = TensorData::new(counts, [1, own.len()]);
    let counts = Tensor::<2, Int>::from_data(counts, (device, DType::I32));
    let all = tensors::all_gather(counts, &groups.experts)?;
    let all: Vec<usize> = all.into_data().iter::<i32>().map(|count| count as usize).collect();
    Ok(all.chunks(own.len()).map(<[usize]>::to_vec).collect())
}
