//! The kernels: a plane a token. Expert `32 i + lane` is the lane's `i`th, in its registers.

mod forward;
mod gradient;

use cubecl::prelude::*;

pub(super) use forward::route_kernel;
pub(super) use gradient::gradient_kernel;

/// Units of a plane.
pub(super) const PLANE: usize = 32;
/// Tokens of a cube.
pub(super) const TOKENS: usize = 8;
/// The most experts: a lane holds 16.
pub(super) const MOST_EXPERTS: usize = 512;

/// As [`TINY`](super::TINY).
const TINY: f32 = 1e-20;

/// What is known of a router when its kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    pub(super) experts: u32,
    pub(super) top_k: u32,
    /// Of a softmax, else of a sigmoid.
    pub(super) softmax: bool,
    pub(super) normalise: bool,
    /// How many there are, how many are kept, how many of a group's best scores are its own.
    pub(super) groups: Option<[u32; 3]>,
}

/// By what experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ChoiceOf {
    Scores,
    /// Scores and what is added to each.
    Biased,
    /// Not here.
    Others,
}

impl Plan {
    /// Experts that a lane holds.
    fn held(self) -> usize {
        (self.experts as usize).div_ceil(PLANE)
    }

    /// Choices that a lane holds.
    fn picked(self) -> usize {
        (self.top_k as usize).div_ceil(PLANE)
    }

    fn groups(self) -> [u32; 3] {
        self.groups.unwrap_or([1, 1, 0])
    }

    /// Experts of a group.
    fn of_group(self) -> u32 {
        self.experts / self.groups()[0]
    }
}

/// The number of the lane's `i`th.
#[cube]
fn number(#[comptime] i: usize) -> u32 {
    UNIT_POS_X + comptime!((i * PLANE) as u32)
}
