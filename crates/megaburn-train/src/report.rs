//! Rank 0's output about a run, on the console and in files.

mod decoder;
mod end;
mod gpu_health;
mod logs;
mod picture;
mod precision;
mod profile;
mod rollback;
mod saved;
mod stamp;
mod start;
mod straggler;

use std::sync::Arc;

use burn::prelude::Device;
use megaburn_collective::RankEnv;
use megaburn_launch::Launched;
use megaburn_mesh::Layout;
use megaburn_report::{
    alerts::Alerts,
    console::Console,
    describe_layout,
    logs::Logs,
    metrics::{
        EvalMetrics, Journal, LayerStatistics, LayerStatisticsMetrics, MetricsWriter, OTHER_LINES,
        StepMetrics,
    },
};

use crate::{
    config::{BatchRampConfig, TrainConfig},
    data::RunData,
    device::Devices,
    error::TrainError,
    memory::used_bytes,
    resumed::Resumed,
    run_folder::{
        RunFolder,
        names::{CONFIG, METRICS},
    },
    time::now,
    trainer::Conversions,
    trainer_core::Progress,
};

pub(crate) use decoder::describe_decoder;
use logs::{open_logs, start_alerts};
use picture::Picture;
pub(crate) use saved::saved_steps;
use stamp::Stamp;
use start::StartMetrics;

/// Prints to the console, and writes `config.toml`, `metrics.jsonl` and `loss.svg` into the run's
/// folder.
pub(crate) struct Reporter<'a> {
    folder: Arc<RunFolder>,
    console: Console,
    metrics: Journal<TrainError>,
    stamp: Stamp,
    logs: Logs,
    alerts: Alerts,
    data: Option<&'a RunData>,
    device: Device,
    /// The command that continues a run.
    command: String,
    picture: Picture,
}

/// What a start reports of the run, in addition to what every run has.
#[derive(Debug, Default)]
pub(crate) struct RunDescription {
    /// The resolved configuration, as TOML.
    pub(crate) config: String,
    /// Lines about what is trained, on what.
    pub(crate) lines: Vec<String>,
    /// Lines about what the configuration leads to, after those about the folder.
    pub(crate) notes: Vec<String>,
    /// The command that continues a run.
    pub(crate) command: String,
    /// What a loss is a mean over.
    pub(crate) unit: &'static str,
}

/// How a run starts.
pub(crate) struct RunStart<'a> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) folder: Arc<RunFolder>,
    pub(crate) layout: Layout,
    /// The device of rank 0.
    pub(crate) device: Device,
    pub(crate) devices: Devices,
    pub(crate) description: RunDescription,
    pub(crate) resumed: Option<Resumed>,
}

impl<'a> Reporter<'a> {
    /// Reports the start of a run: writes its configuration and describes it on the console.
    /// `data` is the data whose loss is also given in bits per byte.
    pub(crate) fn start(
        start: RunStart<'_>,
        data: Option<&'a RunData>,
    ) -> Result<Self, TrainError> {
        let RunStart {
            config,
            folder,
            layout,
            device,
            devices,
            description,
            resumed,
        } = start;
        let dir = folder.path().to_path_buf();
        let done = resumed.as_ref().map_or(0, |resumed| resumed.progress.step);
        let trains = done < config.train.steps;
        // A start that trains nothing does not apply its changes.
        let untrained = |resumed| Resumed {
            changes: Vec::new(),
            conversions: Conversions::default(),
            ..resumed
        };
        let resumed = if trains {
            resumed
        } else {
            resumed.map(untrained)
        };
        // The file records what the run was trained with, so a start that trains nothing leaves it
        // unchanged.
        let config_name = if trains || !dir.join(CONFIG).exists() {
            folder.write_config(&description.config)?
        } else {
            CONFIG.to_string()
        };
        let metrics = MetricsWriter::open(dir.join(METRICS), done, &folder.id())?;
        let owned = folder.clone();
        let mut metrics = Journal::new(metrics, move || Ok(owned.check()?));
        let found = metrics.found();
        let start_number = found.starts + 1;
        let logs = open_logs(config, &folder, done)?;
        let alerts = start_alerts(config, &dir, folder.id(), start_number)?;
        let env = RankEnv::from_env()?;
        let consumed_tokens = match &resumed {
            Some(resumed) => resumed.progress.consumed_tokens,
            None => Some(0),
        };
        let stamp = Stamp::new(config, devices, env.as_ref(), start_number, consumed_tokens);
        let restarted = Launched::from_env().filter(|launched| launched.attempt > 0);
        metrics.write_line(&StartMetrics {
            start: start_number,
            run_id: folder.id(),
            time: now(),
            layout: layout.to_string(),
            from_step: done,
            restart: restarted.as_ref().map(|launched| launched.attempt),
            cause: restarted.and_then(|launched| launched.cause),
            changes: resumed
                .as_ref()
                .map_or(Vec::new(), |resumed| resumed.changes.clone()),
        })?;
        let console = Console::new(config.train.steps, done, config.train.log_interval);
        let mut console = console.with_unit(description.unit);
        console.line(format!("layout   {}", describe_layout(&layout)));
        if let Some(gpus) = devices.describe(layout.world_size(), &env) {
            console.line(format!("device   {gpus}"));
        }
        for line in description.lines {
            console.line(line);
        }
        if let Some(BatchRampConfig {
            start,
            increment,
            samples,
        }) = config.train.batch_ramp
        {
            console.line(format!(
                "batch    from {start} samples by {increment} over the first {samples}"
            ));
        }
        console.line(format!("run      {}", dir.display()));
        if config_name != CONFIG {
            console.line(format!(
                "note     {CONFIG} was not written by the run and is left unchanged: the \
                resolved configuration is in {config_name}, which --resume reads"
            ));
        }
        if found.other_lines > 0 {
            console.line(format!(
                "note     {} lines of {METRICS} are not JSON objects: they were moved to \
                {OTHER_LINES}",
                found.other_lines
            ));
        }
        for aside in folder.set_aside() {
            console.line(format!(
                "note     the previous run is in {}; it is removed once this run has a checkpoint",
                aside.display()
            ));
        }
        for note in description.notes {
            console.line(note);
        }
        if let Some(Resumed {
            progress: Progress { step, .. },
            other_run,
            changes,
            is_recorded,
            has_samples,
            conversions,
        }) = resumed
        {
            let whose = other_run.map_or("the run's own checkpoint".to_string(), |other| {
                format!("a checkpoint of run {other} that was copied here")
            });
            console.line(format!("resumed  after step {step} from {whose}"));
            if let Some(init) = &config.model.init {
                console.line(format!(
                    "note     the run was initialized from `{init}`, which is not read again"
                ));
            }
            for change in &changes {
                console.line(format!("changed  {change}"));
            }
            if !is_recorded {
                let what = "the previous configuration is not recorded: changes are not listed";
                console.line(format!("note     {what}"));
            }
            if !has_samples {
                let what = "the checkpoint does not record the data it was trained on: whether this \
                    run continues with the same data and order cannot be checked";
                console.line(format!("note     {what}"));
            }
            if !trains {
                let steps = config.train.steps;
                let what = format!(
                    "{step} steps are done, and train.steps is {steps}: there is nothing to \
                    train, and config.toml is left unchanged"
                );
                console.line(format!("note     {what}"));
            }
            for line in conversions.lines() {
                console.line(format!("note     {line}"));
            }
        }
        Ok(Self {
            folder,
            console,
            metrics,
            stamp,
            logs,
            alerts,
            data,
            device,
            command: description.command,
            picture: Picture::default(),
        })
    }

    /// The evaluations that the metrics had when the run started.
    pub(crate) fn evals(&self) -> Vec<EvalMetrics> {
        self.metrics.found().evals
    }

    /// The last step with evaluations in the metrics, if all of `names` are there.
    pub(crate) fn evaluated<'n>(
        &self,
        mut names: impl Iterator<Item = Option<&'n str>>,
    ) -> Option<u64> {
        let found = self.metrics.found().evaluated?;
        names
            .all(|name| found.has(found.step, name))
            .then_some(found.step)
    }

    /// Whether metrics could not be written for so long that the run should save and stop.
    pub(crate) fn should_give_up(&self) -> bool {
        self.metrics.should_give_up()
    }

    /// Makes all metrics so far durable against a power loss.
    ///
    /// # Errors
    /// The folder no longer belongs to the run.
    pub(crate) fn sync(&mut self) -> Result<(), TrainError> {
        self.metrics.sync()
    }

    pub(crate) fn step(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        let metrics = self.stamp.step(metrics);
        self.metrics.write(metrics.clone())?;
        self.alerts.step(&metrics);
        self.console.step(&metrics);
        self.logs.write(metrics);
        Ok(())
    }

    /// Records the statistics of the layers in a step.
    pub(crate) fn layers(
        &mut self,
        step: u64,
        layers: Vec<LayerStatistics>,
    ) -> Result<(), TrainError> {
        self.metrics.write_line(&LayerStatisticsMetrics {
            layer_statistics: step,
            layers,
        })
    }

    /// Records a step whose update was not made: its line has nulls for non-finite numbers.
    pub(crate) fn not_finite(
        &mut self,
        step: u64,
        loss: f64,
        grad_norm: f64,
    ) -> Result<(), TrainError> {
        let metrics = self.stamp.step(&StepMetrics {
            step,
            loss,
            grad_norm,
            memory_bytes: used_bytes(&self.device),
            ..StepMetrics::default()
        });
        self.alerts.not_finite(step, loss, grad_norm);
        self.logs.write(metrics.clone());
        self.metrics.write(metrics)
    }

    /// Reports that a step was not finite, and is finite when computed again.
    pub(crate) fn computed_again(&mut self, step: u64, loss: f64, norm: f64, ranks: &[usize]) {
        self.alerts.not_finite(step, loss, norm);
        let whose = match ranks {
            [] => "no rank's own loss was affected, so it happened in a backward pass or a \
                reduction"
                .to_string(),
            [rank] => format!("the loss of rank {rank} was affected: examine its GPU"),
            ranks => {
                let ranks: Vec<_> = ranks.iter().map(usize::to_string).collect();
                let ranks = ranks.join(", ");
                format!("the losses of ranks {ranks} were affected: examine their GPUs")
            }
        };
        self.console.line(format!(
            "warning  step {step} was not finite (loss {loss}, gradient norm {norm}) and is finite \
            when computed again, so the hardware failed once; {whose}"
        ));
    }

    /// Reports an evaluation, on each of its data sets. Those that the metrics have already are not
    /// written again: the run was started again after it had finished, or was killed between two.
    pub(crate) fn eval(&mut self, evals: &[EvalMetrics]) -> Result<(), TrainError> {
        self.alerts.progress();
        for metrics in evals {
            let EvalMetrics { step, data, .. } = metrics;
            let known = self.metrics.found().evaluated;
            if !known.is_some_and(|known| known.has(*step, data.as_deref())) {
                let metrics = self.stamp.eval(metrics);
                self.metrics.write(metrics.clone())?;
                self.logs.write(metrics);
            }
            self.console.eval(metrics);
        }
        self.picture.start(&self.folder);
        Ok(())
    }
}
