//! What the measurements beside this folder share: the models, the clock and the report.
//!
//! Run one with `cargo bench -p megaburn-benches --bench plain_burn` (or `ranks`, `collectives`,
//! `load_hf`);
//! `-- --save` also writes a dated file into `results/`.

pub mod llama;
pub mod plain;
pub mod report;
pub mod timing;

/// Why a measurement ends without a result.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A measurement with its command line, its name first.
pub type Program = fn(Vec<std::ffi::OsString>) -> std::process::ExitCode;

/// The measurements that are functions, for a program that is several.
pub const PROGRAMS: &[(&str, Program)] = &[];
