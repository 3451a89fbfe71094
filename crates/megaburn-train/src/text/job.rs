use std::ops::ControlFlow;

use burn::prelude::Device;
use megaburn_collective::{Group, GroupOptions, Lane, ProcessGroups, RankEnv, tensors};
use megaburn_data::Tokenizer;
use megaburn_mesh::Layout;
use megaburn_models::{
    Decoder, ModelError,
    decoder::{DecoderCache, ModelOptions},
    generate::{GenerateOptions, Generated, Next, generate_with},
    source::ModelSource,
};
use megaburn_parallel::shard_plan;

use super::{Continuation, continue_text};
use crate::{
    config::{Dtype, ParallelConfig},
    device::Devices,
    error::TrainError,
    pipeline::Pipeline,
    ranks::run_ranks,
};

/// A generation job: the model, its prompts and how it continues them.
#[derive(Clone, Copy, Debug)]
pub struct GenerateJob<'a> {
    /// The model.
    pub source: &'a ModelSource,
    /// The model's tokenizer. Without it, only tokens are returned.
    pub tokenizer: Option<&'a dyn Tokenizer>,
    /// The tokens of the prompts.
    pub prompts: &'a [Vec<u32>],
    /// How tokens are chosen and when generation ends.
    pub options: &'a GenerateOptions,
    /// Stop strings, each of which ends a text; they need a tokenizer.
    pub stop: &'a [String],
    /// How the stages of a pipeline are split and placed. The layout determines the number of
    /// ranks.
    pub parallel: &'a ParallelConfig,
}

impl GenerateJob<'_> {
    /// Loads the model split over the ranks of `layout`, threads or processes (`env`), on
    /// `devices`, and continues the prompts. The weights of a checkpoint are verified first; of a
    /// run, the newest intact checkpoint is used.
    ///
    /// # Errors
    /// A layout that splits more than the model, or that the model refuses; an invalid prompt or
    /// sampling option; non-finite logits; a failed collective or device.
    pub fn run(
        &self,
        layout: &Layout,
        devices: Devices,
        env: Option<RankEnv>,
    ) -> Result<Vec<Continuation>, TrainError> {
        // Ranks that share experts read the same prompts.
        let shares_experts = layout.ep * layout.etp > 1;
        if layout.dp > 1 && !shares_experts {
            let key = "--layout";
            let value = layout.to_string();
            let rule = "made of tpN, ppN, cpN and epN: generation shards the model and the \
                       prefill of prompts over ranks";
            return Err(TrainError::Invalid {
                key,
                value,
                rule: rule.into(),
            });
        }
        self.source.config().check_generates()?;
        self.source.config().check_context_parallel(layout.cp)?;
        let config = &self.source.config().without_mtp();
        // Sequences are never split here.
        Layout {
            sp: self.built_with_sp(layout),
            cp: 1,
            ..*layout
        }
        .validate_for(&config.shape(layout.tp))?;
        self.parallel.splits(layout, config.layers)?;
        let device = devices.of_this_process(layout, env.as_ref())?;
        let options = GroupOptions::default();
        let on_rank = |world: &Group| self.on_rank(world, layout, &device);
        let is_first = env.as_ref().is_none_or(|env| env.rank == 0);
        let found = run_ranks(layout, env, options, &device, on_rank)?.swap_remove(0);
        if is_first {
            self.warn_of_long_texts(&found);
        }
        Ok(found)
    }

    /// Warns about texts that became longer than the model's positions.
    fn warn_of_long_texts(&self, found: &[Continuation]) {
        let model = self.source.config();
        let Some(positions) = model.longest_text() else {
            return;
        };
        for (index, (prompt, found)) in self.prompts.iter().zip(found).enumerate() {
            // The decoder of an encoder-decoder model starts with one token.
            let before = if model.is_encoder_decoder() {
                1
            } else {
                prompt.len()
            };
            let len = before + found.tokens.len();
            // The last generated token is not read by the model.
            if len > positions + 1 {
                let kept = positions.div_ceil(2);
                tracing::warn!(
                    "prompt {index} and its continuation are {len} tokens, but the model has \
                    {positions} positions: the text was continued from its last {kept} tokens \
                    whenever it became too long"
                );
            }
        }
    }

    /// Whether layers are built with sequence parallelism. Layers with experts are, if the
    /// tensor-parallel group has several ranks; generation still has them read full sequences.
    fn built_with_sp(&self, layout: &Layout) -> bool {
        self.source.config().experts.is_some() && layout.tp > 1
    }

    fn on_rank(
        &self,
        world: &Group,
        layout: &Layout,
        device: &Device,
    ) -> Result<Vec<Continuation>, TrainError> {
        let Self {
            prompts,
            options,
            stop,
            ..
        } = *self;
        let agreed = self.source.agreed(world)?;
        let source = agreed.as_ref().unwrap_or(self.source);
        let groups = ProcessGroups::new(world, *layout)?;
        // Multi-token-prediction blocks are not needed for generation, so they are not loaded.
        let config = &source.config().without_mtp();
        let pipeline = Pipeline::new(self.parallel, config, Dtype::F32, &groups)?;
        let model_options = ModelOptions {
            sequence_parallel: self.built_with_sp(layout),
            ..ModelOptions::default()
        };
        let model = config.init_stages(pipeline.chunks(), &groups, &model_options, device)?;
        let plan = shard_plan(&model).map_err(ModelError::from)?;
        let model = source.load(model, &plan)?;
        let read = |model: &Decoder, next: &Next<'_>, cache: &mut DecoderCache| {
            let logits = pipeline.next_logits(model, next, cache, device)?;
            // GEMMs may differ in their last bits between ranks, but the ranks must choose the same
            // token.
            Ok(tensors::broadcast(logits, 0, &groups.dp, Lane::InOrder)?.wait())
        };
        if let Some(tokenizer) = self.tokenizer {
            return continue_text(&model, tokenizer, prompts, options, stop, read);
        }
        let resume_advice = |_, _| ControlFlow::Continue(());
        let generated = generate_with(&model, prompts, options, read, resume_advice)?.into_iter();
        let tokens_only = |Generated { tokens, finish }| Continuation {
            tokens,
            text: None,
            finish,
        };
        Ok(generated.map(tokens_only).collect())
    }
}
