//! The kernels, laid out as [`plane`](crate::moe::plane) says.

mod forward;
mod gradient;

pub(super) use forward::route_kernel;
pub(super) use gradient::gradient_kernel;

use crate::moe::plane::{PLANE, TINY, number};

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
