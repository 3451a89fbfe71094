//! The tables that tell attention the positions of its tokens.

use burn::prelude::Device;
use megaburn_kernels::{RopeConfig, RopeLayout, RopeScaling, RopeTable};

use megaburn_parallel::{AlibiKeys, PositionTables};

use super::{DecoderConfig, Mla, Rotary};

/// Which rotary table a block uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockRope {
    /// None: the block rotates nothing.
    None,
    /// The table of the model.
    Model,
    /// The table of layers with a sliding window.
    Window,
}

/// The tables of a batch, for all blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct Ropes {
    model: Option<RopeTable>,
    window: Option<RopeTable>,
    alibi: Option<AlibiKeys>,
}

impl Ropes {
    /// The tables of `positions`, each with the length of its sequence.
    ///
    /// # Panics
    /// If the configuration was not validated.
    pub(super) fn new(
        config: &DecoderConfig,
        positions: impl IntoIterator<Item = (usize, usize)>,
        device: &Device,
    ) -> Self {
        let positions: Vec<(usize, usize)> = positions.into_iter().collect();
        let table = |rope: RopeConfig| {
            let table = rope.init_at(positions.iter().copied(), device);
            table.expect("the configuration was validated")
        };
        let places = || {
            positions
                .iter()
                .map(|(position, _)| *position)
                .collect::<Vec<_>>()
        };
        Self {
            model: config.rope().map(table),
            window: config.window_rope().map(table),
            alibi: config
                .positions
                .alibi()
                .map(|_| AlibiKeys::new(&places(), device)),
        }
    }

    /// The tables of a block.
    pub(super) fn of(&self, block: BlockRope) -> PositionTables<'_> {
        let rope = match block {
            BlockRope::None => None,
            BlockRope::Model => self.model.as_ref(),
            BlockRope::Window => self.window.as_ref(),
        };
        let alibi = self.alibi.as_ref();
        PositionTables {
            rope,
            alibi,
            relative: None,
        }
    }

    /// The same tables with the rows of each sequence in its own order.
    pub(super) fn rows<P: AsRef<[usize]>>(&self, sequences: &[P], device: &Device) -> Self {
        let taken = |table: &RopeTable| table.rows(sequences);
        Self {
            model: self.model.as_ref().map(taken),
            window: self.window.as_ref().map(taken),
            alibi: self
                .alibi
                .as_ref()
                .map(|_| AlibiKeys::of_each(sequences, device)),
        }
    }
}

impl DecoderConfig {
    /// The rotary embedding, if the model has one: of all features of a head, or of the rotated
    /// ones in latent attention.
    pub fn rope(&self) -> Option<RopeConfig> {
        let rotary = self.positions.rotary()?;
        let rope = self.rope_of_heads(rotary).with_theta(rotary.theta);
        Some(rope.with_scaling(rotary.scaling.clone()))
    }

    /// The rotary embedding of layers with a sliding window, if it is another one.
    pub fn window_rope(&self) -> Option<RopeConfig> {
        let rotary = self.positions.rotary()?;
        Some(self.rope_of_heads(rotary).with_theta(rotary.window_theta?))
    }

    /// Which features of a head are rotated.
    fn rope_of_heads(&self, rotary: &Rotary) -> RopeConfig {
        let (features, interleaved) = match &self.latent {
            Some(Mla {
                qk_rope_head_dim,
                interleaved,
                ..
            }) => (*qk_rope_head_dim, *interleaved),
            None => (self.head_dim, rotary.interleaved),
        };
        let layout = if interleaved {
            RopeLayout::Interleaved
        } else {
            RopeLayout::Halves
        };
        RopeConfig::new(features)
            .with_layout(layout)
            .with_rotary_percent(rotary.percent)
    }

    /// Which rotary table block `index` uses.
    pub(super) fn block_rope(&self, index: usize) -> BlockRope {
        match self.positions.rotary() {
            None => BlockRope::None,
            Some(rotary) if rotary.unrotated_layers.contains(&self.kind_of(index)) => {
                BlockRope::None
            }
            Some(rotary) if rotary.window_theta.is_some() && self.layer_window(index).is_some() => {
                BlockRope::Window
            }
            Some(_) => BlockRope::Model,
        }
    }

    /// The factor of the attention scores if it is not `head_dim^-0.5`. With YaRN, DeepSeek's latent
    /// attention multiplies it by a factor.
    pub(super) fn softmax_scale(&self) -> Option<f64> {
        let scaling = self.positions.rotary().map(|rotary| &rotary.scaling);
        match (&self.latent, scaling) {
            (Some(_), Some(RopeScaling::Yarn(yarn))) => {
                let plain = (self.head_dim as f64).powf(-0.5);
                Some(self.attention_scale.unwrap_or(plain) * yarn.score_factor())
            }
            _ => self.attention_scale,
        }
    }
}
