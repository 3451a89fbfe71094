//! `megaburn checkpoint reshard`.

use std::path::PathBuf;

use clap::Args;
use megaburn_mesh::Layout;
use megaburn_train::{TrainError, reshard};
use serde_json::json;

use super::super::{interrupt::end_clean_on_signals, print};

#[derive(Args)]
pub(in crate::cli) struct ReshardArgs {
    /// A checkpoint, or a run, whose newest intact checkpoint is used.
    #[arg(value_name = "CHECKPOINT")]
    from: PathBuf,
    /// The checkpoint to write.
    #[arg(value_name = "OUT")]
    to: PathBuf,
    /// The layout whose ranks write it, such as `tp2-pp2`.
    #[arg(long, value_name = "L")]
    layout: String,
    /// Replace an existing checkpoint.
    #[arg(long)]
    force: bool,
    /// Print the result as a JSON object.
    #[arg(long)]
    json: bool,
}

impl ReshardArgs {
    pub(super) fn run(self) -> Result<(), TrainError> {
        end_clean_on_signals()?;
        let layout: Layout = self.layout.parse()?;
        reshard(&self.from, &self.to, &layout, self.force)?;
        let [from, to] = [&self.from, &self.to].map(|path| path.display().to_string());
        let layout = layout.to_string();
        if self.json {
            return print::result(json!({"from": from, "path": to, "layout": layout}));
        }
        print::note(format!("{from} -> {to}, as {layout} writes it"));
        Ok(())
    }
}
