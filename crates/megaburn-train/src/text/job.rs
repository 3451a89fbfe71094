use std::ops::ControlFlow;

use burn::prelude::Device;
use megaburn_collective::{GroupOptions, ProcessGroups, RankEnv};
use megaburn_data::Tokenizer;
use megaburn_mesh::{Layout, ModelShape};
use megaburn_models::{
    Decoder, ModelError,
    generate::{GenerateOptions, Generated, generate},
    source::ModelSource,
};
use megaburn_parallel::shard_plan;

use super::{Continuation, continue_text};
use crate::{TrainError, device::Devices, ranks::run_ranks};

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
    /// Loads the model split over the ranks of `layout`, threads or processes (`env`), on `devices`,
    /// and lets it continue the prompts.
    ///
    /// # Errors
    /// A layout that splits more than the model, or that the model refuses; see also
    /// [`continue_text`].
    pub fn run(
        &self,
        layout: &Layout,
        devices: Devices,
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
        let device = devices.of_this_process(layout, env.as_ref())?;
        let mut ranks = run_ranks(layout, env, GroupOptions::default(), &device, |world| {
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
