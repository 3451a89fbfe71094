//! `megaburn search`: the fastest layouts and settings of a configuration.

mod measure;

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use megaburn_plan::{FoundRun, Gpu, PlanError, SearchConfig, SearchResult};
use megaburn_train::{Exit, TrainError};
use serde_json::json;

use super::{TrainArgs, device::DeviceArg, fail, plan::Quantity, print};
use measure::Measured;

#[derive(Args)]
pub(super) struct SearchArgs {
    /// A TOML file of settings, as for `megaburn train --config`. Its model, batch and precision stay
    /// as they are.
    #[arg(value_name = "CONFIG")]
    config: String,
    /// A setting, like `train.global_batch=256`; the value is TOML or else a bare string. Repeatable.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Number of GPUs. Default: as many as the configuration says.
    #[arg(long, value_name = "N")]
    gpus: Option<usize>,
    /// The GPU: a100, h100, h200 or b200.
    #[arg(long, value_name = "GPU", default_value = "h100")]
    gpu: String,
    /// Tokens to train on, such as 300B or 15T. Default: those of `train.steps`.
    #[arg(long, value_name = "TOKENS")]
    tokens: Option<Quantity>,
    /// The price of a GPU for an hour, in dollars.
    #[arg(long, value_name = "DOLLARS")]
    price: Option<Quantity>,
    /// How many of the fastest to list.
    #[arg(long, value_name = "K", default_value_t = 5)]
    top: usize,
    /// Train a few steps of this many of the fastest, one after another, on the GPUs that are there,
    /// and rank them by what was measured. Nothing of these runs is kept.
    #[arg(long, value_name = "M", default_value_t = 0)]
    measure: usize,
    /// The device that `--measure` trains on. Default: GPUs if there are any and the program was built
    /// for them, otherwise the CPU.
    #[arg(long, value_enum, requires = "measure")]
    device: Option<DeviceArg>,
    /// Write the configuration with the layout and the settings of the fastest into this file, which
    /// must not exist.
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Print one JSON object instead of text. The names of its numbers end in their units.
    #[arg(long)]
    json: bool,
}

impl SearchArgs {
    /// Prints what was found. Exits with 1 if nothing fits or nothing could be measured.
    pub(super) fn run(self) -> Result<ExitCode, TrainError> {
        if let Some(path) = self.write.as_ref().filter(|path| path.exists()) {
            return Ok(fail(
                &format!(
                    "`--write {}`: the file exists: choose another name",
                    path.display()
                ),
                Exit::BadInput,
            ));
        }
        let found = match self.search() {
            Ok(found) => found,
            Err(error) => return Ok(fail(&error.to_string(), error.exit())),
        };
        if !self.json {
            print::result(found.to_string().trim_end())?;
        }
        let measured = self.measured(&found)?;
        let best = measure::fastest(&measured).or_else(|| match measured.is_empty() {
            true => found.best.first(),
            false => None,
        });
        if self.json {
            print::result(json!({ "found": found, "measured": measured, "best": best }))?;
        } else if !measured.is_empty() {
            let lines = measure::lines(&measured);
            lines.iter().try_for_each(print::result)?;
        }
        let Some(best) = best else {
            return Ok(Exit::Failed.into());
        };
        if let Some(path) = &self.write {
            self.write(path, best)?;
            print::note(format!("wrote    {}", path.display()));
        }
        Ok(Exit::Done.into())
    }

    fn search(&self) -> Result<SearchResult, PlanError> {
        let gpu: Gpu = self.gpu.parse()?;
        let config = self.args(None).load()?;
        let gpus = match self.gpus {
            Some(gpus) => gpus,
            None => config.layout(None)?.world_size(),
        };
        SearchConfig::new(config, gpus)
            .with_gpu(gpu)
            .with_tokens(self.tokens.map(f64::from))
            .with_price(self.price.map(f64::from))
            .with_top(self.top.max(self.measure).max(1))
            .search()
    }

    /// Trains the fastest that were found, if that was asked for.
    fn measured<'a>(&self, found: &'a SearchResult) -> Result<Vec<Measured<'a>>, TrainError> {
        let runs = found.best.iter().take(self.measure).enumerate();
        let measure = |(index, run): (usize, &'a FoundRun)| {
            print::progress(format!("measures {}: {}", index + 1, run.flags));
            measure::measure(run, &self.args(Some(run)), found.gpus, self.device)
        };
        runs.map(measure).collect()
    }

    /// The flags of `megaburn train` for the configuration, or for a run that was found.
    fn args(&self, run: Option<&FoundRun>) -> TrainArgs {
        let settings = run.map_or(&[][..], |run| &run.settings);
        TrainArgs {
            config: vec![self.config.clone()],
            set: [self.set.as_slice(), settings].concat(),
            layout: run.map(|run| run.layout.to_string()),
            ..TrainArgs::default()
        }
    }

    fn write(&self, path: &Path, run: &FoundRun) -> Result<(), TrainError> {
        let text = self.args(Some(run)).load()?.to_toml();
        let text = format!(
            "# From {} by `megaburn search`: {}\n\n{text}",
            self.config, run.flags
        );
        File::create_new(path)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(|source| TrainError::Write {
                path: path.to_path_buf(),
                source,
            })
    }
}
