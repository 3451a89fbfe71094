//! What a layer of experts does to tokens beside its matrices: which experts each goes to and with what
//! weight, and rows that are taken apart and put together again.

#[cfg(feature = "cuda")]
mod cube;
mod gradient;
mod losses;
mod order;
#[cfg(feature = "cuda")]
mod plane;
mod ranks;
mod reading;
pub(crate) mod router;
mod rows;

pub(crate) use gradient::with_gradient;
pub use losses::{BalanceLoss, RouterLossTerms, RouterLosses, router_losses};
pub use order::{ExpertRows, rows_by_expert};
pub use ranks::ranks_of_experts;
pub use reading::read_meanwhile;
pub use router::{
    Routed, RouterGradients, RouterGroups, RouterOptions, RouterScores, choose_experts,
    expert_weights, route, route_to, router_logits, router_scores,
};
pub use rows::{sum_rows, take_rows};
