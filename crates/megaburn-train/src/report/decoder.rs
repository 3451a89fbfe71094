//! What a start reports of a decoder and its data.

use std::path::Path;

use megaburn_data::HfTokenizer;
use megaburn_models::assets::ASSETS;
use megaburn_report::console::human_number;

use super::RunDescription;
use crate::{
    attention_line::Facts,
    config::{Dtype, IneffectiveKey, InitFrom, Tokenizer, TrainConfig},
    data::{RunData, SourceReading},
    device::{Devices, find_cudnn},
    error::TrainError,
    precision_line,
    trainer::Trainer,
};

/// Describes the run of a decoder in the folder `dir`, which starts from `start` if that is given.
///
/// # Errors
/// The attention kernel that the run asks for does not support the model.
pub(crate) fn describe_decoder(
    config: &TrainConfig,
    dir: &Path,
    devices: Devices,
    trainer: &Trainer,
    data: &RunData,
    start: Option<&InitFrom>,
) -> Result<RunDescription, TrainError> {
    Ok(RunDescription {
        config: resolved(config, dir, trainer),
        lines: lines(config, devices, trainer, data)?,
        notes: notes(config, trainer, data, start),
        command: "megaburn train".to_string(),
        unit: "tokens",
    })
}

/// The configuration with the values that the run found, and its own copy of the tokenizer.
fn resolved(config: &TrainConfig, dir: &Path, trainer: &Trainer) -> String {
    let mut resolved = config.resolved(&trainer.layout(), trainer.model_config());
    let kept = HfTokenizer::find(&dir.join(ASSETS));
    if let Some(kept) = kept.filter(|_| resolved.data.tokenizer != Tokenizer::Byte) {
        resolved.data.tokenizer = Tokenizer::File(kept.display().to_string());
    }
    resolved.to_toml()
}

fn lines(
    config: &TrainConfig,
    devices: Devices,
    trainer: &Trainer,
    data: &RunData,
) -> Result<Vec<String>, TrainError> {
    let mut lines = Vec::new();
    let model = trainer.model_config();
    if devices != Devices::Cpu {
        let facts = Facts::of(config, trainer.model_config());
        let attention = facts.describe(config.attention_on(devices)?, find_cudnn);
        lines.push(format!("attention {attention}"));
    }
    lines.push(format!(
        "model    {}, {} parameters{}: {}",
        model.family,
        human_number(model.whole_plan()?.num_global() as f64),
        match config.train.dtype {
            Dtype::F32 => "",
            Dtype::Bf16 => " in bf16",
            Dtype::F16 => " in f16",
        },
        model.summary(),
    ));
    if let Some(products) = precision_line::describe_start(config, trainer) {
        lines.push(format!("products {products}"));
    }
    lines.push(format!("data     {}", data.description));
    if let Some(floor) = data.loss_floor {
        lines.push(format!(
            "floor    no mean loss below {floor:.4} is possible on tokens that were not read"
        ));
    }
    let reading = trainer.reading();
    let several = reading.len() > 1;
    if several || reading.iter().any(|source| source.epochs > 1.0) {
        let of =
            |source: &SourceReading| format!("{} of {}", human_number(source.epochs), source.path);
        let all: Vec<_> = reading.iter().map(of).collect();
        lines.push(format!("epochs   {}", all.join(", ")));
    }
    for SourceReading { path, packing, .. } in reading {
        let of = match several {
            true => format!("{path}: "),
            false => String::new(),
        };
        if let Some(packing) = packing {
            lines.push(format!("packing  {of}{packing}"));
        }
    }
    if let Some(fim) = config.data.active_fim() {
        lines.push(format!(
            "fim      {:.1}% of the documents, {:.1}% of these with the suffix first",
            100.0 * fim.rate,
            100.0 * fim.spm_rate
        ));
    }
    let lens = config.data.seq_lens();
    let lens: Vec<String> = lens.iter().map(usize::to_string).collect();
    lines.push(format!(
        "steps    {} of {} tokens ({} samples of {})",
        config.train.steps,
        config.tokens_per_step(),
        config.train.global_batch,
        lens.join(" + "),
    ));
    Ok(lines)
}

fn notes(
    config: &TrainConfig,
    trainer: &Trainer,
    data: &RunData,
    start: Option<&InitFrom>,
) -> Vec<String> {
    let mut notes = Vec::new();
    let model = trainer.model_config();
    for note in config.notes(model, data.num_sentinels()) {
        notes.push(format!("note     {note}"));
    }
    for IneffectiveKey { key, used } in config.ineffective_keys() {
        notes.push(format!(
            "note     {key} has no effect: it is used only {used}"
        ));
    }
    if let Some(keys) = config.fine_tuning(model) {
        notes.push(format!("tuning   {keys}: defaults where model.init is set"));
    }
    if let Some(conversion) = start.and_then(|start| start.conversion(config)) {
        notes.push(format!("weights  {conversion}"));
    }
    if config.model.init.is_some() && config.data.tokenizer == Tokenizer::Byte {
        notes.push("note     tokens are bytes: data.tokenizer is byte".to_string());
    }
    notes
}
