//! Rules for sources, documents and figures.

mod book;
pub(crate) mod docs;
pub(crate) mod figures;
mod fixture_sizes;
pub(crate) mod imports;
pub(crate) mod kernel_folders;
mod learner;
mod manifests;
pub(crate) mod outside;
mod own_family;
mod own_model;
mod ports;
pub(crate) mod rules;
pub(crate) mod stale;
pub(crate) mod task_pool;
pub(crate) mod thread_locals;
pub(crate) mod words;
