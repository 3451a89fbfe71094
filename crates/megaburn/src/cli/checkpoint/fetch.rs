//! `megaburn checkpoint fetch`.

use std::path::PathBuf;

use clap::Args;
use megaburn_collective::Progress;
use megaburn_train::TrainError;
use serde_json::json;

use super::{
    super::{interrupt::end_clean_on_signals, print},
    place::refused,
    stored::StoreUrl,
};

#[derive(Args)]
pub(in crate::cli) struct FetchArgs {
    /// The URL of a checkpoint in an object store, such as s3://bucket/run/step-00000300.
    #[arg(value_name = "URL")]
    from: PathBuf,
    /// The checkpoint to write.
    #[arg(value_name = "OUT")]
    to: PathBuf,
    /// Replace an existing checkpoint.
    #[arg(long)]
    force: bool,
    /// Print the result as a JSON object.
    #[arg(long)]
    json: bool,
}

impl FetchArgs {
    pub(super) fn run(self) -> Result<(), TrainError> {
        end_clean_on_signals()?;
        let url = StoreUrl::open(&self.from)?;
        let url = url.and_then(|url| Some((url.store, url.step?)));
        let (store, step) = url.ok_or_else(|| {
            let why = "is not the URL of a checkpoint; write one like s3://bucket/run/step-00000300, \
                       which `megaburn checkpoint ls s3://bucket/run` lists";
            refused(&self.from, why)
        })?;
        store.fetch(step, &self.to, self.force, &Progress::none())?;
        let [from, to] = [&self.from, &self.to].map(|path| path.display().to_string());
        if self.json {
            return print::result(json!({"from": from, "path": to, "step": step}));
        }
        print::note(format!("{from} -> {to}, verified"));
        Ok(())
    }
}
