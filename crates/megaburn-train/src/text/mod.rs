//! Text that a model generates after prompts.

mod ends;
mod job;
mod tokenizer;

use std::ops::ControlFlow;

use burn::tensor::Tensor;
use megaburn_data::{TextStream, Tokenizer};
use megaburn_models::{
    Decoder, DecoderConfig,
    decoder::DecoderCache,
    generate::{Finish, GenerateOptions, Next, generate_with},
};

use crate::error::TrainError;

pub use ends::ends_of;
pub use job::GenerateJob;
pub use tokenizer::model_tokenizer;

/// The text generated after a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Continuation {
    /// The generated tokens, including those of a stop string.
    pub tokens: Vec<u32>,
    /// The generated text, up to the stop string; `None` without a tokenizer.
    pub text: Option<String>,
    /// Why generation ended.
    pub finish: Finish,
}

/// The tokens of a prompt of `model`. A prompt that encodes to no tokens starts like an empty text.
///
/// With a vocabulary of BERT, the encoder of an encoder-decoder model was trained on texts without
/// `[CLS]` and `[SEP]`, so its prompt has none.
///
/// # Errors
/// The tokenizer cannot encode it.
pub fn prompt_tokens(
    tokenizer: &dyn Tokenizer,
    model: &DecoderConfig,
    prompt: &str,
) -> Result<Vec<u32>, TrainError> {
    let is_of_bert = tokenizer.token_to_id("[CLS]").is_some();
    let mut tokens = if model.is_encoder_decoder() && is_of_bert {
        tokenizer.encode_bare_prompt(prompt)?
    } else {
        tokenizer.encode_prompt(prompt)?
    };
    if tokens.is_empty() {
        tokens.push(tokenizer.bos().unwrap_or(tokenizer.eos()));
    }
    Ok(tokens)
}

/// Continues the prompts, which are already tokens. A text ends before the first of the strings
/// `stop` that occurs in it. `read` is as in [`generate_with`].
///
/// # Errors
/// See [`megaburn_models::generate::generate`]; also an empty stop string.
/// # Collective
/// All ranks that hold the model together, with the same arguments.
pub(crate) fn continue_text(
    model: &Decoder,
    tokenizer: &dyn Tokenizer,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    stop: &[String],
    read: impl FnMut(&Decoder, &Next<'_>, &mut DecoderCache) -> Result<Tensor<3>, TrainError>,
) -> Result<Vec<Continuation>, TrainError> {
    if stop.iter().any(String::is_empty) {
        let value = "empty".into();
        let rule = "a text of at least one character".into();
        return Err(TrainError::Invalid {
            key: "--stop",
            value,
            rule,
        });
    }
    // The text of a decoder does not continue that of the encoder.
    let is_continued = !model.config().is_encoder_decoder();
    let mut writers: Vec<_> = prompts
        .iter()
        .map(|prompt| writer(tokenizer, if is_continued { prompt } else { &[] }))
        .collect();
    let longest = stop.iter().map(String::len).max().unwrap_or(0);
    let generated = generate_with(model, prompts, options, read, |prompt, token| {
        let Writer { stream, text, end } = &mut writers[prompt];
        // A stop string may have begun in the earlier text.
        let seen = text.floor_char_boundary(text.len().saturating_sub(longest));
        text.push_str(&stream.push(token));
        let found = stop
            .iter()
            .filter_map(|stop| text[seen..].find(stop.as_str()))
            .min();
        *end = found.map(|at| seen + at);
        if end.is_some() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    let written = generated.into_iter().zip(writers);
    Ok(written
        .map(
            |(
                generated,
                Writer {
                    mut stream,
                    mut text,
                    end,
                },
            )| {
                match end {
                    Some(end) => text.truncate(end),
                    None => text.push_str(&stream.finish()),
                }
                Continuation {
                    tokens: generated.tokens,
                    text: Some(text),
                    finish: generated.finish,
                }
            },
        )
        .collect())
}

/// The text of one prompt while it is generated.
struct Writer<'a> {
    stream: Box<dyn TextStream + 'a>,
    text: String,
    /// Where the first stop string begins, if there is one.
    end: Option<usize>,
}

/// A writer whose stream has seen the prompt, because the text of a token may depend on the tokens
/// before it.
fn writer<'a>(tokenizer: &'a dyn Tokenizer, prompt: &[u32]) -> Writer<'a> {
    let mut stream = tokenizer.stream();
    prompt.iter().for_each(|&token| drop(stream.push(token)));
    Writer {
        stream,
        text: String::new(),
        end: None,
    }
}
