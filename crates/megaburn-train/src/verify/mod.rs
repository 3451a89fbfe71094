//! Whether a layout computes what `transformers` computed: logits, loss, gradients, a training curve.

mod gradients;
mod rank;
mod reference;
mod report;

use burn::prelude::Device;
use megaburn_collective::{GroupOptions, ProcessGroups};
use megaburn_mesh::Layout;

use crate::{TrainError, config::Dtype, ranks::run_ranks, run::refuse_axes_to_come};
use gradients::compare_gradients;
use rank::Rank;
pub use reference::Reference;
pub use report::{Report, Tolerances};

/// Runs the reference's model and batch on the rank threads of `layout`, parameters and activations
/// in `dtype`, and compares.
///
/// Without an error, every number is there that the reference has the counterpart of.
///
/// # Errors
/// None: a layout that the model refuses, or a failure, stands in the report.
pub fn verify(
    reference: &Reference,
    layout: &Layout,
    dtype: Dtype,
    tolerances: &Tolerances,
) -> Report {
    let mut report = Report::new(reference, layout.to_string());
    match run(reference, layout, dtype, &mut report) {
        Ok(()) => report.judge(tolerances),
        Err(error) => report.refuse(error.to_string()),
    }
    report
}

fn run(
    reference: &Reference,
    layout: &Layout,
    dtype: Dtype,
    report: &mut Report,
) -> Result<(), TrainError> {
    refuse_axes_to_come(layout)?;
    reference.check(layout)?;
    let ranks = run_ranks(layout, None, GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(world, *layout)?;
        Rank::new(reference, groups, dtype, &Device::flex().autodiff())?.run()
    })?;
    let expected = reference.losses()?;
    for found in &ranks {
        report.logits(found.logits);
        report.losses(&expected, &found.losses);
    }
    let (gradients, skipped) = compare_gradients(reference, ranks.into_iter().map(|r| r.grads))?;
    report.gradients(gradients, skipped);
    Ok(())
}
