//! `megaburn checkpoint to-megatron`.

use std::path::PathBuf;

use clap::Args;
use megaburn_train::{TrainError, megatron::to_megatron};
use serde_json::json;

use super::super::{interrupt::end_clean_on_signals, print};

#[derive(Args)]
pub(in crate::cli) struct ToMegatronArgs {
    /// A checkpoint, or a run, whose newest intact checkpoint is used.
    #[arg(value_name = "RUN_OR_CHECKPOINT")]
    from: PathBuf,
    /// The folder to make, which Megatron-LM loads with --load.
    #[arg(value_name = "OUT")]
    to: PathBuf,
    /// Degree of expert parallelism in Megatron-LM, which matters to models with experts: above 1,
    /// their optimizer is another. Default: that of the original, or of the run.
    #[arg(long, value_name = "N")]
    ep: Option<usize>,
    /// Print the result as a JSON object.
    #[arg(long)]
    json: bool,
}

impl ToMegatronArgs {
    pub(super) fn run(self) -> Result<(), TrainError> {
        end_clean_on_signals()?;
        let exported = to_megatron(&self.from, &self.to, self.ep)?;
        let from = self.from.display().to_string();
        let folder = exported.folder.display().to_string();
        let progress = exported.progress;
        let (step, samples) = (progress.step, progress.consumed_samples);
        let (model, notes) = (&exported.model, exported.notes);
        if self.json {
            let family = model.family.to_string();
            return print::result(json!({
                "from": from, "path": folder, "family": family, "step": step,
                "consumed_samples": samples, "notes": notes,
            }));
        }
        print::note(format!(
            "{}, {}, after step {step} and {samples} samples: {from} -> {folder}",
            model.family,
            model.summary()
        ));
        for note in notes {
            print::note(format!("note: {note}"));
        }
        Ok(())
    }
}
