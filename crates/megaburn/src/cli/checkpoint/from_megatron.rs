//! `megaburn checkpoint from-megatron`.

use std::path::PathBuf;

use clap::Args;
use megaburn_train::{
    TrainError,
    megatron::{FromMegatronConfig, from_megatron},
};
use serde_json::json;

use super::super::{interrupt::end_clean_on_signals, print};

#[derive(Args)]
pub(in crate::cli) struct FromMegatronArgs {
    /// A folder of checkpoints of Megatron-LM in the format torch_dist, or the folder of an
    /// iteration.
    #[arg(value_name = "DIR")]
    from: PathBuf,
    /// The folder of the run to make.
    #[arg(value_name = "RUN")]
    to: PathBuf,
    /// Number of token ids; the rest of the vocabulary is dropped. Default: all rows, because
    /// Megatron-LM's loss has its padding too.
    #[arg(long, value_name = "N")]
    vocab_size: Option<usize>,
    /// Take the weights, steps and samples only, as with Megatron-LM's --no-load-optim: moments are zero,
    /// and schedules begin.
    #[arg(long)]
    weights_only: bool,
    /// Print the result as a JSON object.
    #[arg(long)]
    json: bool,
}

impl FromMegatronArgs {
    pub(super) fn run(self) -> Result<(), TrainError> {
        end_clean_on_signals()?;
        let options = FromMegatronConfig::new()
            .with_vocab_size(self.vocab_size)
            .with_weights_only(self.weights_only);
        let imported = from_megatron(&self.from, &self.to, &options)?;
        let [from, to] = [&self.from, &self.to].map(|path| path.display().to_string());
        let progress = imported.progress;
        let (step, samples) = (progress.step, progress.consumed_samples);
        let (model, notes) = (&imported.model, imported.notes);
        if self.json {
            let family = model.family.to_string();
            return print::result(json!({
                "from": from, "path": to, "family": family, "step": step,
                "consumed_samples": samples, "notes": notes,
            }));
        }
        print::note(format!(
            "{}, {}, after step {step} and {samples} samples: {from} -> {to}",
            model.family,
            model.summary()
        ));
        for note in notes {
            print::note(format!("note: {note}"));
        }
        print::note(format!("to continue it, megaburn train --resume {to}"));
        Ok(())
    }
}
