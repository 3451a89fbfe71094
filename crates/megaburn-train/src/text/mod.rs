//! What a model writes behind prompts, as text.

mod job;
mod tokenizer;

use std::ops::ControlFlow;

use burn::tensor::Tensor;
use megaburn_data::{TextStream, Tokenizer};
use megaburn_models::{
    Decoder,
    decoder::DecoderCache,
    generate::{Finish, GenerateOptions, Next, generate_with},
};

use crate::TrainError;

pub use job::GenerateJob;
pub use tokenizer::model_tokenizer;

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
/// `stop` that appears in it. `read` is as in [`generate_with`].
///
/// # Errors
/// See [`megaburn_models::generate::generate`]; also a stop string without a character.
/// # Collective
/// All ranks that hold the model between them, with the same arguments.
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
        let rule = "a text of one character or more".into();
        return Err(TrainError::Invalid {
            key: "--stop",
            value,
            rule,
        });
    }
    let mut writers: Vec<_> = prompts
        .iter()
        .map(|prompt| writer(tokenizer, prompt))
        .collect();
    let longest = stop.iter().map(String::len).max().unwrap_or(0);
    let generated = generate_with(model, prompts, options, read, |prompt, token| {
        let Writer { stream, text, end } = &mut writers[prompt];
        // A stop string may have begun in what came before.
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
    Writer {
        stream,
        text: String::new(),
        end: None,
    }
}
