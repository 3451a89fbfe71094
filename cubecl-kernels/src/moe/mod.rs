//! What a layer of experts does to tokens beside its matrices: which experts each goes to and with what
//! weight, and rows that are taken apart and put together again.

mod gradient;
mod router;
mod rows;

pub use gradient::with_gradient;
pub use router::{
    RouterGroups, RouterOptions, RouterScores, choose_experts, expert_weights, router_scores,
};
pub use rows::{sum_rows, take_rows};
