//! The code that the measurements share: the models, the clock and the report.
//!
//! Run a measurement with `cargo bench -p megaburn-benches --bench plain_burn` (or `ranks`,
//! `collectives`, `load_hf`); `-- --save` also puts the result on top of `results/NAME.md`.

pub mod collective;
pub mod figures;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod llama;
pub mod plain;
pub mod report;
pub mod timing;

/// The error that ends a measurement without a result.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The main function of a measurement; it takes the command line, program name first.
pub type Program = fn(Vec<std::ffi::OsString>) -> std::process::ExitCode;

/// The measurements that are functions, for a binary that contains several programs.
///
/// Only programs for GPU machines are listed: they run from the bundle, where there is no Cargo.
#[cfg(feature = "cuda")]
pub const PROGRAMS: &[(&str, Program)] = &[
    ("bench-activations", gpu::activations::main),
    ("bench-context", gpu::context::main),
    ("bench-data-parallel", gpu::data_parallel::main),
    ("bench-gemm", gpu::gemm::main),
    ("bench-figures", figures::main),
    ("bench-first-use", gpu::first_use::main),
    ("bench-fp8", gpu::fp8::main),
    ("bench-kernel-errors", gpu::errors::main),
    ("bench-kernels", gpu::kernels::main),
    ("bench-layouts", gpu::layouts::main),
    ("bench-learner", gpu::learner::main),
    ("bench-models", gpu::models::main),
    ("bench-moe", gpu::moe::main),
    ("bench-nccl", gpu::nccl::main),
    ("bench-train-step", gpu::train_step::main),
];
/// Empty without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub const PROGRAMS: &[(&str, Program)] = &[];
