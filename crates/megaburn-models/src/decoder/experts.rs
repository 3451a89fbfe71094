use burn::prelude::Device;
use megaburn_parallel::{ExpertGroups, Moe, MoeConfig, MoeOptions, ParallelError, Router};
use serde::{Deserialize, Serialize};

use super::{Decoder, config::LARGEST};
use crate::ModelError;

/// More experts than this in all layers are a mistake, and a list of them would fill the memory.
const MOST_EXPERTS: usize = 1 << 20;

/// The experts of a model's layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// Experts of a layer, the shared one not counted.
    pub num: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Features inside an expert.
    pub ffn: usize,
    /// Features inside the shared expert, which every token goes to; none: there is none.
    pub shared_ffn: Option<usize>,
    /// Whether scores are sigmoids of the logits, not a softmax.
    pub sigmoid: bool,
    /// Whether the weights of a token's experts add up to one.
    pub normalise: bool,
    /// What they are multiplied with then.
    pub scale: f64,
    /// Groups of experts, how many of them a token's are of, and how many of the best scores in it are a
    /// group's.
    pub groups: Option<[usize; 3]>,
    /// Whether experts have a bias by which they are chosen, without a gradient.
    pub bias: bool,
    /// Layers that have an MLP even so.
    pub dense_layers: Vec<usize>,
}

impl Experts {
    /// So many, each token going to `top_k` of them, as Mixtral's.
    pub fn new(num: usize, top_k: usize, ffn: usize) -> Self {
        Self {
            num,
            top_k,
            ffn,
            shared_ffn: None,
            sigmoid: false,
            normalise: true,
            scale: 1.0,
            groups: None,
            bias: false,
            dense_layers: Vec::new(),
        }
    }

    /// Features inside all the experts that a token goes to.
    pub fn active_ffn(&self) -> usize {
        self.top_k * self.ffn + self.shared_ffn.unwrap_or(0)
    }

    pub(super) fn validate(&self, layers: usize) -> Result<(), ModelError> {
        let refuse = |why: String| Err(ModelError::Config(why));
        let Self {
            num, top_k, ffn, ..
        } = *self;
        let sizes = [
            ("num_experts", num),
            ("top_k", top_k),
            ("the experts' ffn", ffn),
            ("the shared expert's ffn", self.shared_ffn.unwrap_or(1)),
        ];
        if let Some((name, size)) = sizes
            .into_iter()
            .find(|(_, size)| !(1..=LARGEST).contains(size))
        {
            return refuse(format!("{name} is {size}, which no model has"));
        }
        if num.saturating_mul(layers) > MOST_EXPERTS {
            return refuse(format!(
                "{num} experts in each of {layers} layers, which no model has"
            ));
        }
        if top_k > num {
            return refuse(format!("a token goes to {top_k} experts of {num}"));
        }
        if !(self.scale.is_finite() && self.scale > 0.0) {
            return refuse(format!(
                "experts' weights are multiplied with {}",
                self.scale
            ));
        }
        if let Some([groups, kept, best]) = self.groups
            && (groups == 0
                || !num.is_multiple_of(groups)
                || !(1..=groups).contains(&kept)
                || !(1..=num / groups).contains(&best)
                || top_k > kept * (num / groups))
        {
            return refuse(format!(
                "{top_k} experts a token, from {kept} of {groups} groups of {num} experts, by their {best} best"
            ));
        }
        match self.dense_layers.iter().find(|&&layer| layer >= layers) {
            Some(layer) => refuse(format!("layer {layer} of {layers} has an MLP")),
            None => Ok(()),
        }
    }

    /// The layer that they are in a block.
    pub(super) fn layer(&self, d_model: usize) -> MoeConfig {
        MoeConfig::new(d_model, self.ffn, self.num, self.top_k)
            .with_shared_ffn(self.shared_ffn)
            .with_sigmoid(self.sigmoid)
            .with_normalise(self.normalise)
            .with_scale(self.scale)
            .with_groups(self.groups)
            .with_expert_bias(self.bias)
    }

    /// That layer, on this rank.
    pub(super) fn init(
        config: &MoeConfig,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Result<Moe, ParallelError> {
        let moe = config.init(groups.clone(), device)?;
        // One that was not drawn yet would count as one with a gradient.
        moe.router.biases();
        Ok(moe)
    }

    /// Whether a layout can share them out.
    ///
    /// # Errors
    /// It cannot, with the numbers.
    pub(super) fn check_grid(&self, groups: &ExpertGroups) -> Result<(), ModelError> {
        let ep = groups.ep.size();
        let num = self.num;
        if num.is_multiple_of(ep) {
            Ok(())
        } else {
            Err(ModelError::Config(format!(
                "{num} experts do not divide over ep {ep}"
            )))
        }
    }
}

impl Decoder {
    /// How experts are used, in every layer of them.
    #[must_use]
    pub fn with_moe_options(mut self, options: MoeOptions) -> Self {
        for block in self.blocks.iter_mut().flatten() {
            block.moe = block.moe.take().map(|moe: Moe| moe.with_options(options));
        }
        self
    }

    /// The paths of parameters that keep f32 where the others are narrower: small steps would be lost.
    pub fn f32_params(&self) -> impl Iterator<Item = String> {
        let biased = self.routers().filter(|(_, router)| router.bias.is_some());
        biased.map(|(index, _)| format!("blocks.{index}.moe.router.bias"))
    }

    /// Replaces the biases by which experts are chosen by what `moved` makes of them, of each layer by its number.
    pub fn move_expert_biases(&mut self, moved: impl Fn(usize, &[f32]) -> Vec<f32>) {
        for (index, block) in self.blocks.iter_mut().enumerate() {
            if let Some(moe) = block.as_mut().and_then(|block| block.moe.as_mut())
                && let Some(biases) = moe.router.biases()
            {
                moe.router.set_bias(&moved(index, &biases));
            }
        }
    }

    /// The routers of this rank's layers, with the layers' numbers.
    pub fn routers(&self) -> impl Iterator<Item = (usize, &Router)> {
        let blocks = self.blocks.iter().enumerate();
        blocks.filter_map(|(index, block)| Some((index, &block.as_ref()?.moe.as_ref()?.router)))
    }
}
