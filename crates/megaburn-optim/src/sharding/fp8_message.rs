//! The message in which a rank sends its shard of a bucket whose weights are in FP8.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use burn::{Tensor, tensor::DType};
use megaburn_kernels::{SentScale, bf16_out_slice};

use super::bucket::{ALIGN, Bucket};

/// Where the parts of a bucket are in the messages of the ranks that share it. A part in FP8 takes
/// an element for two numbers, and another one an element for each. All messages have the length of
/// the longest.
#[derive(Clone, Debug)]
pub(super) struct Fp8Layout {
    /// The parts of each rank, in the order of the bucket.
    ranks: Vec<Vec<Part>>,
    /// Elements of a message.
    len: usize,
}

/// The part of a parameter that a rank has.
#[derive(Clone, Debug)]
struct Part {
    /// The index of the parameter in its bucket.
    slot: usize,
    /// The part of the bucket.
    range: Range<usize>,
    /// The start in the message.
    at: usize,
    is_fp8: bool,
}

impl Part {
    /// The place in the message.
    fn place(&self) -> Range<usize> {
        let len = self.range.len();
        let len = if self.is_fp8 { len.div_ceil(2) } else { len };
        self.at..self.at + len
    }
}

impl Fp8Layout {
    /// The layout for a bucket of bf16 numbers that `num_ranks` share; `None` if it would not save
    /// anything.
    pub(super) fn new(
        bucket: &Bucket,
        num_ranks: usize,
        is_fp8: impl Fn(&str) -> bool,
    ) -> Option<Self> {
        let parts = |rank: usize| {
            let share = bucket.share(rank, num_ranks);
            let mut at = 0;
            let slots = bucket.slots.iter().enumerate();
            let parts = slots.map(|(index, slot)| {
                let within = slot.within(&share);
                let part = Part {
                    slot: index,
                    range: slot.start + within.start..slot.start + within.end,
                    at,
                    is_fp8: is_fp8(&slot.path),
                };
                at = part.place().end.next_multiple_of(ALIGN);
                part
            });
            let parts: Vec<_> = parts.filter(|part| !part.range.is_empty()).collect();
            (parts, at)
        };
        let (ranks, lens): (Vec<_>, Vec<_>) = (0..num_ranks).map(parts).unzip();
        let len = lens.into_iter().max().unwrap_or(0);
        (len * num_ranks < bucket.len).then_some(Self { ranks, len })
    }

    /// The parts of a rank that are in FP8: the index of the parameter, and the part of the bucket.
    pub(super) fn fp8_parts(&self, rank: usize) -> impl Iterator<Item = (usize, &Range<usize>)> {
        let parts = self.ranks[rank].iter().filter(|part| part.is_fp8);
        parts.map(|part| (part.slot, &part.range))
    }

    /// Whether all parts are in FP8.
    fn is_all_fp8(&self) -> bool {
        self.ranks.iter().flatten().all(|part| part.is_fp8)
    }
}

/// A rank's message.
#[derive(Clone, Debug)]
pub(super) struct Fp8Message {
    layout: Arc<Fp8Layout>,
    /// The scale of each parameter that is sent in FP8, by its index in the bucket.
    scales: Arc<BTreeMap<usize, SentScale>>,
    own: Tensor<1>,
}

impl Fp8Message {
    /// Writes the message of `rank`. `values` holds the bucket's values from `start` on and contains
    /// the rank's shard.
    pub(super) fn new(
        layout: Fp8Layout,
        scales: BTreeMap<usize, SentScale>,
        rank: usize,
        (values, start): (&Tensor<1>, usize),
    ) -> Self {
        let message = Tensor::zeros([layout.len], (&values.device(), DType::BF16));
        let mut parts = Vec::new();
        for part in &layout.ranks[rank] {
            let place = part.place();
            let value = values
                .clone()
                .narrow(0, part.range.start - start, part.range.len());
            parts.push(match part.is_fp8 {
                true => {
                    let room = bf16_out_slice(&message, place.clone());
                    let at = room.is_none().then_some(place);
                    (at, scales[&part.slot].packed(value, room))
                }
                false => (Some(place), value),
            });
        }
        Self {
            own: filled(message, parts),
            layout: Arc::new(layout),
            scales: Arc::new(scales),
        }
    }

    /// What this rank sends.
    pub(super) fn own(&self) -> &Tensor<1> {
        &self.own
    }

    /// Returns the layout and the scales without this rank's bytes, which suffice to read the
    /// messages of all ranks.
    pub(super) fn without_own(&self) -> Self {
        Self {
            own: Tensor::empty([0], (&self.own.device(), DType::BF16)),
            ..self.clone()
        }
    }

    /// Whether all values of a bucket can be written to a buffer that other tensors share.
    pub(super) fn is_in_place(&self, whole: &Tensor<1>) -> bool {
        let mut parts = self.layout.ranks.iter().flatten();
        self.layout.is_all_fp8()
            && parts.all(|part| bf16_out_slice(whole, part.range.clone()).is_some())
    }

    /// Writes the values that the messages of all ranks have to `whole`, `[bucket]`.
    pub(super) fn unpacked(&self, all: Tensor<1>, whole: Tensor<1>) -> Tensor<1> {
        let Fp8Layout { ranks, len } = &*self.layout;
        let mut parts = Vec::new();
        for (rank, part) in ranks
            .iter()
            .enumerate()
            .flat_map(|(rank, parts)| parts.iter().map(move |part| (rank, part)))
        {
            let Range { start, end } = part.place();
            let sent = all.clone().narrow(0, rank * len + start, end - start);
            parts.push(match part.is_fp8 {
                true => {
                    let room = bf16_out_slice(&whole, part.range.clone());
                    let at = room.is_none().then(|| part.range.clone());
                    let scale = &self.scales[&part.slot];
                    (at, scale.unpacked(sent, part.range.len(), room))
                }
                false => (Some(part.range.clone()), sent),
            });
        }
        filled(whole, parts)
    }
}

/// The buffer with values at their places; those without a place are in it already.
fn filled(buffer: Tensor<1>, parts: Vec<(Option<Range<usize>>, Tensor<1>)>) -> Tensor<1> {
    // Collecting first drops the values that are in place already: nothing else shares the buffer
    // then.
    let others = parts
        .into_iter()
        .filter_map(|(place, value)| Some((place?, value)));
    let others: Vec<_> = others.collect();
    let put = |buffer: Tensor<1>, (place, value): (Range<usize>, Tensor<1>)| {
        buffer.slice_assign([place], value)
    };
    others.into_iter().fold(buffer, put)
}
