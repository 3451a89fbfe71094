//! Operations of a mixture-of-experts layer other than its matrices: routing tokens to experts with
//! weights, router losses, and permuting and unpermuting rows.

mod gradient;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod losses;
mod overlapped_read;
mod permutation;
mod ranks;
pub(crate) mod router;
mod rows;

pub(crate) use gradient::with_gradient;
pub use losses::{BalanceLoss, RouterLossTerms, RouterLosses, router_losses};
pub use overlapped_read::read_overlapped;
pub use permutation::{ExpertPermutation, permutation_by_expert};
pub use ranks::ep_ranks_of_experts;
pub use router::{
    Routed, RouterGradients, RouterGroups, RouterOptions, RouterScores, choose_experts,
    expert_weights, route, route_to, router_logits, router_scores,
};
pub use rows::{permute, unpermute};
