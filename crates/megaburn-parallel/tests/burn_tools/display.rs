//! How modules print themselves, as the summary of Burn's `Learner` shows them.

use burn::{
    module::Module,
    nn::{DropoutConfig, EmbeddingConfig, LinearConfig},
    prelude::Device,
};
use megaburn_collective::{Group, GroupOptions, run_threads};
use megaburn_mesh::Zigzag;
use megaburn_parallel::{
    Norm, NormConfig, ParallelDropout, ParallelDropoutConfig, ParallelError, ParallelLinear,
    ParallelLinearConfig, ParallelPlan, ReplicatedDropout, ReplicatedLinear,
    ReplicatedLinearConfig, Sharded, VocabParallelEmbedding, VocabParallelEmbeddingConfig,
    parallelize,
};

/// Layers that are built with a group.
#[derive(Module, Sharded, Debug)]
struct Built {
    embedding: VocabParallelEmbedding,
    norm: Norm,
    up: ParallelLinear,
    down: ParallelLinear,
    gate: ReplicatedLinear,
    dropout: ParallelDropout,
}

impl Built {
    fn new(group: &Group) -> Result<Self, ParallelError> {
        let device = Device::flex();
        let embedding = VocabParallelEmbeddingConfig::new(11, 4).with_pad_multiple(1);
        let up = ParallelLinearConfig::column(4, 8).with_name("up");
        let down = ParallelLinearConfig::row(8, 4).with_bias(false);
        let gate = ReplicatedLinearConfig::new(4, 2).with_name("gate");
        Ok(Self {
            embedding: embedding.with_name("embedding").init(group, &device)?,
            norm: NormConfig::rms(4).init(group, &device),
            up: up.init(group, &device)?,
            down: down.with_name("down").init(group, &device)?,
            gate: gate.init(group, &device)?,
            dropout: ParallelDropoutConfig::new(0.1, "dropout".into())
                .init(group, Zigzag::WHOLE)?,
        })
    }
}

const BUILT: &str = "\
Built {
  embedding: VocabParallelEmbedding {n_embedding: 11, d_model: 4, split: tokens, ranks: 2, params: 24}
  norm: Norm {kind: rms, d_model: 4, epsilon: 0.00001, split: none, ranks: 2, params: 4}
  up: ParallelLinear {d_input: 4, d_output: 8, bias: true, split: column, ranks: 2, params: 20}
  down: ParallelLinear {d_input: 8, d_output: 4, bias: false, split: row, ranks: 2, params: 16}
  gate: ReplicatedLinear {d_input: 4, d_output: 2, bias: false, ranks: 2, params: 8}
  dropout: ParallelDropout {prob: 0.1, ranks: 2}
  params: 72
}";

#[test]
fn layers_print_the_sizes_of_the_full_layer_and_their_split() {
    let texts = run_threads(2, GroupOptions::default(), |group| {
        Built::new(&group).map(|module| module.to_string())
    });
    for text in texts {
        assert_eq!(text.unwrap(), BUILT);
    }
}

/// Layers of Burn that a plan splits.
#[derive(Module, Sharded, Debug)]
struct Split {
    embedding: VocabParallelEmbedding,
    up: ParallelLinear,
    down: ParallelLinear,
    dropout: ReplicatedDropout,
}

const SPLIT: &str = "\
Split {
  embedding: VocabParallelEmbedding {n_embedding: 11, d_model: 4, split: none, ranks: 2, params: 44}
  up: ParallelLinear {d_input: 4, d_output: 8, bias: true, split: column, ranks: 2, params: 20}
  down: ParallelLinear {d_input: 8, d_output: 4, bias: true, split: row, ranks: 2, params: 20}
  dropout: ReplicatedDropout {prob: 0.2}
  params: 84
}";

#[test]
fn a_layer_without_a_pattern_prints_that_nothing_is_split() {
    let device = Device::flex();
    let module = Split {
        embedding: EmbeddingConfig::new(11, 4).init(&device).into(),
        up: LinearConfig::new(4, 8).init(&device).into(),
        down: LinearConfig::new(8, 4).init(&device).into(),
        dropout: DropoutConfig::new(0.2).init().into(),
    };
    let plan = ParallelPlan::new().column("up").row("down");
    let texts = run_threads(2, GroupOptions::default(), |group| {
        parallelize(module.clone(), &plan, &group).map(|module| module.to_string())
    });
    for text in texts {
        assert_eq!(text.unwrap(), SPLIT);
    }
}
