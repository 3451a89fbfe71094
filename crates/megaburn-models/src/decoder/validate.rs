//! The check that a model of a configuration can exist.

use super::{
    BlockOrder, DecoderConfig, Mla, ModelOptions, NormPlacement, Positions,
    limits::{LARGEST, MOST_LAYERS, MOST_PARAMS},
};
use crate::error::ModelError;

impl DecoderConfig {
    /// Refuses sizes that no model can have.
    ///
    /// # Errors
    /// The first invalid size, with the numbers.
    pub fn validate(&self) -> Result<(), ModelError> {
        let refuse = |why: String| Err(ModelError::Config(why));
        let sizes = [
            ("vocab", self.vocab),
            ("hidden", self.hidden),
            ("ffn", self.ffn),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("max_seq_len", self.max_seq_len),
            ("window", self.window.unwrap_or(1)),
            ("token_types", self.token_types.max(1)),
        ];
        if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return refuse(format!("`{name}` is 0, but must be at least 1"));
        }
        if let Some((name, size)) = sizes.into_iter().find(|(_, size)| *size > LARGEST) {
            return refuse(format!("`{name}` is {size}, which is out of range"));
        }
        for (name, count) in [("layers", self.layers), ("mtp_layers", self.mtp_layers)] {
            if count > MOST_LAYERS {
                return refuse(format!("`{name}` is {count}, which is out of range"));
            }
        }
        let heads = self.heads;
        let kv_heads = self.kv_heads;
        if !heads.is_multiple_of(kv_heads) {
            return refuse(format!(
                "{heads} query heads are not divisible by {kv_heads} key/value heads"
            ));
        }
        if !(self.norm_eps >= 0.0 && self.norm_eps.is_finite()) {
            return refuse(format!(
                "`norm_eps` is {}, but must be at least 0 and finite",
                self.norm_eps
            ));
        }
        if let Some(layer) = self.full_layers.iter().find(|&&layer| layer >= self.layers) {
            return refuse(format!(
                "`full_layers` names layer {layer}, but the model has {} layers",
                self.layers
            ));
        }
        if let Some(latent) = &self.latent {
            latent.validate()?;
            self.check_latent(latent)?;
        }
        for rope in [self.rope(), self.window_rope()].into_iter().flatten() {
            rope.frequencies()?;
        }
        self.check_factors()?;
        self.check_parts()?;
        if let Some(experts) = &self.experts {
            experts.validate(self.layers)?;
        }
        let params = self.most_params();
        if params > MOST_PARAMS {
            return refuse(format!(
                "its sizes amount to {params:.1e} parameters, which is too large"
            ));
        }
        Ok(())
    }

    /// Refuses factors that are not numbers in their range.
    fn check_factors(&self) -> Result<(), ModelError> {
        let factors = [
            ("attention_scale", self.attention_scale),
            ("attention_soft_cap", self.attention_soft_cap),
            ("logits_soft_cap", self.logits_soft_cap),
            ("multipliers.embedding", Some(self.multipliers.embedding)),
            ("multipliers.residual", Some(self.multipliers.residual)),
            (
                "multipliers.logits_scaling",
                Some(self.multipliers.logits_scaling),
            ),
            ("init_std", Some(self.init_std)),
        ];
        let wrong = |factor: &f64| !(factor.is_finite() && *factor > 0.0);
        let mut found = factors
            .into_iter()
            .filter_map(|(name, of)| Some((name, of?)));
        match found.find(|(_, factor)| wrong(factor)) {
            Some((name, factor)) => Err(ModelError::Config(format!(
                "`{name}` is {factor}, but must be positive and finite"
            ))),
            None => Ok(()),
        }
    }

    /// Refuses parts that do not go together.
    fn check_parts(&self) -> Result<(), ModelError> {
        let refuse = |why: String| Err(ModelError::Config(why));
        let shares_norm = self.block_order == BlockOrder::ParallelSharedNorm;
        if shares_norm && self.norm_placement != NormPlacement::Pre {
            return refuse(
                "`block_order` parallel_shared_norm needs `norm_placement` pre: attention and MLP \
                share the norm before them"
                    .into(),
            );
        }
        self.check_encoder()?;
        self.check_encoder_decoder()?;
        if self.positions.alibi().is_some() && self.attention_soft_cap.is_some() {
            return refuse(
                "`positions` is alibi, whose bias would be inside of `attention_soft_cap`: set one of \
                the two"
                    .into(),
            );
        }
        if let Some(base) = self.mup_base_hidden {
            if base == 0 {
                return refuse("`mup_base_hidden` is 0, but must be at least 1".into());
            }
            if self.experts.is_some() {
                return refuse(format!(
                    "`mup_base_hidden` is {base}, but μP does not say how the learning rate of a \
                    router scales: leave one of the two out"
                ));
            }
            if self.masked_head || self.binary_head {
                return refuse(format!(
                    "`mup_base_hidden` is {base}, but the learning rates of `masked_head` and \
                    `binary_head` would not be scaled: leave one of the two out"
                ));
            }
        }
        if let Some(rotary) = self.positions.rotary() {
            let layers = self.layers;
            if let Some(layer) = rotary.unrotated_layers.iter().find(|&&at| at >= layers) {
                return refuse(format!(
                    "`unrotated_layers` names layer {layer}, but the model has {layers} layers"
                ));
            }
            if rotary.window_theta.is_some() && self.window.is_none() {
                return refuse(
                    "`window_theta` is set, but the model has no `window` whose layers use it"
                        .into(),
                );
            }
        }
        Ok(())
    }

    /// Refuses parts that do not go together with attention in both directions, norms of the
    /// residual stream, or the heads of an encoder.
    fn check_encoder(&self) -> Result<(), ModelError> {
        let both = self.bidirectional;
        let is_post = self.norm_placement == NormPlacement::Post;
        let rules = [
            (
                is_post && self.block_order != BlockOrder::Serial,
                "`norm_placement` post needs `block_order` serial: its norms are of the residual \
                stream after attention and after MLP",
            ),
            (
                both && self.window.is_some(),
                "`window` is set, but it only limits causal attention: remove it, or set \
                `bidirectional` = false",
            ),
            (
                both && self.positions.alibi().is_some(),
                "`positions` alibi needs causal attention: choose others, or set `bidirectional` = \
                false",
            ),
            (
                both && self.mtp_layers > 0,
                "`mtp_layers` needs causal attention: set it to 0, or `bidirectional` = false",
            ),
            (
                both && self.experts.is_some(),
                "`experts` need causal attention: they count the tokens of the loss, which are only \
                the masked ones in an encoder",
            ),
            (
                self.masked_head && self.activation.is_gated(),
                "`masked_head` needs an `activation` that is not gated, such as gelu",
            ),
            (
                self.binary_head && !both,
                "`binary_head` needs `bidirectional` = true: it reads the first token, which sees \
                no other in causal attention",
            ),
        ];
        match rules.into_iter().find(|(is_wrong, _)| *is_wrong) {
            Some((_, why)) => Err(ModelError::Config(why.into())),
            None => Ok(()),
        }
    }

    /// Refuses options that do not go together with the parts of the model.
    pub(super) fn check_options(&self, options: &ModelOptions) -> Result<(), ModelError> {
        let found = self.unfused_loss();
        match found.filter(|_| options.fused_linear_cross_entropy) {
            Some(part) => Err(ModelError::Config(format!(
                "the model has {part}, which the fused linear cross-entropy does not compute: set \
                train.fused_linear_cross_entropy = false"
            ))),
            None => Ok(()),
        }
    }

    /// The part of the model that the fused linear cross-entropy does not compute, if there is one.
    pub fn unfused_loss(&self) -> Option<String> {
        let definition = self.family.definition();
        if self.masked_head {
            Some("a head of masked tokens (`masked_head`), which adds a bias to the logits".into())
        } else if definition.head().is_some() {
            Some(format!("the output head of the family {}", self.family))
        } else if definition.loss().is_some() {
            Some(format!("the loss of the family {}", self.family))
        } else {
            None
        }
    }

    /// Refuses sizes and parts of the model that its latent attention does not support.
    fn check_latent(&self, latent: &Mla) -> Result<(), ModelError> {
        let refuse = |why: String| Err(ModelError::Config(why));
        let Self {
            heads,
            kv_heads,
            head_dim,
            ..
        } = *self;
        if head_dim != latent.qk_head_dim() {
            let Mla {
                qk_nope_head_dim: nope,
                qk_rope_head_dim: rope,
                ..
            } = latent;
            return refuse(format!(
                "`head_dim` is {head_dim}, but heads of latent attention have {nope} + {rope}"
            ));
        }
        if kv_heads != heads {
            return refuse(format!(
                "{kv_heads} key/value heads for {heads} query heads: latent attention needs as \
                many key/value heads as query heads"
            ));
        }
        let others = [
            ("bidirectional", self.bidirectional),
            ("window", self.window.is_some()),
            ("qk_norm", self.qk_norm.is_some()),
            ("attention_soft_cap", self.attention_soft_cap.is_some()),
            ("attention_sinks", self.attention_sinks),
            (
                "rotary_interleaved",
                self.positions
                    .rotary()
                    .is_some_and(|rotary| rotary.interleaved),
            ),
            (
                "rotary_percent",
                self.positions
                    .rotary()
                    .is_some_and(|rotary| rotary.percent != 1.0),
            ),
            ("qkv_bias", self.qkv_bias),
            ("output_bias", self.output_bias),
            ("positions = learned", self.positions == Positions::Learned),
            ("positions = none", self.positions == Positions::None),
            ("positions = alibi", self.positions.alibi().is_some()),
        ];
        match others.into_iter().find(|(_, is_set)| *is_set) {
            Some((name, _)) => refuse(format!("latent attention does not support `{name}`")),
            None => Ok(()),
        }
    }

    /// An upper bound of the number of parameters, without biases and norms.
    fn most_params(&self) -> f64 {
        let [vocab, hidden, ffn, heads, head_dim, blocks] = [
            self.vocab,
            self.hidden,
            self.ffn,
            self.heads,
            self.head_dim,
            self.layers,
        ]
        .map(|size| size as f64);
        let mlp = 3.0 * hidden * ffn;
        let experts = self.experts.as_ref().map_or(0.0, |experts| {
            let shared = experts.shared_ffn.unwrap_or(0) as f64;
            hidden * (3.0 * (experts.num as f64 * experts.ffn as f64 + shared) + experts.num as f64)
        });
        let attention = self
            .latent
            .as_ref()
            .map_or(4.0 * hidden * heads * head_dim, |latent| {
                let rank = latent.kv_lora_rank as f64 + latent.q_lora_rank.unwrap_or(0) as f64;
                let values = latent.v_head_dim as f64;
                (2.0 * rank + 2.0 * hidden) * (hidden + heads * (2.0 * head_dim + values))
            });
        let blocks = blocks + self.mtp_layers as f64;
        2.0 * vocab * hidden + blocks * (mlp + experts + attention + 2.0 * hidden * hidden)
    }
}
