//! Code that several test programs of the workspace share.

pub mod archive;
pub mod bf16;
pub mod expert_grid;
pub mod gather;
pub mod layout_grid;
pub mod run;
pub mod task_pool;
pub mod text;
