//! A Llama whose loss goes wrong when a test asks for it.
//!
//! A test that sets `FAULT_FOLDER` may train `model.family = "faulty"`. Creating the file
//! `nan-RANK` or `shape-RANK` in that folder makes the next loss of that rank NaN, or one of fewer
//! tokens than its neighbours compute; `nan` is for any rank that computes a loss. The rank removes the
//! file, so a fault happens once. `RANK` is the one with which the process was started.
//! `FAULT_STEP_MS` is a pause in each loss.

use std::{env, fs, path::PathBuf, thread, time::Duration};

use megaburn::family::*;

const FOLDER: &str = "FAULT_FOLDER";

struct Faulty;

/// Registers the family in a process of a test that asks for faults.
pub(crate) fn register() {
    if env::var_os(FOLDER).is_some() {
        Family::register(&Faulty).expect("no other family is called faulty");
    }
}

impl ModelFamily for Faulty {
    fn model_type(&self) -> &'static str {
        "faulty"
    }

    fn architecture(&self) -> &'static str {
        "FaultyForCausalLM"
    }

    fn template(&self) -> DecoderConfig {
        Family::LLAMA.template()
    }

    fn keys(&self) -> &'static [&'static [Key]] {
        &[LLAMA_KEYS]
    }

    fn defaults(&self) -> &'static [&'static [KeyDefault]] {
        &[LLAMA_DEFAULTS]
    }

    fn read(&self, json: &HfJson<'_>) -> Result<DecoderConfig, String> {
        Ok(DecoderConfig {
            positions: Positions::Rotary(json.rotary()?),
            norm_eps: json.number("rms_norm_eps")?,
            ..read_plain_sizes(json, self.template())?
        })
    }

    fn write(&self, config: &DecoderConfig) -> Value {
        write_llama_sizes(config)
    }

    fn loss(&self) -> Option<TokenLosses> {
        Some(|of| {
            thread::sleep(pause());
            let [tokens, ..] = of.logits.dims();
            let tokens = tokens - usize::from(is_asked("shape"));
            let labels = of.labels.narrow(0, 0, tokens);
            let logits = of.logits.narrow(0, 0, tokens);
            let losses = of.cross_entropy.forward(logits, labels);
            match is_asked("nan") {
                true => losses.mul_scalar(f32::NAN),
                false => losses,
            }
        })
    }
}

fn pause() -> Duration {
    let milliseconds = env::var("FAULT_STEP_MS").ok();
    Duration::from_millis(milliseconds.and_then(|text| text.parse().ok()).unwrap_or(0))
}

/// Whether a test asks this rank for a fault that has not happened yet.
fn is_asked(fault: &str) -> bool {
    let (Some(folder), Ok(rank)) = (env::var_os(FOLDER), env::var("RANK")) else {
        return false;
    };
    let files = [format!("{fault}-{rank}"), fault.to_string()];
    files
        .iter()
        .any(|file| fs::remove_file(PathBuf::from(&folder).join(file)).is_ok())
}
