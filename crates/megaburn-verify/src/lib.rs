//! Compares the logits, loss, gradients and training losses of a layout with those of
//! `transformers`.
//!
//! A [`Reference`] is a model and a batch with what `transformers` computes on it, as
//! `tests/tools/hf_reference.py` writes it. [`verify`] runs a layout on both and returns a
//! [`Report`]. The model, gradients and optimizer are built by the trainer's own function, so its
//! way is compared. [`verify_activations`] names the first block that differs from one rank's.
//!
//! ```
//! use std::path::Path;
//!
//! use megaburn_train::{TrainError, config::Dtype, device::Devices};
//! use megaburn_verify::{Reference, Tolerances, verify};
//!
//! fn check(folder: &Path) -> Result<bool, TrainError> {
//!     let reference = Reference::open(folder)?;
//!     let layout = "tp2-dp2-sp".parse()?;
//!     let tolerances = Tolerances::of(Dtype::F32);
//!     let report = verify(&reference, &layout, Dtype::F32, &tolerances, Devices::Cpu, None);
//!     Ok(report.ok)
//! }
//! ```

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]
// These macros panic if their output cannot be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod activations;
mod collect;
mod decoder_inputs;
mod encoder_inputs;
mod executor;
mod gradients;
mod rank;
mod reference;
mod report;

use burn::prelude::Device;
use megaburn_collective::{Group, GroupOptions, ProcessGroups, RankEnv};
use megaburn_mesh::Layout;
use megaburn_train::{TrainError, config::Dtype, device::Devices, run_ranks};

pub use activations::{
    ActivationReport, BlockDifference, verify_activations, verify_activations_of,
};
use collect::collect;
use gradients::compare_gradients;
use rank::VerifyRank;
pub use reference::Reference;
pub use report::{Report, Tolerances};

/// Runs the reference's model and batch on the ranks of `layout`, with parameters and activations
/// in `dtype`, and compares the results. The ranks are threads of this process, or this process is
/// one of several (`env`); then all ranks except the first report at most an error of their own.
///
/// Without an error, the report has every number whose counterpart is in the reference.
///
/// # Errors
/// Never returned: a layout that the model refuses, or a failure, is in the report.
///
/// # Collective
/// All ranks.
pub fn verify(
    reference: &Reference,
    layout: &Layout,
    dtype: Dtype,
    tolerances: &Tolerances,
    devices: Devices,
    env: Option<RankEnv>,
) -> Report {
    let run = || {
        let device = devices.of_this_process(layout, env.as_ref())?;
        let options = GroupOptions::default();
        let compare =
            |world: &Group| verify_on(world, reference, layout, dtype, tolerances, &device);
        Ok(run_ranks(layout, env, options, &device, compare)?.swap_remove(0))
    };
    run().unwrap_or_else(|error: TrainError| {
        Report::refused(reference, &layout.to_string(), error.to_string())
    })
}

/// As [`verify`], on existing ranks. All ranks except rank 0 get a report without numbers.
///
/// # Errors
/// The layout cannot split the model or the batch, or a collective or computation failed.
///
/// # Collective
/// All ranks.
pub fn verify_on(
    world: &Group,
    reference: &Reference,
    layout: &Layout,
    dtype: Dtype,
    tolerances: &Tolerances,
    device: &Device,
) -> Result<Report, TrainError> {
    reference.check(layout)?;
    let groups = ProcessGroups::new(world, *layout)?;
    let found = VerifyRank::new(reference, groups, dtype, &device.clone().autodiff())?.run()?;
    let mut report = Report::new(reference, layout.to_string());
    let Some(ranks) = collect(world, found)? else {
        return Ok(report);
    };
    let expected = reference.losses()?;
    for found in &ranks {
        report.logits(found.logits);
        report.losses(&expected, &found.losses);
    }
    let (gradients, skipped) = compare_gradients(reference, ranks.into_iter().map(|r| r.grads))?;
    report.gradients(gradients, skipped);
    report.judge(tolerances);
    Ok(report)
}
