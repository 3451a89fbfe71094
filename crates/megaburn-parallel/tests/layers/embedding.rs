//! `VocabParallelEmbedding` under all layouts: as input, as output, and tied.

use burn::{
    module::Module,
    prelude::Int,
    tensor::{Tensor, TensorData},
};
use megaburn_collective::Group;
use megaburn_parallel::{
    CrossEntropy, CrossEntropyConfig, ParallelError, PlanBuilder, Sharded, VocabParallelBias,
    VocabParallelBiasConfig, VocabParallelEmbedding, VocabParallelEmbeddingConfig,
};
use rstest::rstest;

use crate::{
    support::{assert_close, autodiff, floats, fresh_seed, leaf, normal, on_ranks, tokens},
    trial::{End, Setting, assert_same_under_layout, stream},
};

/// Ids that contain every token of the vocabulary at least once, so that each rank's rows are
/// looked up.
fn every_token([seq, batch]: [usize; 2], vocab: usize) -> Tensor<2, Int> {
    assert!(seq * batch >= vocab && !vocab.is_multiple_of(7));
    let ids = (0..seq * batch).map(|i| (i * 7 % vocab) as i64).collect();
    Tensor::from_data(TensorData::new(ids, [seq, batch]), &autodiff())
}

fn config(vocab: usize, d_model: usize, pad_multiple: usize) -> VocabParallelEmbeddingConfig {
    VocabParallelEmbeddingConfig::new(vocab, d_model)
        .with_pad_multiple(pad_multiple)
        .with_name("embedding")
}

#[rstest]
fn vectors_are_found_on_whichever_rank(
    #[values(1, 2, 3, 4, 8)] ranks: usize,
    #[values(true, false)] sequence_parallel: bool,
    #[values((16, 1), (13, 1), (5, 8), (30, 16))] (vocab, pad_multiple): (usize, usize),
) {
    // With 13 tokens on 4 ranks some ranks hold one row less; with 5 tokens padded to 8 some hold
    // none.
    let [seq, batch, d_model] = [8 * ranks, 4, 3];
    let config = config(vocab, d_model, pad_multiple).with_sequence_parallel(sequence_parallel);
    let ids = every_token([seq, batch], vocab);
    let end = stream(sequence_parallel);
    let shapes = [[seq, batch, d_model]; 2];
    let setting = Setting {
        ranks,
        seed: fresh_seed(),
        shapes,
        ends: [end.clone(), end],
    };
    assert_same_under_layout(
        &setting,
        |group| config.init(group, &autodiff()),
        |layer: &VocabParallelEmbedding, x| layer.forward(ids.clone()) + x,
    );
}

#[rstest]
fn logits_are_products_with_every_vector(
    #[values(1, 2, 3, 4, 8)] ranks: usize,
    #[values(true, false)] sequence_parallel: bool,
    #[values((16, 1), (13, 1), (5, 8))] (vocab, pad_multiple): (usize, usize),
) {
    let [seq, batch, d_model] = [ranks, 2, 5];
    let config = config(vocab, d_model, pad_multiple).with_sequence_parallel(sequence_parallel);
    let shapes = [[seq, batch, d_model], [seq, batch, vocab]];
    let ends = [stream(sequence_parallel), End::Padded(pad_multiple)];
    let setting = Setting {
        ranks,
        seed: fresh_seed(),
        shapes,
        ends,
    };
    assert_same_under_layout(
        &setting,
        |group| config.init(group, &autodiff()),
        |layer: &VocabParallelEmbedding, x| layer.logits(x),
    );
}

/// An output projection with a bias for each token, and the loss of its logits.
#[derive(Module, Debug)]
struct Biased {
    head: VocabParallelEmbedding,
    bias: VocabParallelBias,
    #[module(skip)]
    loss: CrossEntropy,
}

impl Sharded for Biased {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("head", &self.head);
        plan.child("bias", &self.bias);
    }
}

#[rstest]
fn a_bias_of_the_vocabulary_is_split_as_the_logits_are(
    #[values(1, 2, 3, 4, 8)] ranks: usize,
    #[values(true, false)] sequence_parallel: bool,
    #[values((16, 1), (13, 1), (5, 8))] (vocab, pad_multiple): (usize, usize),
) {
    let seed = fresh_seed();
    let [seq, batch, d_model] = [2 * ranks, 3, 5];
    let config = config(vocab, d_model, pad_multiple).with_sequence_parallel(sequence_parallel);
    let of_bias = VocabParallelBiasConfig::new(vocab).with_pad_multiple(pad_multiple);
    let labels = tokens([seq, batch], vocab, seed, "labels");
    let labels = Tensor::<2, Int>::from_data(labels, &autodiff());
    let setting = Setting {
        ranks,
        seed,
        shapes: [[seq, batch, d_model], [seq, batch, 1]],
        ends: [stream(sequence_parallel), End::Whole],
    };
    let build = |group: &Group| {
        Ok::<_, ParallelError>(Biased {
            head: config.init(group, &autodiff())?,
            bias: of_bias.init(group, &autodiff())?,
            loss: CrossEntropyConfig::new(vocab).init(group)?,
        })
    };
    // `join` rejects an element of the padding whose value or gradient is not zero.
    assert_same_under_layout(&setting, build, |layer: &Biased, x| {
        let logits = layer.head.logits_with_bias(x, &layer.bias);
        layer.loss.forward(logits, labels.clone()).unsqueeze_dim(2)
    });
}

/// A tied matrix, as input and output, with the loss on top.
#[derive(Module, Debug)]
struct Tied {
    embedding: VocabParallelEmbedding,
    #[module(skip)]
    loss: CrossEntropy,
}

impl Tied {
    fn new(
        config: &VocabParallelEmbeddingConfig,
        smoothing: f64,
        group: &Group,
    ) -> Result<Self, ParallelError> {
        let loss = CrossEntropyConfig::new(config.n_embedding).with_label_smoothing(smoothing);
        let embedding = config.init(group, &autodiff())?;
        Ok(Self {
            embedding,
            loss: loss.init(group)?,
        })
    }

    /// The losses as `[seq, batch, 1]`.
    fn forward(&self, ids: &Tensor<2, Int>, labels: &Tensor<2, Int>, x: Tensor<3>) -> Tensor<3> {
        let logits = self
            .embedding
            .logits(self.embedding.forward(ids.clone()) + x);
        self.loss.forward(logits, labels.clone()).unsqueeze_dim(2)
    }

    /// The losses without holding all logits.
    fn fused(&self, ids: &Tensor<2, Int>, labels: &Tensor<2, Int>, x: Tensor<3>) -> Tensor<3> {
        let x = self.embedding.forward(ids.clone()) + x;
        self.embedding
            .losses(x, labels.clone(), &self.loss)
            .unsqueeze_dim(2)
    }
}

impl Sharded for Tied {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("embedding", &self.embedding);
    }
}

#[rstest]
fn a_tied_matrix_gets_the_gradients_of_both_uses(
    #[values(1, 2, 3, 4, 8)] ranks: usize,
    #[values(true, false)] sequence_parallel: bool,
    #[values((16, 1), (13, 1), (5, 8))] (vocab, pad_multiple): (usize, usize),
    #[values(0.0, 0.1)] smoothing: f64,
) {
    let seed = fresh_seed();
    let [seq, batch, d_model] = [8 * ranks, 2, 5];
    let config = config(vocab, d_model, pad_multiple).with_sequence_parallel(sequence_parallel);
    let ids = every_token([seq, batch], vocab);
    let labels = tokens([seq, batch], vocab, seed, "labels");
    let labels = Tensor::<2, Int>::from_data(labels, &autodiff());
    let shapes = [[seq, batch, d_model], [seq, batch, 1]];
    let ends = [stream(sequence_parallel), End::Whole];
    // `join` rejects a padding row whose value or gradient is not zero.
    let setting = Setting {
        ranks,
        seed,
        shapes,
        ends,
    };
    let build = |group: &Group| Tied::new(&config, smoothing, group);
    let forward = |tied: &Tied, x| tied.forward(&ids, &labels, x);
    assert_same_under_layout(&setting, build, forward);
    // The fused loss gives the same results.
    let fused = |tied: &Tied, x| tied.fused(&ids, &labels, x);
    let found = setting.run(build, fused);
    let expected = setting.run(build, forward);
    assert_close("losses", &found.output, &expected.output, 1e-6);
    assert_close(
        "input gradient",
        &found.input_grad,
        &expected.input_grad,
        3e-6,
    );
    for (path, grad) in &found.grads {
        assert_close(path, grad, &expected.grads[path], 3e-6);
    }
}

#[test]
fn the_padding_changes_neither_weights_nor_loss() {
    let seed = fresh_seed();
    let losses = |ranks, pad_multiple| {
        let config = config(13, 4, pad_multiple);
        let ids = every_token([8, 2], 13);
        let x = normal(&[8, 2, 4], seed, "x");
        let run = |group: Group| {
            let tied = Tied::new(&config, 0.1, &group).unwrap();
            tied.forward(&ids, &ids, leaf(x.clone())).into_data()
        };
        floats(&on_ranks(ranks, seed, run)[0])
    };
    let plain = losses(1, 1);
    for (ranks, pad_multiple) in [(1, 128), (2, 1), (2, 64), (4, 3), (8, 128)] {
        for (a, b) in losses(ranks, pad_multiple).iter().zip(&plain) {
            assert!(
                (a - b).abs() < 2e-6,
                "{ranks} ranks, multiple {pad_multiple}: {a} {b}"
            );
        }
    }
}

#[test]
fn the_padding_is_megatrons() {
    for (vocab, ranks, rows) in [(260, 2, 256), (50257, 1, 50304), (50257, 8, 6400)] {
        let dims = on_ranks(ranks, 0, |group| {
            let layer = VocabParallelEmbeddingConfig::new(vocab, 1)
                .with_name("embedding")
                .init(&group, &autodiff())
                .unwrap();
            assert_eq!(layer.n_embedding(), vocab);
            layer.weight.dims()
        });
        assert!(dims.iter().all(|dims| *dims == [rows, 1]), "{dims:?}");
    }
}
