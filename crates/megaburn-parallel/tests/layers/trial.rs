//! Runs a layer forward and backward under a layout, and gathers everything into full tensors.

use std::collections::BTreeMap;

use burn::{
    module::Module,
    tensor::{Tensor, TensorData},
};
use megaburn_collective::Group;
use megaburn_mesh::{Axis, FusedPart, ShardSpec, pad_vocab};
use megaburn_parallel::{ParallelError, Sharded, read_params, shard_plan};

use crate::support::{
    assert_bits, assert_close, autodiff, cut, join, leaf, normal, on_ranks, param_grads,
};

/// How ranks hold a tensor `[seq, batch, features]` at the input or output of a layer.
#[derive(Clone, Debug)]
pub(crate) enum End {
    /// The full tensor.
    Whole,
    /// A shard of the sequence.
    Sequence,
    /// A shard of the features, which consist of these parts.
    Features(Vec<FusedPart>),
    /// A shard of the features, padded to a multiple of this times the number of ranks.
    Padded(usize),
}

impl End {
    pub(crate) fn spec(&self, shape: [usize; 3], rank: usize, ranks: usize) -> ShardSpec {
        match self {
            Self::Whole => ShardSpec::whole(&shape, Axis::Tp, rank, ranks),
            Self::Sequence => ShardSpec::split(
                &shape,
                0,
                &[FusedPart::new(shape[0])],
                Axis::Tp,
                rank,
                ranks,
            )
            .unwrap(),
            Self::Features(parts) => {
                ShardSpec::split(&shape, 2, parts, Axis::Tp, rank, ranks).unwrap()
            }
            Self::Padded(multiple) => {
                let padded = pad_vocab(shape[2], *multiple, ranks);
                ShardSpec::split_padded(&shape, 2, padded, Axis::Tp, rank, ranks).unwrap()
            }
        }
    }
}

/// The input or output of a region that may be sequence-parallel.
pub(crate) fn stream(sequence_parallel: bool) -> End {
    if sequence_parallel {
        End::Sequence
    } else {
        End::Whole
    }
}

/// The results of a layer, as full tensors.
#[derive(Debug)]
pub(crate) struct Trial {
    pub(crate) start: BTreeMap<String, TensorData>,
    pub(crate) output: TensorData,
    pub(crate) input_grad: TensorData,
    pub(crate) grads: BTreeMap<String, TensorData>,
}

/// The ranks, seed and shapes of a run.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) ranks: usize,
    pub(crate) seed: u64,
    /// Global shapes of input and output.
    pub(crate) shapes: [[usize; 3]; 2],
    pub(crate) ends: [End; 2],
}

impl Setting {
    /// Builds the layer on every rank, feeds it random input, and differentiates the inner product
    /// of its output with a random tensor.
    pub(crate) fn run<M: Module + Sharded>(
        &self,
        build: impl Fn(&Group) -> Result<M, ParallelError> + Sync,
        forward: impl Fn(&M, Tensor<3>) -> Tensor<3> + Sync,
    ) -> Trial {
        let Self {
            ranks,
            seed,
            shapes: [input, output],
            ends: [at_input, at_output],
        } = self;
        let ranks = on_ranks(*ranks, *seed, |group| {
            let spec = |end: &End, shape| end.spec(shape, group.rank(), group.size());
            let input_spec = spec(at_input, *input);
            let output_spec = spec(at_output, *output);
            let module = build(&group).unwrap();
            let plan = shard_plan(&module).unwrap();
            let shard = |(path, data): (String, TensorData)| {
                let spec = plan.get(&path).unwrap().shard.clone();
                (path, (spec, data))
            };
            let start: Vec<_> = read_params(&module).into_iter().map(shard).collect();
            let x = leaf::<3>(cut(&normal(input, *seed, "input"), &input_spec, false));
            let y = forward(&module, x.clone());
            // A full tensor carries the same gradient on all ranks. If several ranks hold the same
            // shard, only one of them carries the gradient.
            let owned = matches!(at_output, End::Features(_));
            let weight = cut(&normal(output, *seed, "weight"), &output_spec, owned);
            let grads = (y.clone() * Tensor::from_data(weight, &autodiff()))
                .sum()
                .backward();
            let input_grad = x.grad(&grads).unwrap().into_data();
            let grads: Vec<_> = param_grads(&module, &grads)
                .into_iter()
                .map(shard)
                .collect();
            (
                (output_spec, y.into_data()),
                (input_spec, input_grad),
                start,
                grads,
            )
        });
        let by_path = |pick: &dyn Fn(usize) -> Vec<(String, (ShardSpec, TensorData))>| {
            let mut shards: BTreeMap<String, Vec<_>> = BTreeMap::new();
            for rank in 0..ranks.len() {
                for (path, shard) in pick(rank) {
                    shards.entry(path).or_default().push(shard);
                }
            }
            shards
                .into_iter()
                .map(|(path, all)| (path.clone(), join(&path, &all)))
                .collect()
        };
        let all = |pick: &dyn Fn(usize) -> (ShardSpec, TensorData)| -> Vec<_> {
            (0..ranks.len()).map(pick).collect()
        };
        Trial {
            start: by_path(&|rank| ranks[rank].2.clone()),
            output: join("output", &all(&|rank| ranks[rank].0.clone())),
            input_grad: join("input gradient", &all(&|rank| ranks[rank].1.clone())),
            grads: by_path(&|rank| ranks[rank].3.clone()),
        }
    }
}

/// Asserts that a layer gives the same results on `setting.ranks` ranks as on one.
pub(crate) fn assert_same_under_layout<M: Module + Sharded>(
    setting: &Setting,
    build: impl Fn(&Group) -> Result<M, ParallelError> + Sync,
    forward: impl Fn(&M, Tensor<3>) -> Tensor<3> + Sync,
) {
    let one = Setting {
        ranks: 1,
        ..setting.clone()
    }
    .run(&build, &forward);
    let many = setting.run(&build, &forward);
    assert_eq!(
        one.start.keys().collect::<Vec<_>>(),
        many.start.keys().collect::<Vec<_>>()
    );
    assert!(!one.start.is_empty());
    for (path, start) in &one.start {
        assert_bits(path, &many.start[path], start);
        assert_close(
            &format!("gradient of {path}"),
            &many.grads[path],
            &one.grads[path],
            3e-6,
        );
    }
    assert_close("output", &many.output, &one.output, 3e-6);
    assert_close("input gradient", &many.input_grad, &one.input_grad, 3e-6);
}
