use std::fs;
use std::path::PathBuf;

use clap::Args;
use megaburn_data::{IndexedDataset, LengthHistogram};
use megaburn_report::length_plot;
use megaburn_train::TrainError;

use super::{super::print, counted, failed};

/// Characters of the longest bar.
const BAR: u64 = 40;

#[derive(Args)]
pub(in crate::cli) struct StatsArgs {
    /// The path of the data set, without .bin and .idx.
    #[arg(value_name = "PREFIX")]
    prefix: PathBuf,
    /// Also draw the lengths into this SVG file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl StatsArgs {
    pub(super) fn run(self) -> Result<(), TrainError> {
        let set = IndexedDataset::open(&self.prefix).map_err(failed)?;
        set.check().map_err(failed)?;
        let mut lengths = LengthHistogram::default();
        for size in set.document_sizes() {
            lengths.add(size.map_err(failed)?.num_tokens);
        }
        print::result(format!(
            "{}, {}, {}",
            counted(set.num_documents(), "document"),
            counted(set.num_sequences(), "sequence"),
            counted(set.num_tokens(), "token"),
        ))?;
        print::result(format!(
            "length   min {}, median {}, mean {:.1}, 90% {}, 99% {}, max {}",
            lengths.quantile(0.0),
            lengths.quantile(0.5),
            lengths.mean(),
            lengths.quantile(0.9),
            lengths.quantile(0.99),
            lengths.quantile(1.0),
        ))?;
        print::result(format!(
            "empty    {}",
            counted(lengths.num_empty(), "document")
        ))?;
        let ranges = lengths.ranges();
        let most = ranges.iter().map(|(_, _, count)| *count).max().unwrap_or(0);
        for (first, last, count) in &ranges {
            let range = match first == last {
                true => first.to_string(),
                false => format!("{first}-{last}"),
            };
            let bar = "#".repeat((count * BAR).div_ceil(most.max(1)) as usize);
            print::result(format!("{range:>21} {count:>12} {bar}").trim_end())?;
        }
        match self.svg {
            Some(path) => draw(&set, &lengths, path),
            None => Ok(()),
        }
    }
}

fn draw(set: &IndexedDataset, lengths: &LengthHistogram, path: PathBuf) -> Result<(), TrainError> {
    let title = format!(
        "{}: {}, {}",
        set.prefix().display(),
        counted(lengths.num_documents(), "document"),
        counted(lengths.num_tokens(), "token"),
    );
    let svg = length_plot(&title, &lengths.ranges())?;
    fs::write(&path, svg).map_err(|source| TrainError::Write {
        path: path.clone(),
        source,
    })?;
    print::note(format!("wrote    {}", path.display()));
    Ok(())
}
