//! Runs: resume, run folders, output, processes.

pub(crate) mod changed_settings;
mod checkpoints;
pub(crate) mod child;
mod command_line;
mod dry_run;
mod elastic;
mod eval;
mod hosts;
mod info;
mod logs;
mod megatron;
pub(crate) mod output;
pub(crate) mod processes;
mod profile;
mod restarts;
mod restarts_in_place;
pub(crate) mod resume;
pub(crate) mod run_folder;
mod stored;
mod sweep;
mod watch;
