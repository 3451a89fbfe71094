//! Kills processes that encode, or build indices, at random moments, and compares what others make
//! of their work with what a process makes that nothing disturbs.
//!
//! `MEGABURN_KILL_CASES=100 cargo test -p megaburn-data --test killed` kills as many of each kind.

mod full_disk;
mod index;
mod preprocess;
mod process;
mod text;
