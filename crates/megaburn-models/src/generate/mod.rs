//! Text generation, token by token: several prompts at once, each with a KV cache.

mod sampling;

use std::ops::ControlFlow;

use burn::{prelude::Device, tensor::Tensor};
use megaburn_kernels::RopeScaling;
use megaburn_mesh::{PositionRng, Purpose};

use crate::{
    decoder::{Decoder, DecoderCache, DecoderConfig},
    error::ModelError,
};
pub use sampling::Sampling;

/// The options of text generation.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// The maximum number of tokens to generate.
    pub max_tokens: usize,
    /// Tokens that end a text; they are not part of the result.
    pub eos: Vec<u32>,
    /// How the next token is sampled.
    pub sampling: Sampling,
    /// The token that starts the decoder's text in an encoder-decoder model, whose encoder reads the
    /// prompt. Other models do not use it.
    pub decoder_start: Option<u32>,
    /// The random seed. `(seed, prompt, token)` determines each random number, independently of the
    /// other prompts and the layout. The layout still affects the last bits of the logits.
    pub seed: u64,
}

/// The text generated for a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The generated tokens, without the prompt.
    pub tokens: Vec<u32>,
    /// Why the text ends.
    pub finish: Finish,
}

/// Why a text ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model produced an eos token.
    Eos,
    /// The maximum number of tokens was reached.
    MaxTokens,
    /// The caller stopped the text after its last token.
    Stopped,
}

/// A text that is being generated.
struct Text {
    /// The prompt, or in an encoder-decoder model the decoder's first token, and the generated tokens.
    tokens: Vec<u32>,
    prompt_len: usize,
    /// Number of leading tokens that were read into the cache, or dropped from it.
    read: usize,
    finish: Option<Finish>,
    rng: PositionRng,
}

/// Continues `prompts` in one batch. `on_token(prompt, token)` is called with each token as it is
/// sampled, and may end that text.
///
/// If a text outgrows the short sequences of a model with longrope, it is read anew with the other
/// frequencies. If a text outgrows the model's longest sequence, the cache is cleared and the last
/// half of that length is read anew.
///
/// # Errors
/// The model is an encoder, a prompt is empty or has a token outside the vocabulary, the sampling
/// options are invalid, or logits are not finite.
/// # Collective
/// All members of the model's tensor- and context-parallel groups, with equal arguments; `on_token`
/// must decide the same on every member.
pub fn generate(
    model: &Decoder,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    device: &Device,
    on_token: impl FnMut(usize, u32) -> ControlFlow<()>,
) -> Result<Vec<Generated>, ModelError> {
    let read = |model: &Decoder, next: &Next<'_>, cache: &mut DecoderCache| {
        Ok(model.next_logits(next, cache, device))
    };
    generate_with(model, prompts, options, read, on_token)
}

/// The next tokens of some sequences, `(sequence, tokens)` each.
pub type Next<'a> = [(usize, &'a [u32])];

/// Like [`generate`], for a rank that has only some stages of the model: `read` must return what
/// [`Decoder::next_logits`] does.
///
/// # Errors
/// As [`generate`], and the errors of `read`.
/// # Collective
/// All ranks that together hold the model, with equal arguments; `on_token` must decide the same on
/// each rank.
pub fn generate_with<E: From<ModelError>>(
    model: &Decoder,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    mut read: impl FnMut(&Decoder, &Next<'_>, &mut DecoderCache) -> Result<Tensor<3>, E>,
    mut on_token: impl FnMut(usize, u32) -> ControlFlow<()>,
) -> Result<Vec<Generated>, E> {
    options.sampling.validate().map_err(ModelError::Generate)?;
    model.config().check_generates()?;
    check(prompts, model.config().vocab)?;
    let first = first_tokens(model.config(), prompts, options)?;
    let model = model.for_generation();
    let mut cache = model.cache(prompts.len());
    if model.config().is_encoder_decoder() {
        let prompts = prompts.iter().enumerate();
        prompts.for_each(|(index, prompt)| cache.ask(index, prompt));
    }
    let start = |(index, tokens): (usize, Vec<u32>)| Text {
        prompt_len: tokens.len(),
        tokens,
        read: 0,
        finish: (options.max_tokens == 0).then_some(Finish::MaxTokens),
        rng: PositionRng::new(
            options.seed,
            Purpose::Sampling,
            &format!("generate.{index}"),
        ),
    };
    let mut texts: Vec<Text> = first.into_iter().enumerate().map(start).collect();
    let longest = model.config().longest_text();
    let rotary = model.config().positions.rotary();
    let switch = match rotary.map(|rotary| &rotary.scaling) {
        Some(RopeScaling::Long(long)) => Some(long.original_max_position),
        _ => None,
    };
    loop {
        let open: Vec<usize> = (0..texts.len())
            .filter(|&index| texts[index].finish.is_none())
            .collect();
        if open.is_empty() {
            break;
        }
        for &index in &open {
            let text = &mut texts[index];
            let lens = [
                cache.len(index),
                cache.len(index) + text.tokens.len() - text.read,
            ];
            if switch.is_some_and(|most| lens[0] > 0 && lens[0] <= most && lens[1] > most) {
                // The keys in the cache are rotated as in short sequences.
                text.read -= lens[0];
                cache.clear(index);
            }
            if let Some(longest) = longest
                && cache.len(index) + text.tokens.len() - text.read > longest
            {
                cache.clear(index);
                text.read = text.tokens.len() - longest.div_ceil(2);
            }
        }
        let next = |&index: &usize| (index, &texts[index].tokens[texts[index].read..]);
        let next: Vec<(usize, &[u32])> = open.iter().map(next).collect();
        let logits = read(&model, &next, &mut cache)?.into_data();
        let logits = logits
            .convert::<f32>()
            .try_to_vec::<f32>()
            .expect("converted to f32");
        for (&index, logits) in open.iter().zip(logits.chunks(model.config().vocab)) {
            let text = &mut texts[index];
            text.read = text.tokens.len();
            let written = text.tokens.len() - text.prompt_len;
            if let Some(token) = logits.iter().position(|logit| !logit.is_finite()) {
                let logit = logits[token];
                return Err(ModelError::Generate(format!(
                    "the logit of token {token} after {} tokens of prompt {index} is {logit}: \
                    the weights are damaged",
                    text.read
                ))
                .into());
            }
            let token = options
                .sampling
                .choose(logits, text.rng.uniform(written as u64));
            if options.eos.contains(&token) {
                text.finish = Some(Finish::Eos);
                continue;
            }
            text.tokens.push(token);
            if on_token(index, token).is_break() {
                text.finish = Some(Finish::Stopped);
            } else if written + 1 == options.max_tokens {
                text.finish = Some(Finish::MaxTokens);
            }
        }
    }
    let finished = |mut text: Text| Generated {
        tokens: text.tokens.split_off(text.prompt_len),
        finish: text.finish.expect("every text is finished"),
    };
    Ok(texts.into_iter().map(finished).collect())
}

/// The tokens with which the texts of the decoder start.
fn first_tokens(
    model: &DecoderConfig,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
) -> Result<Vec<Vec<u32>>, ModelError> {
    if !model.is_encoder_decoder() {
        return Ok(prompts.to_vec());
    }
    for prompt in prompts {
        model.check_seq_len(prompt.len())?;
    }
    let start = options.decoder_start.ok_or_else(|| {
        let why = "it is not known which token starts the decoder's text: set \
            `decoder_start_token_id` in the model's generation_config.json";
        ModelError::Generate(why.into())
    })?;
    check(&[vec![start]], model.vocab)?;
    Ok(vec![vec![start]; prompts.len()])
}

fn check(prompts: &[Vec<u32>], vocab: usize) -> Result<(), ModelError> {
    for (index, prompt) in prompts.iter().enumerate() {
        if prompt.is_empty() {
            let why = format!("prompt {index} has no tokens; give a text");
            return Err(ModelError::Generate(why));
        }
        if let Some(token) = prompt.iter().find(|&&token| token as usize >= vocab) {
            return Err(ModelError::Generate(format!(
                "prompt {index} has token {token}, but the model's vocabulary is {vocab}: it was \
                made with another tokenizer"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
