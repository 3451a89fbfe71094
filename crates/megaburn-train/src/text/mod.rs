//! What a model writes behind prompts, as text.

use std::ops::ControlFlow;

use burn::prelude::Device;
use megaburn_collective::{GroupOptions, ProcessGroups, RankEnv};
use megaburn_data::{TextStream, Tokenizer};
use megaburn_mesh::{Layout, ModelShape};
use megaburn_models::{
    Decoder, ModelError,
    generate::{Finish, GenerateOptions, Generated, generate},
    source::ModelSource,
};
use megaburn_parallel::shard_plan;

use crate::{TrainError, ranks::run_ranks};

pub use tokenizer::model_tokenizer;

mod tokenizer;

/// A text behind its prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Continuation {
    /// The tokens written, those of a stop string included.
    pub tokens: Vec<u32>,
    /// The text written, up to the stop string; none without a tokenizer.
    pub text: Option<String>,
    /// Why it ends.
    pub finish: Finish,
}

/// The tokens of a prompt. One that the tokenizer leaves nothing of starts like an empty text.
///
/// # Errors
/// The tokenizer cannot encode it.
pub fn prompt_tokens(tokenizer: &dyn Tokenizer, prompt: &str) -> Result<Vec<u32>, TrainError> {
    let mut tokens = tokenizer.encode_prompt(prompt)?;
    if tokens.is_empty() {
        tokens.push(tokenizer.bos().unwrap_or(tokenizer.eos()));
    }
    Ok(tokens)
}

/// Lets the model continue the prompts, which are tokens already. A text ends before the first of
/// `stop` that appears in it.
///
/// # Errors
/// See [`generate`]; also a stop string without a character.
/// # Collective
/// The model's tensor-parallel group, with the same arguments.
pub fn continue_text(
    model: &Decoder,
    tokenizer: &dyn Tokenizer,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    stop: &[String],
    device: &Device,
) -> Result<Vec<Continuation>, TrainError> {
    if stop.iter().any(String::is_empty) {
        let (value, rule) = ("empty".into(), "a text of one character or more".into());
        return Err(TrainError::Invalid { key: "--stop", value, rule });
    }
    let mut writers: Vec<_> = prompts.iter().map(|prompt| writer(tokenizer, prompt)).collect();
    let longest = stop.iter().map(String::len).max().unwrap_or(0);
    let generated = generate(model, prompts, options, device, |prompt, token| {
        let Writer { stream, text, end } = &mut writers[prompt];
        // A stop string may have begun in what came before.
        let seen = text.floor_char_boundary(text.len().saturating_sub(longest));
        text.push_str(&stream.push(token));
        let found = stop.iter().filter_map(|stop| text[seen..].find(stop.as_str())).min();
        *end = found.map(|at| seen + at);
        if end.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    let written = generated.into_iter().zip(writers);
    Ok(written
        .map(|(generated, Writer { mut stream, mut text, end })| {
            match end {
                Some(end) => text.truncate(end),
                None => text.push_str(&stream.finish()),
            }
            Continuation { tokens: generated.tokens, text: Some(text), finish: generated.finish }
        })
        .collect())
}

/// What to generate and with which model.
#[derive(Clone, Copy, Debug)]
pub struct GenerateJob<'a> {
    /// The model.
    pub source: &'a ModelSource,
    /// Its tokenizer; without one there are tokens only.
    pub tokenizer: Option<&'a dyn Tokenizer>,
    /// The prompts' tokens.
    pub prompts: &'a [Vec<u32>],
    /// How they go on.
    pub options: &'a GenerateOptions,
    /// Texts that end one; they need a tokenizer.
    pub stop: &'a [String],
}

impl GenerateJob<'_> {
    /// Loads the model split over the ranks of `layout`, threads or processes (`env`), and lets it
    /// continue the prompts.
    ///
    /// # Errors
    /// A layout that splits more than the model, or that the model refuses; see also
    /// [`continue_text`].
    pub fn run(
        &self,
        layout: &Layout,
        env: Option<RankEnv>,
    ) -> Result<Vec<Continuation>, TrainError> {
        if layout.world_size() != layout.tp {
            let (key, value) = ("--layout", layout.to_string());
            let rule = "tpN: generation splits the model over ranks, and nothing else".into();
            return Err(TrainError::Invalid { key, value, rule });
        }
        let config = self.source.config();
        // The sequence is never split here.
        Layout { sp: false, ..*layout }.fits(&ModelShape {
            ffn: config.ffn,
            heads: config.heads,
            kv_heads: config.kv_heads,
            layers: config.layers,
            seq_len: 1,
        })?;
        let mut ranks = run_ranks(layout, env, GroupOptions::default(), |world| {
            let device = Device::flex();
            let groups = ProcessGroups::new(world, *layout)?;
            let model = config.init(&groups.tp, false, &device)?;
            let plan = shard_plan(&model).map_err(ModelError::from)?;
            self.on_rank(&self.source.load(model, &plan)?, &device)
        })?;
        Ok(ranks.swap_remove(0))
    }

    fn on_rank(&self, model: &Decoder, device: &Device) -> Result<Vec<Continuation>, TrainError> {
        let Self { prompts, options, stop, .. } = *self;
        if let Some(tokenizer) = self.tokenizer {
            return continue_text(model, tokenizer, prompts, options, stop, device);
        }
        let go_on = |_, _| ControlFlow::Continue(());
        let generated = generate(model, prompts, options, device, go_on)?.into_iter();
        let tokens_only =
            |Generated { tokens, finish }| Continuation { tokens, text: None, finish };
        Ok(generated.map(tokens_only).collect())
    }
}

/// The text of one prompt as it is written.
struct Writer<'a> {
    stream: Box<dyn TextStream + 'a>,
    text: String,
    /// Where a stop string begins.
    end: Option<usize>,
}

/// A stream that has seen the prompt: what a token means may depend on what stands before it.
fn writer<'a>(tokenizer: &'a dyn Tokenizer, prompt: &[u32]) -> Writer<'a> {
    let mut stream = tokenizer.stream();
    prompt.iter().for_each(|&token| drop(stream.push(token)));
    Writer { stream, text: String::new(), end: None }
}
