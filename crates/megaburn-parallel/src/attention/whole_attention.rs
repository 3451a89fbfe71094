//! Attention to full sequences on one rank, whose output a recomputed region may save.

use burn::tensor::Tensor;
use megaburn_autograd::CheckpointOperands;
use megaburn_kernels::{
    AttentionOptions, PartialAttention, attention, biased_attention, biased_partial_attention,
    biased_partial_attention_gradients, partial_attention, partial_attention_gradients,
};

use crate::selective_save::SelectiveSave;

/// [`attention`] or, with a bias by distance, [`biased_attention`]. With `saved`, the output is
/// [saved](SelectiveSave) across a recompute.
///
/// # Shapes
/// As [`biased_attention`]
pub(super) fn whole_attention(
    [q, k, v]: [Tensor<4>; 3],
    bias: Option<Tensor<2>>,
    options: AttentionOptions,
    saved: Option<&SelectiveSave>,
) -> Tensor<3> {
    match (saved, bias) {
        (Some(saved), bias) => saved_attention([q, k, v], bias, options, saved),
        (None, Some(bias)) => biased_attention(q, k, v, bias, options),
        (None, None) => attention(q, k, v, options),
    }
}

fn saved_attention(
    qkv: [Tensor<4>; 3],
    bias: Option<Tensor<2>>,
    options: AttentionOptions,
    saved: &SelectiveSave,
) -> Tensor<3> {
    let device = qkv[0].device();
    let plain = qkv.clone().map(untracked);
    let plain_bias = bias.clone().map(untracked);
    let PartialAttention { out, lse } = saved.output(|| {
        let [q, k, v] = plain.clone();
        match &plain_bias {
            Some(bias) => biased_partial_attention(q, k, v, bias.clone(), options.clone()),
            None => partial_attention(q, k, v, options.clone()),
        }
    });
    let [s_q, b, hq, d_v] = out.dims();
    let joined = out.clone().reshape([s_q, b, hq * d_v]);
    if !device.is_autodiff() {
        return joined;
    }
    let mut operands = CheckpointOperands::new(&device);
    qkv.into_iter().for_each(|x| operands.add(x));
    bias.into_iter().for_each(|x| operands.add(x));
    let [attended] = operands.results([Tensor::from_inner(joined)], move |[dout]| {
        let dout = dout.expect("the result has a gradient");
        let dout = dout.reshape([s_q, b, hq, d_v]);
        let whole = PartialAttention { out, lse };
        let (gradients, of_bias) = match plain_bias {
            Some(bias) => {
                let (gradients, of_bias) =
                    biased_partial_attention_gradients(plain, bias, whole, dout, options);
                (gradients, Some(of_bias))
            }
            None => {
                let gradients = partial_attention_gradients(plain, whole, dout, options);
                (gradients, None)
            }
        };
        let rows = gradients.map(|gradient| Some(gradient.flatten(0, 2)));
        rows.into_iter().chain(of_bias.map(Some)).collect()
    });
    attended
}

fn untracked<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if x.device().is_autodiff() {
        x.inner()
    } else {
        x
    }
}
