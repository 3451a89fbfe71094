//! `megaburn generate`: continues prompts with a model.

use std::{fs, path::PathBuf, process::ExitCode};

use clap::Args;
use megaburn_collective::RankEnv;
use megaburn_mesh::Layout;
use megaburn_models::{
    generate::{Finish, GenerateOptions, Sampling},
    source::ModelSource,
};
use megaburn_train::{
    ConfigLayers, Exit, TrainError,
    config::ParallelConfig,
    device::DeviceChoice,
    text::{Continuation, GenerateJob, ends_of, model_tokenizer, prompt_tokens},
};
use serde_json::json;

use super::{
    device::{DeviceArg, launch_again},
    print,
};

#[derive(Args)]
pub(super) struct GenerateArgs {
    /// A folder of Hugging Face or torchtitan, a checkpoint or a run.
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// A prompt. Repeatable: all prompts are continued in one batch.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Vec<String>,
    /// A prompt as token ids, like `5,17,3`. Repeatable; follows the text prompts.
    #[arg(long, value_name = "IDS", value_delimiter = None)]
    prompt_ids: Vec<String>,
    /// A file whose complete text is a prompt; follows the other prompts. Repeatable.
    #[arg(long, value_name = "FILE")]
    prompt_file: Vec<PathBuf>,
    /// Maximum number of tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_tokens: usize,
    /// Sampling temperature. Values below 1 favor likely tokens; 0 always takes the likeliest
    /// token.
    #[arg(
        long,
        value_name = "T",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    temperature: f64,
    /// Sample only from the K likeliest tokens.
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Sample only from the likeliest tokens whose probabilities add up to P.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// A text that ends generation and is not part of the output. Repeatable.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Continue after the end-of-text token.
    #[arg(long)]
    ignore_eos: bool,
    /// Random seed of sampling.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Layout of the model: `tpN`, `ppN` or `tpN-ppM`. Default: `tpN` over the ranks of a launcher.
    #[arg(long, value_name = "L")]
    layout: Option<String>,
    /// How the layers are split over pipeline ranks, with the keys of `[parallel]` that control
    /// this in a training run, like `parallel.pipeline_layout=Ett|tL`. Repeatable. Default: evenly.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// `byte`, the file of a tokenizer, or its folder. Default: the model's own tokenizer.
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<String>,
    /// Print one JSON object per prompt instead of text.
    #[arg(long)]
    json: bool,
    /// The device that the ranks compute on. Default: GPUs if there are any and the program was
    /// built for them, otherwise the CPU.
    #[arg(long, value_enum)]
    device: Option<DeviceArg>,
}

/// The keys of `[parallel]` that determine the stages of a pipeline rank.
const STAGE_KEYS: [&str; 7] = [
    "schedule",
    "chunks",
    "pipeline_layout",
    "first_stage_layers",
    "last_stage_layers",
    "count_embedding",
    "count_loss",
];

impl GenerateArgs {
    pub(super) fn run(self) -> Result<ExitCode, TrainError> {
        let invalid = |key, value: &str, rule: &str| {
            Err(TrainError::Invalid {
                key,
                value: value.into(),
                rule: rule.into(),
            })
        };
        let devices = self
            .device
            .map(DeviceChoice::from)
            .unwrap_or_default()
            .find()?;
        let env = RankEnv::from_env()?;
        let world = env.as_ref().map(|env| env.world_size);
        let layout = match (&self.layout, world) {
            (Some(text), _) => Layout::parse(text, None)?,
            (None, world) => Layout {
                tp: world.unwrap_or(1),
                ..Layout::SINGLE
            },
        };
        if let Some(world) = world {
            layout.check_world(world)?;
        }
        let parallel = self.stages(&layout)?;
        if devices.need_processes(&layout, env.as_ref()) {
            devices.hold(&layout)?;
            return launch_again(layout.world_size(), std::env::args_os().skip(1));
        }
        let source = ModelSource::open(&self.model)?;
        let tokenizer = model_tokenizer(&source, self.tokenizer.as_deref())?;
        let mut texts = self.prompt.clone();
        for path in &self.prompt_file {
            let text = fs::read_to_string(path).map_err(|source| TrainError::Read {
                path: path.clone(),
                source,
            })?;
            texts.push(text);
        }
        let mut prompts = Vec::new();
        if !texts.is_empty() || !self.stop.is_empty() {
            let Some(tokenizer) = &tokenizer else {
                let rule = "given (byte, or the path of a tokenizer.json), because the model has \
                           no tokenizer; or use --prompt-ids";
                return invalid("--tokenizer", "absent", rule);
            };
            for text in &texts {
                prompts.push(prompt_tokens(tokenizer.as_ref(), source.config(), text)?);
            }
        }
        for text in &self.prompt_ids {
            let ids = text
                .split(',')
                .map(|id| id.trim().parse())
                .collect::<Result<Vec<u32>, _>>();
            match ids {
                Ok(ids) => prompts.push(ids),
                Err(_) => {
                    return invalid(
                        "--prompt-ids",
                        &format!("{text:?}"),
                        "token ids separated by commas",
                    );
                }
            }
        }
        if prompts.is_empty() {
            return invalid(
                "--prompt",
                "absent",
                "given, or use --prompt-ids or --prompt-file",
            );
        }
        let is_given = self.tokenizer.is_some();
        let (mut eos, decoder_start) = ends_of(&source, tokenizer.as_deref(), is_given)?;
        if self.ignore_eos {
            eos.clear();
        }
        let sampling = Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
        };
        let options = GenerateOptions {
            max_tokens: self.max_tokens,
            eos,
            sampling,
            decoder_start,
            seed: self.seed,
        };
        let job = GenerateJob {
            source: &source,
            tokenizer: tokenizer.as_deref(),
            prompts: &prompts,
            options: &options,
            stop: &self.stop,
            parallel: &parallel,
        };
        let is_first = env.as_ref().is_none_or(|env| env.rank == 0);
        let found = job.run(&layout, devices, env)?;
        if is_first {
            let texts = texts.iter().map(Some).chain(std::iter::repeat(None));
            for (index, ((found, ids), text)) in found.iter().zip(&prompts).zip(texts).enumerate() {
                // The text of a decoder does not continue that of the encoder.
                let is_continued = !source.config().is_encoder_decoder();
                self.print(index, text.map(String::as_str), is_continued, ids, found)?;
            }
        }
        Ok(Exit::Done.into())
    }

    /// Parses the values of `--set`.
    fn stages(&self, layout: &Layout) -> Result<ParallelConfig, TrainError> {
        let key_of = |text: &str| {
            text.split('=')
                .next()
                .unwrap_or_default()
                .trim()
                .to_string()
        };
        let refuse = |value: &str, rule: String| {
            Err(TrainError::Invalid {
                key: "--set",
                value: value.into(),
                rule,
            })
        };
        let mut layers = ConfigLayers::new();
        for text in &self.set {
            layers = layers.with_set(text)?;
            if !STAGE_KEYS
                .iter()
                .any(|key| key_of(text) == format!("parallel.{key}"))
            {
                return refuse(
                    text,
                    format!("`parallel.` followed by one of {}", STAGE_KEYS.join(", ")),
                );
            }
            if layout.pp == 1 {
                return refuse(
                    text,
                    format!("omitted, because --layout {layout} has no pp"),
                );
            }
        }
        Ok(layers.load()?.parallel)
    }

    fn print(
        &self,
        index: usize,
        prompt: Option<&str>,
        is_continued: bool,
        ids: &[u32],
        found: &Continuation,
    ) -> Result<(), TrainError> {
        let Continuation {
            tokens,
            text,
            finish,
        } = found;
        let finish = match finish {
            Finish::Eos => "eos",
            Finish::MaxTokens => "max_tokens",
            Finish::Stopped => "stop",
        };
        if self.json {
            let json = json!({
                "prompt": prompt, "prompt_ids": ids, "text": text, "ids": tokens, "finish": finish,
            });
            return print::result(json);
        }
        if index > 0 {
            print::result("---")?;
        }
        match (prompt, text) {
            (Some(prompt), Some(text)) if is_continued => print::result(format!("{prompt}{text}")),
            (_, Some(text)) => print::result(text),
            (_, None) => print::result(format!("{tokens:?}")),
        }
    }
}
