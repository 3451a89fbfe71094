//! `megaburn plan`: what a run needs and how fast it is, before it starts; or a pipeline schedule.

mod quantity;
mod schedule;

use std::{fs, path::PathBuf, process::ExitCode};

use clap::Args;
use megaburn_plan::{Gpu, PlanConfig, PlanError, Walk};
use megaburn_train::{Exit, TrainError};
pub(super) use quantity::Quantity;
use schedule::ScheduleArgs;

use super::{TrainArgs, done, fail, print};

#[derive(Args)]
pub(super) struct PlanArgs {
    /// A TOML file of settings, as for `megaburn train --config`: plans its run on GPUs that need
    /// not be there.
    #[arg(value_name = "CONFIG")]
    config: Option<String>,
    /// A setting, like `parallel.zero=2`; the value is TOML or else a bare string. Repeatable.
    #[arg(long, value_name = "KEY=VALUE", requires = "config")]
    set: Vec<String>,
    /// Layout of the run over ranks, like `tp2-dp2-sp`.
    #[arg(long, value_name = "LAYOUT", requires = "config")]
    layout: Option<String>,
    /// Number of GPUs. A layout without `dp` is filled up to it. Default: as many as the
    /// configuration or the layout says.
    #[arg(long, value_name = "N", requires = "config")]
    gpus: Option<usize>,
    /// The GPU: a100, h100, h200 or b200.
    #[arg(long, value_name = "GPU", default_value = "h100")]
    gpu: String,
    /// Tokens to train on, such as 300B or 15T. Default: those of `train.steps`.
    #[arg(long, value_name = "TOKENS", requires = "config")]
    tokens: Option<Quantity>,
    /// The price of a GPU for an hour, in dollars.
    #[arg(long, value_name = "DOLLARS", requires = "config")]
    price: Option<Quantity>,
    /// Print one JSON object instead of text. The names of its numbers end in their units.
    #[arg(long, requires = "config")]
    json: bool,
    /// Also draw the plan or the schedule into this SVG file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Also let ranks of each stage walk a step of the real code with narrow matrices, each without
    /// the others, and compare the collectives in which they meet. Takes seconds to a minute.
    #[arg(long, requires = "config")]
    walk: bool,
    #[command(flatten)]
    schedule: ScheduleArgs,
}

impl PlanArgs {
    /// Prints and draws a plan or a schedule. Exits with 2 if there is none, and with 1 if the text
    /// or the picture cannot be written. A run that does not fit is no error.
    pub(super) fn run(self) -> ExitCode {
        let drawn = match &self.config {
            Some(config) => self
                .plan(config)
                .map_err(|error| (error.to_string(), error.exit())),
            None => self
                .schedule
                .draw()
                .map_err(|error| (error.to_string(), Exit::BadInput)),
        };
        match drawn {
            Ok((text, picture)) => done(self.write(&text, &picture)),
            Err((error, exit)) => fail(&error, exit),
        }
    }

    fn write(self, text: &str, picture: &str) -> Result<(), TrainError> {
        print::result(text.trim_end())?;
        if let Some(path) = self.svg {
            let written = fs::write(&path, picture);
            written.map_err(|source| TrainError::Write {
                path: path.clone(),
                source,
            })?;
            if !self.json {
                print::note(format!("wrote    {}", path.display()));
            }
        }
        Ok(())
    }

    /// The plan of a run as text, and its picture as SVG.
    fn plan(&self, config: &str) -> Result<(String, String), PlanError> {
        let gpu: Gpu = self.gpu.parse()?;
        let args = TrainArgs {
            config: vec![config.to_string()],
            set: self.set.clone(),
            layout: self.layout.clone(),
            ranks: self.gpus,
            ..TrainArgs::default()
        };
        let config = args.load()?;
        let layout = config.layout(self.gpus)?;
        let walk = match self.walk {
            true => Some(Walk::of(&config, layout)?),
            false => None,
        };
        let plan = PlanConfig::new(config, layout)
            .with_gpu(gpu)
            .with_tokens(self.tokens.map(f64::from))
            .with_price(self.price.map(f64::from))
            .plan()?;
        let text = match self.json {
            true => {
                let mut json = serde_json::json!(plan);
                if let Some(walk) = walk {
                    json["walk"] = serde_json::json!(walk);
                }
                json.to_string()
            }
            false => match walk {
                Some(walk) => format!("{plan}\n{walk}"),
                None => plan.to_string(),
            },
        };
        Ok((text, plan.svg()))
    }
}
