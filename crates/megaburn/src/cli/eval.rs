//! `megaburn eval`: the loss and the perplexity of a model on named data sets.

use std::{path::Path, process::ExitCode};

use clap::Args;
use megaburn_collective::RankEnv;
use megaburn_train::{
    Exit, SetLoss, TrainConfig, TrainError, config::SourceConfig, eval_layers, evaluate,
};
use serde_json::json;

use super::{
    device::{DeviceArg, launch_again},
    print,
};

#[derive(Args)]
pub(super) struct EvalArgs {
    /// A folder of Hugging Face or torchtitan, a checkpoint or a run.
    #[arg(value_name = "PATH")]
    path: String,
    /// A data set: text (plain, or JSON in a .jsonl, .ndjson or .json file), or the prefix of a data
    /// set in Megatron-LM's format. Repeatable. The name is printed with its loss; by default it is
    /// the last part of the path.
    #[arg(long, value_name = "[NAME=]FILE", required = true)]
    data: Vec<String>,
    /// Layout of the model over ranks, like `tp2-dp2`. Every layout gives the same losses, up to
    /// rounding.
    #[arg(long, value_name = "LAYOUT")]
    layout: Option<String>,
    /// A setting, like `data.seq_len=4096` or `train.dtype=bf16`; the value is TOML or else a bare
    /// string. Repeatable. Default: the settings of the run that the model is from, or the longest
    /// sequence of the model up to 2048 tokens.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// `byte`, the file of a tokenizer, or its folder. Default: the model's own tokenizer.
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<String>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
    /// The device that the ranks compute on. Default: GPUs if there are any and the program was
    /// built for them, otherwise the CPU.
    #[arg(long, value_enum)]
    device: Option<DeviceArg>,
}

impl EvalArgs {
    pub(super) fn run(self) -> Result<ExitCode, TrainError> {
        let config = self.load()?;
        let env = RankEnv::from_env()?;
        let devices = config.run.device.find()?;
        let layout = config.layout_on(devices, env.as_ref().map(|env| env.world_size))?;
        if devices.need_processes(&layout, env.as_ref()) {
            return launch_again(layout.world_size(), std::env::args_os().skip(1));
        }
        let seq_len = config.data.seq_len;
        let dtype = config.train.dtype.to_string();
        let losses = evaluate(config)?;
        if env.is_none_or(|env| env.rank == 0) {
            if self.json {
                print::result(json!({
                    "path": self.path,
                    "layout": layout.to_string(),
                    "seq_len": seq_len,
                    "dtype": dtype,
                    "sets": losses,
                }))?;
            } else {
                let model = format!("{} in {dtype}, {seq_len} tokens at a time", self.path);
                print::result(format!("model    {model}"))?;
                lines(&losses).iter().try_for_each(print::result)?;
            }
        }
        Ok(Exit::Done.into())
    }

    fn load(&self) -> Result<TrainConfig, TrainError> {
        let sets: Vec<SourceConfig> = self.data.iter().map(|text| set_of(text)).collect();
        let mut layers = eval_layers(&self.path, &sets)?;
        if let Some(tokenizer) = &self.tokenizer {
            layers = layers.with_tokenizer(tokenizer)?;
        }
        for text in &self.set {
            layers = layers.with_set(text)?;
        }
        if let Some(layout) = &self.layout {
            layers = layers.with_layout(layout)?;
        }
        if let Some(device) = self.device {
            layers = layers.with_set(&format!("run.device={}", device.name()))?;
        }
        layers.load()
    }
}

/// The data set that `NAME=FILE` or `FILE` means. A file whose own name has a `=` is meant if it
/// exists.
fn set_of(text: &str) -> SourceConfig {
    let named = text
        .split_once('=')
        .filter(|(name, _)| !name.is_empty() && !name.contains(['/', '?', ':']))
        .filter(|_| !Path::new(text).exists());
    match named {
        Some((name, path)) => SourceConfig {
            path: path.into(),
            name: Some(name.into()),
            ..SourceConfig::default()
        },
        None => SourceConfig {
            path: text.into(),
            ..SourceConfig::default()
        },
    }
}

/// One line for each data set, aligned.
fn lines(losses: &[SetLoss]) -> Vec<String> {
    let width = losses.iter().map(|set| set.name.chars().count()).max();
    let width = width.unwrap_or(0);
    let line = |set: &SetLoss| {
        let bytes = match (set.loss_per_byte, set.bits_per_byte) {
            (Some(nats), Some(bits)) => {
                format!(", {nats:.4} per byte ({bits:.4} bits)")
            }
            _ => String::new(),
        };
        format!(
            "eval     {:<width$}  loss {:.4}, perplexity {:.4}{bytes}, {} tokens",
            set.name, set.loss, set.perplexity, set.tokens
        )
    };
    losses.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_set_may_have_a_name() {
        let named = set_of("wiki=/data/wiki.txt");
        assert_eq!(
            (named.name.as_deref(), named.path.as_str()),
            (Some("wiki"), "/data/wiki.txt")
        );
        for path in ["/data/wiki.txt", "/data/a=b.txt", "mock:random?tokens=9"] {
            assert_eq!(
                (set_of(path).name, set_of(path).path.as_str()),
                (None, path)
            );
        }
    }
}
