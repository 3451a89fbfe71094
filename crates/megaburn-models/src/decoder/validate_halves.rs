//! The check of the parts of an encoder-decoder model, and of a relative bias.

use super::{BlockOrder, DecoderConfig, limits::LARGEST};
use crate::error::ModelError;

impl DecoderConfig {
    /// Refuses parts that do not go together with an encoder before the decoder, or with a relative
    /// bias.
    pub(super) fn check_encoder_decoder(&self) -> Result<(), ModelError> {
        let refuse = |why: String| Err(ModelError::Config(why));
        self.check_relative()?;
        let encoder_layers = self.encoder_layers;
        if encoder_layers == 0 {
            return Ok(());
        }
        if encoder_layers >= self.layers {
            let layers = self.layers;
            return refuse(format!(
                "`encoder_layers` is {encoder_layers} of {layers} `layers`, which leaves no layer to \
                the decoder: `layers` counts those of both"
            ));
        }
        let others = [
            (
                "bidirectional",
                self.bidirectional,
                "the encoder always sees later tokens, and the decoder must not",
            ),
            (
                "block_order",
                self.block_order != BlockOrder::Serial,
                "cross attention is between attention and MLP: set it to serial",
            ),
            (
                "positions",
                self.positions.alibi().is_some(),
                "alibi needs causal attention: choose relative, learned, rotary or none",
            ),
            (
                "window",
                self.window.is_some(),
                "it limits causal attention only",
            ),
            (
                "attention_sinks",
                self.attention_sinks,
                "cross attention has none",
            ),
            (
                "attention_soft_cap",
                self.attention_soft_cap.is_some(),
                "cross attention has none",
            ),
            (
                "qk_norm",
                self.qk_norm.is_some(),
                "cross attention has none",
            ),
            (
                "token_types",
                self.token_types > 0,
                "they are the segments of an encoder alone",
            ),
            (
                "latent",
                self.latent.is_some(),
                "cross attention has no latents",
            ),
            (
                "experts",
                self.experts.is_some(),
                "they count the tokens of the loss, which are only those of the decoder",
            ),
            (
                "mtp_layers",
                self.mtp_layers > 0,
                "blocks of multi-token prediction have no cross attention",
            ),
            (
                "mup_base_hidden",
                self.mup_base_hidden.is_some(),
                "μP is defined for decoders here",
            ),
        ];
        match others.into_iter().find(|(_, is_set, _)| *is_set) {
            Some((name, _, why)) => refuse(format!(
                "an encoder-decoder model (`encoder_layers` = {encoder_layers}) does not support \
                `{name}`: {why}"
            )),
            None => Ok(()),
        }
    }

    fn check_relative(&self) -> Result<(), ModelError> {
        let refuse = |why: String| Err(ModelError::Config(why));
        let Some(relative) = self.positions.relative() else {
            return Ok(());
        };
        let buckets = relative.num_buckets;
        // In both directions, half of the buckets are for later keys. Half of the buckets of a
        // direction are for one distance each.
        let [least, multiple] = if self.sees_later(0) { [4, 2] } else { [2, 1] };
        if !(least..=LARGEST).contains(&buckets) || !buckets.is_multiple_of(multiple) {
            let even = if multiple == 2 { " and even" } else { "" };
            return refuse(format!(
                "`num_buckets` of relative positions is {buckets}, but must be at least {least}{even}"
            ));
        }
        let exact = buckets / if self.bidirectional { 4 } else { 2 };
        let longest = relative.max_distance;
        if !(exact + 1..=LARGEST).contains(&longest) {
            return refuse(format!(
                "`max_distance` of relative positions is {longest}, but must be above {exact}, the \
                distances of {buckets} buckets that have a bucket of their own"
            ));
        }
        let others = [
            ("attention_soft_cap", self.attention_soft_cap.is_some()),
            ("attention_sinks", self.attention_sinks),
            ("latent", self.latent.is_some()),
            ("mtp_layers", self.mtp_layers > 0),
        ];
        match others.into_iter().find(|(_, is_set)| *is_set) {
            Some((name, _)) => refuse(format!("`positions` relative does not support `{name}`")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use megaburn_parallel::QkNormKind;
    use rstest::rstest;

    use super::*;
    use crate::{
        decoder::{NormPlacement, Positions, Relative},
        families::Family,
    };

    fn t5() -> DecoderConfig {
        Family::T5.template()
    }

    fn relative(num_buckets: usize, max_distance: usize) -> Positions {
        Positions::Relative(Relative {
            num_buckets,
            max_distance,
        })
    }

    #[rstest]
    #[case(t5(), None)]
    #[case(DecoderConfig { encoder_layers: 3, kv_heads: 2, ..t5() }, None)]
    #[case(DecoderConfig { positions: Positions::Learned, ..t5() }, None)]
    #[case(DecoderConfig { norm_placement: NormPlacement::Post, ..t5() }, None)]
    #[case(DecoderConfig { encoder_layers: 0, positions: relative(2, 2), ..t5() }, None)]
    #[case(DecoderConfig { encoder_layers: 4, ..t5() }, Some("leaves no layer to the decoder"))]
    #[case(DecoderConfig { bidirectional: true, ..t5() }, Some("does not support `bidirectional`"))]
    #[case(DecoderConfig { window: Some(4), ..t5() }, Some("does not support `window`"))]
    #[case(DecoderConfig { mtp_layers: 1, ..t5() }, Some("`positions` relative does not support `mtp_layers`"))]
    #[case(
        DecoderConfig { qk_norm: Some(QkNormKind::Head), ..t5() },
        Some("does not support `qk_norm`")
    )]
    #[case(
        DecoderConfig { block_order: BlockOrder::Parallel, ..t5() },
        Some("does not support `block_order`")
    )]
    #[case(DecoderConfig { positions: relative(3, 9), ..t5() }, Some("but must be at least 4 and even"))]
    #[case(
        DecoderConfig { positions: relative(8, 4), ..t5() },
        Some("`max_distance` of relative positions is 4, but must be above 4")
    )]
    #[case(
        DecoderConfig { attention_sinks: true, encoder_layers: 0, ..t5() },
        Some("`positions` relative does not support `attention_sinks`")
    )]
    fn only_parts_that_go_together_are_accepted(
        #[case] config: DecoderConfig,
        #[case] expected: Option<&str>,
    ) {
        match (config.validate(), expected) {
            (Ok(()), None) => {}
            (Err(error), Some(expected)) => {
                let error = error.to_string();
                assert!(error.contains(expected), "{error}");
            }
            (found, expected) => panic!("{found:?}, expected {expected:?}"),
        }
    }
}
