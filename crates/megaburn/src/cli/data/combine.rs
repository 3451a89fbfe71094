//! `megaburn data merge` and `megaburn data split`.

use std::path::{Path, PathBuf};

use clap::Args;
use megaburn_data::{DocumentSplit, IndexedDataset, merge, split};
use megaburn_train::TrainError;

use super::{super::print, counted, failed};

#[derive(Args)]
pub(in crate::cli) struct MergeArgs {
    /// The paths of data sets, without .bin and .idx, in the order of their documents.
    #[arg(value_name = "PREFIX", required = true)]
    prefixes: Vec<PathBuf>,
    /// Writes OUT.bin and OUT.idx.
    #[arg(long, value_name = "OUT", visible_alias = "output-prefix")]
    out: PathBuf,
    /// Overwrite a data set that megaburn wrote.
    #[arg(long)]
    force: bool,
}

#[derive(Args)]
pub(in crate::cli) struct SplitArgs {
    /// The path of the data set, without .bin and .idx.
    #[arg(value_name = "PREFIX")]
    prefix: PathBuf,
    /// Weights of training, validation and test, by documents. Megatron-LM's `--split`
    /// counts sequences, which differ if documents are empty or lists of texts.
    #[arg(long, value_name = "W,W,W", value_delimiter = ',', required = true)]
    split: Vec<f64>,
    /// Writes OUT_train, OUT_valid and OUT_test, each as .bin and .idx.
    #[arg(long, value_name = "OUT", visible_alias = "output-prefix")]
    out: PathBuf,
    /// Overwrite data sets that megaburn wrote, and remove parts of an earlier split.
    #[arg(long)]
    force: bool,
}

impl MergeArgs {
    pub(super) fn run(self) -> Result<(), TrainError> {
        let sets = self.prefixes.iter().map(IndexedDataset::open);
        let sets: Vec<_> = sets.collect::<Result<_, _>>().map_err(failed)?;
        merge(&sets, &self.out, self.force).map_err(failed)?;
        show(&self.out)
    }
}

impl SplitArgs {
    pub(super) fn run(self) -> Result<(), TrainError> {
        let set = IndexedDataset::open(&self.prefix).map_err(failed)?;
        let parts = DocumentSplit::new(&self.split, set.num_documents()).map_err(failed)?;
        let written = split(&set, &parts, &self.out, self.force).map_err(failed)?;
        written.iter().try_for_each(|prefix| show(prefix))
    }
}

/// Prints what a data set that was written holds.
fn show(prefix: &Path) -> Result<(), TrainError> {
    let set = IndexedDataset::open(prefix).map_err(failed)?;
    print::note(format!(
        "wrote    {0}.bin, {0}.idx: {1}, {2}",
        prefix.display(),
        counted(set.num_documents(), "document"),
        counted(set.num_tokens(), "token"),
    ));
    Ok(())
}
