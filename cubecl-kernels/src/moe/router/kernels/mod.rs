//! The router's kernels, with the layout of [`moe::kernels`](crate::moe::kernels).

mod forward;
mod gradient;

pub(super) use forward::route_kernel;
pub(super) use gradient::gradient_kernel;

use crate::moe::kernels::{PLANE, TINY, number};

/// The compile-time parameters of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    pub(super) experts: u32,
    pub(super) top_k: u32,
    /// Whether scores are a softmax instead of a sigmoid.
    pub(super) softmax: bool,
    pub(super) normalise: bool,
    /// The number of groups, how many are kept, and how many best scores make a group's score.
    pub(super) groups: Option<[u32; 3]>,
}

/// By which values experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ChoiceOf {
    Scores,
    /// Scores plus a bias.
    Biased,
    /// The caller gives the experts.
    Others,
}

impl Plan {
    /// Experts per lane.
    fn held(self) -> usize {
        (self.experts as usize).div_ceil(PLANE)
    }

    /// Choices per lane.
    fn picked(self) -> usize {
        (self.top_k as usize).div_ceil(PLANE)
    }

    fn groups(self) -> [u32; 3] {
        self.groups.unwrap_or([1, 1, 0])
    }

    /// Experts per group.
    fn of_group(self) -> u32 {
        self.experts / self.groups()[0]
    }
}
