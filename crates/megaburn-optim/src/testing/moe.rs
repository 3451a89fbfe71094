//! A module of three blocks, two of which have experts, as the ranks of a layout hold it.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use burn::{
    Tensor,
    module::{Module, Param},
    tensor::{Device, TensorData},
};
use megaburn_autograd::MainGrad;
use megaburn_collective::ProcessGroups;
use megaburn_kernels::{LinearOptions, linear};
use megaburn_mesh::{Axis, FusedPart, Layout, ParamSpec, ShardPlan, ShardSpec};

use super::cut;

/// Values by path, of full parameters or of a rank's shards.
pub(crate) type Values = BTreeMap<String, Vec<f32>>;

type Tensors<const D: usize> = Vec<(String, Tensor<D>)>;

const NUM_BLOCKS: usize = 3;
pub(crate) const NUM_EXPERTS: usize = 4;

/// What a rank does not hold is `None`: experts of other ranks and blocks of other pipeline stages.
/// The first block has no experts; with two stages, it is the first stage.
#[derive(Module, Debug)]
pub(crate) struct Moe {
    blocks: Vec<Option<Block>>,
}

#[derive(Module, Debug)]
struct Block {
    attention: Param<Tensor<2>>,
    experts: Vec<Option<Expert>>,
    norm: Param<Tensor<1>>,
}

/// `up` is split by columns and `down` by rows; every rank of etp has the full bias.
#[derive(Module, Debug)]
struct Expert {
    up: Param<Tensor<2>>,
    down: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
}

/// The parameters and shards of a rank.
pub(crate) fn plan_of(groups: &ProcessGroups) -> ShardPlan {
    let coords = groups.coords;
    let layout = groups.layout();
    let split = |shape: &[usize], dim: usize, axis| {
        let rank = coords.get(axis);
        let ranks = layout.degree(axis);
        ShardSpec::split(shape, dim, &[FusedPart::new(shape[dim])], axis, rank, ranks)
            .expect("divides")
    };
    let whole = |axis| ShardSpec::whole(&[6], axis, coords.get(axis), layout.degree(axis));
    let mut plan = ShardPlan::new();
    let mut insert = |path: String, shard| plan.insert(path, ParamSpec { shard }).expect("new");
    let mine = NUM_EXPERTS / layout.ep;
    for block in (0..NUM_BLOCKS).filter(|&block| layout.pp == 1 || block.min(1) == coords.pp) {
        insert(
            format!("blocks.{block}.attention"),
            split(&[6, 8], 1, Axis::Tp),
        );
        insert(format!("blocks.{block}.norm"), whole(Axis::Tp));
        for expert in (0..NUM_EXPERTS).filter(|e| block > 0 && e / mine == coords.ep) {
            let path = |name: &str| format!("blocks.{block}.experts.{expert}.{name}");
            insert(path("up"), split(&[6, 8], 1, Axis::Etp));
            insert(path("down"), split(&[8, 6], 0, Axis::Etp));
            insert(path("bias"), whole(Axis::Etp));
        }
    }
    plan
}

pub(crate) fn experts_of(plan: &ShardPlan) -> Vec<String> {
    let experts = plan.iter().filter(|(_, spec)| spec.is_expert());
    experts.map(|(path, _)| path.to_string()).collect()
}

/// The number of ranks over which the gradients of a parameter are summed.
pub(crate) fn num_replicas(layout: &Layout, spec: &ParamSpec) -> usize {
    if spec.is_expert() {
        layout.degree(Axis::Edp)
    } else {
        layout.dp * layout.cp
    }
}

/// Pseudo-random numbers whose sums and sums of squares are exact in any order of addition.
pub(crate) fn draw(of: impl Hash, len: usize) -> Vec<f32> {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    let mut state = hasher.finish();
    let next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((state >> 33) % 17) as f32 / 8.0 - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}

impl Moe {
    /// This rank's part of `whole`.
    pub(crate) fn new(plan: &ShardPlan, whole: &Values, device: &Device) -> Self {
        let data = |path: &str| {
            let shard = &plan.get(path)?.shard;
            Some(TensorData::new(
                cut(shard, &whole[path]),
                shard.local_shape(),
            ))
        };
        let expert = |path: String| {
            let of = |name: &str| data(&format!("{path}.{name}"));
            Some(Expert {
                up: Param::from_data(of("up")?, device),
                down: Param::from_data(of("down")?, device),
                bias: Param::from_data(of("bias")?, device),
            })
        };
        let block = |block: usize| {
            let path = |name: &str| format!("blocks.{block}.{name}");
            Some(Block {
                attention: Param::from_data(data(&path("attention"))?, device),
                experts: (0..NUM_EXPERTS)
                    .map(|e| expert(path(&format!("experts.{e}"))))
                    .collect(),
                norm: Param::from_data(data(&path("norm"))?, device),
            })
        };
        Self {
            blocks: (0..NUM_BLOCKS).map(block).collect(),
        }
    }

    /// The parameters in the order in which layers use them.
    fn params(&self) -> (Tensors<2>, Tensors<1>) {
        let mut matrices = Vec::new();
        let mut vectors = Vec::new();
        for (b, block) in self.blocks.iter().enumerate() {
            let Some(block) = block else { continue };
            matrices.push((format!("blocks.{b}.attention"), block.attention.val()));
            vectors.push((format!("blocks.{b}.norm"), block.norm.val()));
            for (e, expert) in block.experts.iter().enumerate() {
                let Some(expert) = expert else { continue };
                let path = |name: &str| format!("blocks.{b}.experts.{e}.{name}");
                matrices.push((path("up"), expert.up.val()));
                matrices.push((path("down"), expert.down.val()));
                vectors.push((path("bias"), expert.bias.val()));
            }
        }
        (matrices, vectors)
    }

    pub(crate) fn matrices(&self) -> Vec<String> {
        self.params().0.into_iter().map(|(path, _)| path).collect()
    }

    /// A loss with these gradients. Matrices in `layers` are used by a layer that accumulates the
    /// gradient.
    pub(crate) fn loss(
        &self,
        grads: &Values,
        layers: &BTreeMap<String, MainGrad>,
        device: &Device,
    ) -> Tensor<1> {
        let grad = |path: &str| Tensor::<1>::from_floats(grads[path].as_slice(), device);
        let (matrices, vectors) = self.params();
        let matrices = matrices.into_iter().map(|(path, matrix)| {
            let grad = grad(&path).reshape(matrix.dims());
            let Some(main_grad) = layers.get(&path) else {
                return (matrix * grad).sum();
            };
            let options = LinearOptions {
                main_grad: Some(main_grad.clone()),
                ..Default::default()
            };
            let one = Tensor::<2>::eye(matrix.dims()[0], device).require_grad();
            (linear(one, matrix, None, options) * grad).sum()
        });
        let vectors = vectors
            .into_iter()
            .map(|(path, vector)| (vector * grad(&path)).sum());
        matrices
            .chain(vectors)
            .reduce(|a, b| a + b)
            .expect("a rank has at least one parameter")
    }

    /// The values of all parameters, none of which may be sharded.
    pub(crate) fn values(&self) -> Values {
        let (matrices, vectors) = self.params();
        let matrices = matrices
            .into_iter()
            .map(|(path, x)| (path, super::values(x.inner())));
        matrices
            .chain(
                vectors
                    .into_iter()
                    .map(|(path, x)| (path, super::values(x.inner()))),
            )
            .collect()
    }
}
