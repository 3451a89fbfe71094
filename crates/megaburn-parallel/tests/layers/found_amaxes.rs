//! Blocks whose norms find the largest magnitudes that quantised layers need: the same bits as if the
//! layers found them.

use burn::{
    module::Module,
    tensor::{Tensor, TensorData},
};
use megaburn_collective::Group;
use megaburn_kernels::{FoundAmax, QuantizationRecipe, Scaling, SmallFloat};
use megaburn_parallel::{
    Attention, LinearPrecision, Mlp, MlpConfig, Norm, NormConfig, NormKind, Residual,
    SelfAttentionConfig,
};
use rstest::rstest;

use crate::support::{
    assert_bits, autodiff, floats, fresh_seed, leaf, normal, on_ranks, param_grads,
};

/// A pre-norm block, and the norm of the block after it.
#[derive(Module, Debug)]
struct Block {
    norms: Vec<Norm>,
    attention: Attention,
    mlp: Mlp,
}

impl Block {
    fn new(kind: NormKind, sequence_parallel: bool, recompute: bool, group: &Group) -> Self {
        let precision = LinearPrecision::new(QuantizationRecipe {
            scaling: Scaling::Tensor,
            forward: SmallFloat::E4m3,
            gradients: SmallFloat::E5m2,
            power_of_two_scales: false,
        });
        let norm = NormConfig::new(12, kind)
            .with_sequence_parallel(sequence_parallel)
            .with_recompute(recompute);
        let attention = SelfAttentionConfig::new(12, 4, 2, 6)
            .with_output_bias(true)
            .with_sequence_parallel(sequence_parallel)
            .with_precision(Some(precision))
            .with_name("attention");
        let mlp = MlpConfig::gated(12, 20)
            .with_sequence_parallel(sequence_parallel)
            .with_recompute(recompute)
            .with_precision(Some(precision))
            .with_name("mlp");
        Self {
            norms: (0..3).map(|_| norm.init(group, &autodiff())).collect(),
            attention: attention.init(group, &autodiff()).unwrap(),
            mlp: mlp.init(group, &autodiff()).unwrap(),
        }
    }

    /// The result, and where norms put the largest magnitudes of gradients if they find them.
    fn forward(&self, x: Tensor<3>, finds: bool) -> (Tensor<3>, [Option<FoundAmax>; 2]) {
        let of = |needs: bool| (finds && needs).then(FoundAmax::default);
        let [of_attention, of_mlp] = [
            of(self.attention.needs_gradient_amax()),
            of(self.mlp.needs_gradient_amax()),
        ];
        let mut stream = Residual::from(x.clone());
        stream += x;
        let input =
            stream.normed_observed(&self.norms[0], finds && self.attention.needs_input_amax());
        let input = input.with_gradient_amax(of_attention.clone());
        let attended = self.attention.forward(input, None);
        stream.add_observed(attended, of_attention.clone());
        let input = stream.normed_observed(&self.norms[1], finds && self.mlp.needs_input_amax());
        let fed = self.mlp.forward(input.with_gradient_amax(of_mlp.clone()));
        stream.add_observed(fed, of_mlp.clone());
        let y = stream.normed(&self.norms[2]).into_tensor();
        (y + stream.sum(), [of_attention, of_mlp])
    }
}

#[rstest]
fn what_norms_find_changes_no_bit(
    #[values((1, false), (2, false), (2, true))] (ranks, sequence_parallel): (usize, bool),
    #[values(NormKind::Rms, NormKind::Layer)] kind: NormKind,
    #[values(false, true)] recompute: bool,
) {
    let seed = fresh_seed();
    on_ranks(ranks, seed, |group| {
        let block = Block::new(kind, sequence_parallel, recompute, &group);
        let seq = if sequence_parallel { 6 / ranks } else { 6 };
        let name = if sequence_parallel { group.rank() } else { 0 };
        let data = |what: &str| normal(&[seq, 3, 12], seed, &format!("{what} {name}"));
        let run = |finds: bool| -> Vec<(String, TensorData)> {
            let x = leaf::<3>(data("input"));
            let (y, found) = block.forward(x.clone(), finds);
            let weight = Tensor::from_data(data("weight"), &autodiff());
            let grads = (y.clone() * weight).sum().backward();
            let is_found = finds && !(sequence_parallel && ranks > 1);
            for found in found {
                assert_eq!(found.is_some(), is_found);
                assert!(
                    found.is_none_or(|found| found.value().is_none()),
                    "not taken"
                );
            }
            let mut all = param_grads(&block, &grads);
            all.push(("y".into(), y.into_data()));
            all.push(("dx".into(), x.grad(&grads).unwrap().into_data()));
            all
        };
        for ((what, found), (_, expected)) in run(true).into_iter().zip(run(false)) {
            assert_bits(&what, &found, &expected);
        }
    });
}

/// The largest magnitude of the gradient of a term that is added to the stream, if one norm reads it; a
/// copy of the stream has a second reader.
#[rstest]
#[case(false)]
#[case(true)]
fn a_norm_finds_the_gradient_of_the_term_that_it_adds(#[case] is_copied: bool) {
    let norm = NormConfig::rms(7).init(&Group::single(0), &autodiff());
    let [x, term] = ["x", "term"].map(|what| leaf::<3>(normal(&[4, 2, 7], 5, what)));
    let found = FoundAmax::default();
    let mut stream = Residual::from(x);
    stream.add_observed(term.clone(), Some(found.clone()));
    let copy = is_copied.then(|| stream.clone());
    let read = |stream: Residual| stream.normed(&norm).into_tensor().exp() + stream.sum();
    let y = read(stream);
    let y = match copy {
        Some(copy) => y + read(copy),
        None => y,
    };
    let gradient = term.grad(&y.sum().backward()).unwrap();
    let largest = floats(&gradient.abs().max().into_data());
    let value = found.value().map(|amax| floats(&amax.into_data()));
    assert_eq!(value, (!is_copied).then_some(largest));
}
