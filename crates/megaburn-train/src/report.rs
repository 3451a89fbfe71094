//! What rank 0 tells people and files about a run.

use std::{fs, path::PathBuf};

use burn::prelude::Device;
use megaburn_collective::RankEnv;
use megaburn_mesh::Layout;
use megaburn_models::assets::ASSETS;

use crate::{
    TrainConfig, TrainError,
    attention_line::Facts,
    config::{BatchRampConfig, Dtype, Tokenizer, UnusedKey},
    console::{Console, human_number},
    data::RunData,
    device::Devices,
    memory::used_bytes,
    metrics::{EvalMetrics, MetricsWriter, StepMetrics, read_metrics},
    plot::write_loss_plot,
    signal::StopSignal,
    trainer::{Progress, Resumed, Trainer},
};

/// Prints, and writes `config.toml`, `metrics.jsonl` and `loss.svg` into the run's folder.
pub(crate) struct Reporter<'a> {
    dir: PathBuf,
    console: Console,
    metrics: MetricsWriter,
    data: &'a RunData,
    device: Device,
}

impl<'a> Reporter<'a> {
    /// Makes the folder and says what is about to happen.
    pub(crate) fn start(
        config: &TrainConfig,
        devices: Devices,
        trainer: &Trainer,
        data: &'a RunData,
        resumed: Option<Resumed>,
    ) -> Result<Self, TrainError> {
        let dir = PathBuf::from(&config.run.dir);
        let path = dir.join("config.toml");
        let layout = &trainer.layout();
        let mut resolved = config.resolved(layout, trainer.model_config());
        let kept = dir.join(ASSETS).join("tokenizer.json");
        if kept.is_file() && resolved.data.tokenizer != Tokenizer::Byte {
            resolved.data.tokenizer = Tokenizer::File(kept.display().to_string());
        }
        let done = resumed.as_ref().map_or(0, |resumed| resumed.progress.step);
        let trains = done < config.train.steps;
        if trains || !path.exists() {
            // It says what the run was trained with: a start that trains nothing leaves it.
            let resolved = resolved.to_toml();
            fs::write(&path, resolved).map_err(|source| TrainError::Write { path, source })?;
        }
        let metrics = MetricsWriter::open(dir.join("metrics.jsonl"), done)?;
        let mut console = Console::new(config.train.steps, done, config.train.log_interval);
        let model = trainer.model_config();
        console.line(format!("layout   {}", describe(layout)));
        if let Some(gpus) = devices.describe(layout.world_size(), &RankEnv::from_env()?) {
            console.line(format!("device   {gpus}"));
            let facts = Facts::of(config, trainer.model_config());
            let attention = devices.describe_attention(config.attention_on(devices)?, &facts);
            console.line(format!("attention {attention}"));
        }
        console.line(format!(
            "model    {}, {} parameters{}: {} layers, hidden {}, {} heads ({} key/value), vocabulary {}",
            model.family,
            human_number(model.whole_plan()?.num_global() as f64),
            match config.train.dtype {
                Dtype::F32 => "",
                Dtype::Bf16 => " in bf16",
                Dtype::F16 => " in f16",
            },
            model.layers,
            model.hidden,
            model.heads,
            model.kv_heads,
            model.vocab,
        ));
        console.line(format!("data     {}", data.description));
        console.line(format!(
            "steps    {} of {} tokens ({} samples of {})",
            config.train.steps,
            config.tokens_per_step(),
            config.train.global_batch,
            config.data.seq_len,
        ));
        if let Some(BatchRampConfig { start, increment, samples }) = config.train.batch_ramp {
            console.line(format!(
                "batch    from {start} samples by {increment} over the first {samples}"
            ));
        }
        console.line(format!("run      {}", dir.display()));
        for UnusedKey { key, used } in config.unused_keys() {
            console.line(format!("note     {key} is set and changes nothing: it is used {used}"));
        }
        if let Some(keys) = config.fine_tuning(model) {
            console.line(format!("tuning   {keys}: defaults where model.init is set"));
        }
        if config.model.init.is_some() && config.data.tokenizer == Tokenizer::Byte {
            console.line("note     tokens are bytes: data.tokenizer is byte");
        }
        if let Some(Resumed { progress: Progress { step, .. }, changes, is_recorded, rounded }) =
            resumed
        {
            console.line(format!("resumed  after step {step} from the run's own checkpoint"));
            if let Some(init) = &config.model.init {
                console
                    .line(format!("note     the run began with `{init}`, which is not read again"));
            }
            for change in &changes {
                console.line(format!("changed  {change}"));
            }
            if !is_recorded {
                let what = "what the run was trained with is not recorded: changes are not listed";
                console.line(format!("note     {what}"));
            }
            if !trains {
                let steps = config.train.steps;
                let what = format!(
                    "{step} steps are done, and train.steps is {steps}: nothing is trained, and config.toml stays as it is"
                );
                console.line(format!("note     {what}"));
            }
            for key in rounded {
                console.line(format!(
                    "note     the checkpoint held more than {key} keeps: it was rounded"
                ));
            }
        }
        Ok(Self { dir, console, metrics, data, device: trainer.device().clone() })
    }

    pub(crate) fn step(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        self.metrics.write(metrics.clone())?;
        self.console.step(metrics);
        Ok(())
    }

    /// A step whose update was not made: its line stands in the metrics, with nulls.
    pub(crate) fn not_finite(
        &mut self,
        step: u64,
        loss: f64,
        grad_norm: f64,
    ) -> Result<(), TrainError> {
        self.metrics.write(StepMetrics {
            step,
            loss,
            grad_norm,
            lr: 0.0,
            tokens: 0,
            tokens_per_second: 0.0,
            tflops: 0.0,
            memory_bytes: used_bytes(&self.device),
            loss_scale: None,
            skipped: false,
            num_zeros: None,
            params_norm: None,
            mtp_losses: Vec::new(),
            experts: None,
        })
    }

    pub(crate) fn eval(&mut self, metrics: &EvalMetrics) -> Result<(), TrainError> {
        self.metrics.write(metrics.clone())?;
        self.console.eval(metrics);
        Ok(())
    }

    /// The evaluation at the end of a run; a finished run that is started again already has it in
    /// its metrics.
    pub(crate) fn final_eval(&mut self, metrics: &EvalMetrics) -> Result<(), TrainError> {
        let path = self.dir.join("metrics.jsonl");
        let known = read_metrics(&path)?.iter().any(|record| {
            matches!(record, crate::metrics::MetricsRecord::Eval(eval) if eval.step == metrics.step)
        });
        if !known {
            self.metrics.write(metrics.clone())?;
        }
        self.console.eval(metrics);
        Ok(())
    }

    /// The run was asked to stop and is saved.
    pub(crate) fn stopped(mut self, step: u64, stop: &StopSignal) -> Result<(), TrainError> {
        self.draw()?;
        let signal = stop.requested().unwrap_or("a signal to another rank");
        self.console.line(format!(
            "stopped by {signal} after step {step}, saved; the same command goes on from there"
        ));
        self.console.finish();
        Ok(())
    }

    /// The last lines of a finished run.
    pub(crate) fn finish(
        mut self,
        eval: &EvalMetrics,
        sample: Option<&str>,
    ) -> Result<(), TrainError> {
        let picture = self.draw()?;
        let EvalMetrics { step, eval_loss, .. } = *eval;
        let bits = self.data.bits_per_byte(eval_loss);
        let bits = bits.map(|bits| format!(" = {bits:.3} bits per byte")).unwrap_or_default();
        if let Some(sample) = sample {
            self.console.line(format!("sample   {}", sample.replace('\n', "\n         ")));
        }
        self.console.line(format!("finished {step} steps; validation loss {eval_loss:.4}{bits}"));
        self.console.line(format!("picture  {}", picture.display()));
        self.console.line(format!(
            "run      {0} (metrics.jsonl, config.toml, checkpoints/); train on with `megaburn train --resume {0} --steps N`",
            self.dir.display()
        ));
        self.console.finish();
        Ok(())
    }

    fn draw(&self) -> Result<PathBuf, TrainError> {
        let picture = self.dir.join("loss.svg");
        let records = read_metrics(self.dir.join("metrics.jsonl"))?;
        let title = self.dir.file_name().unwrap_or_default().to_string_lossy();
        write_loss_plot(&picture, &title, &records)?;
        Ok(picture)
    }
}

/// `tp2-dp2-sp: 4 ranks; tp [0, 1] [2, 3]; dp [0, 2] [1, 3]`.
fn describe(layout: &Layout) -> String {
    let mesh = megaburn_mesh::Mesh::new(*layout);
    let ranks = layout.world_size();
    let groups = |axis| {
        let groups = mesh.groups(&[axis]).into_iter().map(|group| format!("{group:?}"));
        format!("{axis} {}", groups.collect::<Vec<_>>().join(" "))
    };
    let split =
        megaburn_mesh::Axis::DENSE.into_iter().filter(|&axis| layout.degree(axis) > 1).map(groups);
    let split = split.collect::<Vec<_>>().join("; ");
    if ranks == 1 {
        format!("{layout}: 1 rank")
    } else {
        format!("{layout}: {ranks} ranks; {split}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_told_with_its_groups() {
        let told = |text: &str| describe(&text.parse().unwrap());
        assert_eq!(told("tp1"), "tp1: 1 rank");
        assert_eq!(told("pp2"), "pp2: 2 ranks; pp [0, 1]");
        assert_eq!(told("cp2"), "cp2: 2 ranks; cp [0, 1]");
        let all = "tp2-pp2-dp2: 8 ranks; tp [0, 1] [2, 3] [4, 5] [6, 7]; \
                   dp [0, 2] [1, 3] [4, 6] [5, 7]; pp [0, 4] [1, 5] [2, 6] [3, 7]";
        assert_eq!(told("tp2-pp2-dp2"), all);
    }
}
