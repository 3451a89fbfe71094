use megaburn_collective::{Lane, tensors};
use megaburn_models::{
    Decoder,
    decoder::DecoderCache,
    generate::{GenerateOptions, Next, Sampling},
};
use megaburn_optim::ShardingLevel;

use crate::{
    error::TrainError,
    text::{continue_text, prompt_tokens},
    trainer::Trainer,
    trainer_core::Work,
};

impl Trainer {
    /// The prompt and the text that the model generates after it. `None` if no sample is requested or
    /// the model has an encoder, whose samples are not texts that go on, and on ranks that do not
    /// take part: all except those of the first data-parallel rank's model and those that share
    /// sequences with them.
    ///
    /// # Errors
    /// The model cannot read the prompt, or weights are not finite.
    /// # Collective
    /// The ranks of the first data-parallel rank's sequences; all ranks if parameters or experts
    /// are sharded over data-parallel ranks.
    pub(super) fn generated_sample(&self) -> Result<Option<String>, TrainError> {
        let generate = &self.core.config.generate;
        let is_first = self.core.groups.dp.rank() == 0;
        let layout = self.core.groups.layout();
        let together =
            self.core.sharding.level() == ShardingLevel::Parameters || layout.ep * layout.etp > 1;
        let model = &self.model_config;
        let has_encoder = model.bidirectional || model.is_encoder_decoder();
        if !(is_first || together) || generate.tokens == 0 || has_encoder {
            return Ok(None);
        }
        let _compiling = self
            .core
            .first_times
            .begin(Work::Sample, &self.core.groups.world);
        let tokenizer = self.data.tokenizer.as_ref();
        let options = GenerateOptions {
            max_tokens: generate.tokens,
            eos: vec![tokenizer.eos()],
            sampling: Sampling {
                temperature: generate.temperature,
                top_k: None,
                top_p: None,
            },
            decoder_start: None,
            seed: self.core.config.run.seed,
        };
        let prompt = match &generate.prompt {
            Some(prompt) => prompt_tokens(tokenizer, model, prompt)?,
            None => prompt_tokens(tokenizer, model, &self.default_prompt()?)?,
        };
        let device = self.core.device.clone().inner();
        let prompts = [prompt];
        let read = |model: &Decoder, next: &Next<'_>, cache: &mut DecoderCache| {
            self.core.groups.world.pulse().beat();
            let logits = self
                .core
                .pipeline
                .next_logits(model, next, cache, &device)?;
            // GEMMs may differ in their last bits between ranks, but the ranks must choose the same
            // token.
            Ok(if together {
                tensors::broadcast(logits, 0, &self.core.groups.dp, Lane::InOrder)?.wait()
            } else {
                logits
            })
        };
        let texts = continue_text(self.model(), tokenizer, &prompts, &options, &[], read);
        // Check for a lost rank first, so that it is reported instead of non-finite weights.
        self.core.sharding.check()?;
        self.core.sharding.release();
        let mut texts = texts?;
        let written = texts.remove(0).text.unwrap_or_default();
        Ok(is_first.then(|| tokenizer.decode(&prompts[0]) + &written))
    }

    /// The default prompt of the sample.
    fn default_prompt(&self) -> Result<String, TrainError> {
        if self.core.config.data.path.is_none() && self.core.config.data.train.is_empty() {
            return Ok("pub fn ".into());
        }
        let (tokens, is_held_out) = self.data.first_tokens();
        let len = PROMPT_TOKENS.min(tokens.num_tokens().saturating_sub(1) as usize);
        let text = self.data.tokenizer.decode(&tokens.sample(len, 0)?);
        if !is_held_out {
            return Ok(first_words(&text).into());
        }
        // The text may begin inside a word.
        let whole = text
            .split_once(char::is_whitespace)
            .map_or(&*text, |(_, rest)| rest);
        Ok(first_words(whole).into())
    }
}

/// Number of tokens of the data from which the words of a prompt are taken.
const PROMPT_TOKENS: usize = 64;

/// The first three words of a text, or its first 24 characters if the words are longer.
fn first_words(text: &str) -> &str {
    let text = text.trim_start();
    let is_end = |pair: &[(usize, char)]| !pair[0].1.is_whitespace() && pair[1].1.is_whitespace();
    let chars: Vec<_> = text.char_indices().take(25).collect();
    let ends = chars
        .windows(2)
        .filter(|pair| is_end(pair))
        .map(|pair| pair[1].0)
        .take(3);
    let most = chars.get(24).map_or(text.len(), |(at, _)| *at);
    &text[..ends.last().unwrap_or(most)]
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("  It was the best of times.", "It was the")]
    #[case("It was\nthe", "It was")]
    #[case("Schifffahrtsgesellschaften sind", "Schifffahrtsgesellschaft")]
    #[case(
        "多くの人がその町に住んでいて、朝になると広場に集まって話をする",
        "多くの人がその町に住んでいて、朝になると広場に集"
    )]
    #[case("short", "short")]
    #[case("", "")]
    fn a_prompt_has_a_few_words(#[case] text: &str, #[case] words: &str) {
        assert_eq!(first_words(text), words);
    }
}
