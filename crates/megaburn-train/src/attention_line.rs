//! The line of the console about attention: which kernels compute it, and why not faster ones.

use megaburn_kernels::{AUTO_LEN, AttentionKernel};
use megaburn_models::DecoderConfig;

use crate::config::TrainConfig;

/// The properties of a run that determine its attention kernels.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Facts {
    dtype: String,
    head_dims: [usize; 2],
    seq_len: usize,
    /// The length of the decoder's sequences, if the model has an encoder too.
    decoder_seq_len: Option<usize>,
    /// Whether rows may end with padding, which makes them packed sequences.
    pads: bool,
    /// Number of layers with sliding-window attention, and of all layers.
    windows: [usize; 2],
    window: usize,
    documents: bool,
    dropout: f64,
    soft_cap: Option<f64>,
    /// Whether self-attention has a relative bias.
    relative: bool,
}

impl Facts {
    pub(crate) fn of(config: &TrainConfig, model: &DecoderConfig) -> Self {
        let blocks = model.num_blocks();
        let windows = (0..blocks)
            .filter(|block| model.layer_window(*block).is_some())
            .count();
        Self {
            dtype: config.train.dtype.to_string(),
            head_dims: config.model.head_dims(),
            seq_len: config.data.seq_len,
            decoder_seq_len: model
                .is_encoder_decoder()
                .then_some(config.data.decoder_seq_len),
            pads: config.data.dataset.is_masked(),
            windows: [windows, blocks],
            window: model.window.unwrap_or(0),
            documents: config.data.documents,
            dropout: config.train.attention_dropout,
            soft_cap: model.attention_soft_cap,
            relative: model.positions.relative().is_some(),
        }
    }

    /// The lengths of sequences by their keys, from the shortest to the longest. Cross attention is
    /// between the two of an encoder and a decoder.
    fn lens(&self) -> Vec<(&'static str, usize)> {
        let decoder = self
            .decoder_seq_len
            .map(|len| ("data.decoder_seq_len", len));
        let mut lens = vec![("data.seq_len", self.seq_len)];
        lens.extend(decoder);
        lens.sort_by_key(|(_, len)| *len);
        lens
    }

    /// Why cuDNN is used in no layer; `None` if it is used in some.
    fn never(&self, kernel: AttentionKernel) -> Option<String> {
        let Self {
            windows: [windows, blocks],
            window,
            dropout,
            ..
        } = *self;
        let is_auto = kernel == AttentionKernel::Auto;
        let lens = self.lens();
        let [shortest, longest] = [lens[0], lens[lens.len() - 1]];
        let too_short = |(key, len): (&str, usize)| {
            format!("sequences as short as {key} = {len} (from {AUTO_LEN} on it is faster)")
        };
        if dropout > 0.0 {
            Some(format!(
                "attention dropout (train.attention_dropout is {dropout})"
            ))
        } else if let Some(cap) = self.soft_cap {
            Some(format!("a soft cap of attention scores (of {cap})"))
        } else if self.relative && self.decoder_seq_len.is_none() {
            Some("a relative bias of attention scores".into())
        } else if self.documents {
            Some("packed documents (data.documents is true)".into())
        } else if windows == blocks && blocks > 0 {
            Some(format!("a window (of {window} positions, in every layer)"))
        } else if self.relative && is_auto && shortest.1 < AUTO_LEN {
            let cross = too_short(shortest);
            Some(format!(
                "a relative bias of attention scores, nor for cross attention of {cross}"
            ))
        } else if is_auto && longest.1 < AUTO_LEN {
            Some(too_short(longest))
        } else {
            None
        }
    }

    /// The console's description of attention on GPUs. `cudnn` returns the cuDNN that was found, or
    /// why there is none.
    pub(crate) fn describe(
        &self,
        kernel: AttentionKernel,
        cudnn: impl FnOnce() -> Result<String, String>,
    ) -> String {
        match kernel {
            AttentionKernel::Cubecl => return "cubecl".into(),
            AttentionKernel::Reference => return self.describe_reference(),
            AttentionKernel::Auto | AttentionKernel::Cudnn => {}
        }
        let found = match cudnn() {
            Ok(found) => found,
            Err(why) => return format!("{kernel}: cubecl, without cudnn: {why}"),
        };
        let [windows, blocks] = self.windows;
        if let Some(what) = self.never(kernel) {
            return format!("{kernel}: cubecl, because cudnn {found} is not used for {what}");
        }
        let window = format!("a window (of {} positions)", self.window);
        let in_layers = format!("in {windows} of {blocks} layers");
        let [is_where, others, what] = match (self.relative, self.pads, windows) {
            (true, ..) => [
                " for cross attention in micro-batches without padding",
                " otherwise",
                "packed rows and a relative bias",
            ],
            (_, true, 0) => [
                " in micro-batches without padding",
                " otherwise",
                "packed rows",
            ],
            (_, true, _) => [
                " in micro-batches without padding",
                &format!(" otherwise, and {in_layers}"),
                &format!("packed rows and {window}"),
            ],
            (_, _, 0) => return format!("{kernel}: cudnn {found}"),
            _ => ["", &format!(" {in_layers}"), &window],
        };
        format!(
            "{kernel}: cudnn {found}{is_where}; cubecl{others}, because cudnn is not used for {what}"
        )
    }

    fn describe_reference(&self) -> String {
        let [keys, values] = self.head_dims;
        let heads = if keys == values {
            keys.to_string()
        } else {
            format!("{keys} (values {values})")
        };
        let kernel = AttentionKernel::Auto;
        let dtype = &self.dtype;
        match kernel.resolved(burn::tensor::DType::BF16, &self.head_dims) {
            AttentionKernel::Reference => format!(
                "reference: fused kernels support head sizes that are multiples of 8 up to 256, \
                but these are {heads}"
            ),
            _ if dtype == "f32" => {
                "reference: fused kernels support bf16 or f16, but train.dtype is f32".into()
            }
            _ => "reference".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn plain() -> Facts {
        let dtype = "bf16".into();
        let head_dims = [128; 2];
        let windows = [0, 4];
        Facts {
            dtype,
            head_dims,
            seq_len: 4096,
            windows,
            ..Facts::default()
        }
    }

    #[rstest]
    #[case(plain(), AttentionKernel::Auto, "auto: cudnn 9.19.0 (/p)")]
    #[case(plain(), AttentionKernel::Cubecl, "cubecl")]
    #[case(
        Facts { dropout: 0.1, ..plain() },
        AttentionKernel::Cudnn,
        "cudnn: cubecl, because cudnn 9.19.0 (/p) is not used for attention dropout (train.attention_dropout is 0.1)"
    )]
    #[case(
        Facts { documents: true, ..plain() },
        AttentionKernel::Auto,
        "auto: cubecl, because cudnn 9.19.0 (/p) is not used for packed documents (data.documents is true)"
    )]
    #[case(
        Facts { windows: [4, 4], window: 512, ..plain() },
        AttentionKernel::Auto,
        "auto: cubecl, because cudnn 9.19.0 (/p) is not used for a window (of 512 positions, in every layer)"
    )]
    #[case(
        Facts { windows: [3, 4], window: 512, ..plain() },
        AttentionKernel::Auto,
        "auto: cudnn 9.19.0 (/p); cubecl in 3 of 4 layers, because cudnn is not used for a window (of 512 positions)"
    )]
    #[case(
        Facts { seq_len: 512, ..plain() },
        AttentionKernel::Auto,
        "auto: cubecl, because cudnn 9.19.0 (/p) is not used for sequences as short as data.seq_len = 512 (from 1024 on it is faster)"
    )]
    #[case(Facts { seq_len: 512, ..plain() }, AttentionKernel::Cudnn, "cudnn: cudnn 9.19.0 (/p)")]
    #[case(
        Facts { relative: true, ..plain() },
        AttentionKernel::Auto,
        "auto: cubecl, because cudnn 9.19.0 (/p) is not used for a relative bias of attention scores"
    )]
    #[case(
        Facts { relative: true, pads: true, decoder_seq_len: Some(1024), ..plain() },
        AttentionKernel::Auto,
        "auto: cudnn 9.19.0 (/p) for cross attention in micro-batches without padding; cubecl otherwise, because cudnn is not used for packed rows and a relative bias"
    )]
    #[case(
        Facts { relative: true, pads: true, decoder_seq_len: Some(114), ..plain() },
        AttentionKernel::Auto,
        "auto: cubecl, because cudnn 9.19.0 (/p) is not used for a relative bias of attention scores, nor for cross attention of sequences as short as data.decoder_seq_len = 114 (from 1024 on it is faster)"
    )]
    #[case(
        Facts { pads: true, decoder_seq_len: Some(114), ..plain() },
        AttentionKernel::Auto,
        "auto: cudnn 9.19.0 (/p) in micro-batches without padding; cubecl otherwise, because cudnn is not used for packed rows"
    )]
    #[case(
        Facts { pads: true, seq_len: 512, decoder_seq_len: Some(114), ..plain() },
        AttentionKernel::Auto,
        "auto: cubecl, because cudnn 9.19.0 (/p) is not used for sequences as short as data.seq_len = 512 (from 1024 on it is faster)"
    )]
    #[case(
        Facts { pads: true, windows: [3, 4], window: 512, ..plain() },
        AttentionKernel::Cudnn,
        "cudnn: cudnn 9.19.0 (/p) in micro-batches without padding; cubecl otherwise, and in 3 of 4 layers, because cudnn is not used for packed rows and a window (of 512 positions)"
    )]
    #[case(
        Facts { dtype: "f32".into(), ..plain() },
        AttentionKernel::Reference,
        "reference: fused kernels support bf16 or f16, but train.dtype is f32"
    )]
    #[case(
        Facts { head_dims: [100, 64], ..plain() },
        AttentionKernel::Reference,
        "reference: fused kernels support head sizes that are multiples of 8 up to 256, but these are 100 (values 64)"
    )]
    fn the_kernel_and_the_reason_are_said(
        #[case] facts: Facts,
        #[case] kernel: AttentionKernel,
        #[case] expected: &str,
    ) {
        assert_eq!(
            facts.describe(kernel, || Ok("9.19.0 (/p)".into())),
            expected
        );
    }

    #[test]
    fn a_missing_cudnn_is_said_with_its_reason() {
        let line = plain().describe(AttentionKernel::Auto, || Err("9.14.0 is too old".into()));
        assert_eq!(line, "auto: cubecl, without cudnn: 9.14.0 is too old");
    }
}
