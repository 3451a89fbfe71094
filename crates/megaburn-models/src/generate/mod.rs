//! Text goes on token by token: several prompts at once, each with a cache of keys and values.

mod sampling;

use std::ops::ControlFlow;

use burn::{prelude::Device, tensor::Tensor};
use megaburn_mesh::{PositionRng, Purpose};

use crate::{Decoder, ModelError, decoder::DecoderCache};
pub use sampling::Sampling;

/// How prompts go on.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Tokens to write at most.
    pub max_tokens: usize,
    /// Tokens that end a text; they are not part of it.
    pub eos: Vec<u32>,
    /// How a token is chosen.
    pub sampling: Sampling,
    /// What choices are drawn from: `(seed, prompt, token)` decides each, whatever the other prompts
    /// and the layout. A layout still changes the logits' last bits.
    pub seed: u64,
}

/// A text behind its prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// What was written.
    pub tokens: Vec<u32>,
    /// Why it ends.
    pub finish: Finish,
}

/// Why a text ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it.
    Eos,
    /// As many tokens as were asked for.
    MaxTokens,
    /// The caller ended it, after the last token.
    Stopped,
}

/// One text in the making.
struct Text {
    /// Prompt and what follows.
    tokens: Vec<u32>,
    prompt_len: usize,
    /// How many of the tokens the cache has read, or forgotten.
    read: usize,
    finish: Option<Finish>,
    rng: PositionRng,
}

/// Lets the model continue `prompts`, all in one batch. `on_token(prompt, token)` sees each token of
/// a text as it is chosen and may end that text.
///
/// A text that outgrows the model's longest sequence goes on from its last half of that, read anew.
///
/// # Errors
/// A prompt without tokens or with one outside the vocabulary, a way to choose that is none, logits
/// that are not finite.
/// # Collective
/// The model's tensor- and context-parallel groups, with the same arguments; `on_token` must decide the same on
/// every member.
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

/// As [`generate`], where this rank has a part of the model's stages: `read` gives what
/// [`Decoder::next_logits`] does.
///
/// # Errors
/// As [`generate`]; those of `read`.
/// # Collective
/// All ranks that hold the model between them, with the same arguments; `on_token` must decide the same
/// on each.
pub fn generate_with<E: From<ModelError>>(
    model: &Decoder,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    mut read: impl FnMut(&Decoder, &Next<'_>, &mut DecoderCache) -> Result<Tensor<3>, E>,
    mut on_token: impl FnMut(usize, u32) -> ControlFlow<()>,
) -> Result<Vec<Generated>, E> {
    options.sampling.validate().map_err(ModelError::Generate)?;
    check(prompts, model.config().vocab)?;
    let model = model.for_generation();
    let mut cache = model.cache(prompts.len());
    let start = |(index, prompt): (usize, &Vec<u32>)| Text {
        tokens: prompt.clone(),
        prompt_len: prompt.len(),
        read: 0,
        finish: (options.max_tokens == 0).then_some(Finish::MaxTokens),
        rng: PositionRng::new(
            options.seed,
            Purpose::Sampling,
            &format!("generate.{index}"),
        ),
    };
    let mut texts: Vec<Text> = prompts.iter().enumerate().map(start).collect();
    let longest = model.config().max_seq_len;
    loop {
        let open: Vec<usize> = (0..texts.len())
            .filter(|&index| texts[index].finish.is_none())
            .collect();
        if open.is_empty() {
            break;
        }
        for &index in &open {
            let text = &mut texts[index];
            if cache.len(index) + text.tokens.len() - text.read > longest {
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
                    "the logit of token {token} behind {} tokens of prompt {index} is {logit}: \
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
        finish: text.finish.expect("no text is open"),
    };
    Ok(texts.into_iter().map(finished).collect())
}

fn check(prompts: &[Vec<u32>], vocab: usize) -> Result<(), ModelError> {
    for (index, prompt) in prompts.iter().enumerate() {
        if prompt.is_empty() {
            let why = format!("prompt {index} has no token; give it a text");
            return Err(ModelError::Generate(why));
        }
        if let Some(token) = prompt.iter().find(|&&token| token as usize >= vocab) {
            return Err(ModelError::Generate(format!(
                "prompt {index} has token {token}, and the model's vocabulary is {vocab}: it was \
                 made with another tokenizer"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
