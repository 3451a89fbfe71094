use megaburn_collective::tensors::broadcast;
use megaburn_models::{
    Decoder,
    decoder::DecoderCache,
    generate::{GenerateOptions, Next, Sampling},
};
use megaburn_optim::ShardingLevel;

use crate::{
    TrainError,
    text::{continue_text, prompt_tokens},
    trainer::Trainer,
};

impl Trainer {
    /// The prompt and what the model writes behind it; `None` on ranks that take no part (all but
    /// those of the first data-parallel rank's model and those that share sequences with them) or when no
    /// sample is asked for.
    ///
    /// # Errors
    /// A prompt that the model cannot read, weights that are not finite.
    /// # Collective
    /// The ranks of the first data-parallel rank's sequences; all ranks where they share parameters or experts
    /// out.
    pub(crate) fn sample(&self) -> Result<Option<String>, TrainError> {
        let generate = &self.config.generate;
        let is_first = self.groups.dp.rank() == 0;
        let layout = self.groups.layout();
        let together =
            self.sharding.level() == ShardingLevel::Parameters || layout.ep * layout.etp > 1;
        if !(is_first || together) || generate.tokens == 0 {
            return Ok(None);
        }
        let tokenizer = self.data.tokenizer.as_ref();
        let options = GenerateOptions {
            max_tokens: generate.tokens,
            eos: vec![tokenizer.eos()],
            sampling: Sampling { temperature: generate.temperature, top_k: None, top_p: None },
            seed: self.config.run.seed,
        };
        let prompt = prompt_tokens(tokenizer, &generate.prompt)?;
        let device = self.device.clone().inner();
        let prompts = [prompt];
        let read = |model: &Decoder, next: &Next<'_>, cache: &mut DecoderCache| {
            let logits = self.pipeline.next_logits(model, next, cache, &device)?;
            // Products may have other last bits on each rank, and a choice between tokens must not.
            Ok(if together { broadcast(logits, 0, &self.groups.dp)? } else { logits })
        };
        let texts = continue_text(self.model(), tokenizer, &prompts, &options, &[], read);
        // A rank that is gone says so, and not that weights are no numbers.
        self.sharding.check()?;
        self.sharding.release();
        let mut texts = texts?;
        let written = texts.remove(0).text.unwrap_or_default();
        Ok(is_first.then(|| tokenizer.decode(&prompts[0]) + &written))
    }
}
