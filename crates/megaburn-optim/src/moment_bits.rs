//! Moments as they are stored, and as updates compute with them.

use std::ops::Range;

use burn::{Tensor, tensor::DType};
use megaburn_kernels::{packed_moment, unpacked_moment};

use crate::{
    moment::Moment,
    offload::{Key, Store},
    rule::Rule,
    state_dtype::StateDtype,
};

/// What determines how a moment is stored.
#[derive(Clone, Debug)]
pub(crate) struct MomentPlace<'a> {
    pub(crate) path: &'a str,
    pub(crate) moment: Moment,
    pub(crate) dtype: StateDtype,
    /// The range of the flattened local parameter.
    pub(crate) range: Range<usize>,
    /// Steps taken.
    pub(crate) time: u64,
}

impl MomentPlace<'_> {
    /// The tensor to store for a moment.
    pub(crate) fn stored(&self, values: Tensor<1>) -> Tensor<1> {
        match self.dtype.code(self.moment) {
            None => values.cast(DType::from(self.dtype.computed())),
            Some(code) => packed_moment(values, code, self.seed(), self.range.start),
        }
    }

    /// The moment of a tensor that was stored.
    fn values(&self, stored: Tensor<1>) -> Tensor<1> {
        match self.dtype.code(self.moment) {
            None => stored,
            Some(code) => unpacked_moment(stored, self.range.len(), code),
        }
    }

    /// The seed of stochastic rounding: another one for each moment, parameter and step, and the
    /// same on all ranks.
    fn seed(&self) -> u32 {
        let names = [self.moment.name(), ".", self.path];
        let bytes = names.iter().flat_map(|name| name.bytes());
        let bytes = bytes.chain(self.time.to_le_bytes());
        // FNV-1a, <http://www.isthe.com/chongo/tech/comp/fnv/>.
        bytes.fold(0x811c_9dc5, |hash, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        })
    }
}

impl Store {
    /// Takes a moment, in the type that updates compute with; `None` before the first step.
    pub(crate) fn take_moment(&mut self, place: &MomentPlace<'_>) -> Option<Tensor<1>> {
        let stored = self.take(&Key::moment(place.path, place.moment))?;
        Some(place.values(stored))
    }

    /// Stores a moment.
    pub(crate) fn put_moment(&mut self, place: &MomentPlace<'_>, values: Tensor<1>) {
        let stored = place.stored(values);
        self.put(Key::moment(place.path, place.moment), stored);
    }
}

impl Rule {
    /// The type of a moment that the rule keeps.
    pub(crate) fn moment_dtype(&self, moment: Moment) -> StateDtype {
        let adamw = match self {
            Self::AdamW(config) => config,
            Self::Sgd(config) => return config.momentum_buffer,
            Self::Lion(config) => return config.exp_avg,
            Self::Muon(muon) => &muon.config().adamw,
        };
        match (moment, self) {
            (Moment::ExpAvgSq, _) => adamw.exp_avg_sq,
            (Moment::MomentumBuffer, Self::Muon(muon)) => muon.config().momentum_buffer,
            (Moment::ExpAvg | Moment::MomentumBuffer, _) => adamw.exp_avg,
        }
    }
}

#[cfg(test)]
mod tests;
