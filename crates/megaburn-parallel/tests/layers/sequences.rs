//! Runs a layer whose sequences are shared by ranks, and compares it with one rank.

use std::{collections::BTreeMap, fmt::Debug};

use burn::{
    module::Module,
    tensor::{Tensor, TensorData},
};
use megaburn_collective::{Group, ProcessGroups};
use megaburn_kernels::{RopeConfig, RopeTable};
use megaburn_mesh::{Layout, PackedRows, ShardSpec, Zigzag};
use megaburn_parallel::{
    BatchContext, ContextComm, ContextParallel, PackedDocuments, ParallelError, Sharded,
    TokenBlock, shard_plan,
};

use crate::support::{
    assert_close, autodiff, fresh_seed, join, leaf, normal, on_ranks, param_grads,
};

/// A layer that maps the residual stream to the residual stream, and its input.
pub(crate) trait Subject: Debug + Sync {
    type Layer: Module + Sharded;

    /// The global `[s, b, hidden]`.
    fn shape(&self) -> [usize; 3];

    fn rope(&self) -> RopeConfig;

    fn documents(&self) -> Option<PackedRows>;

    /// Whether the context-parallel ranks are given with the tokens instead of to the layer.
    fn told_with_tokens(&self) -> bool;

    fn layer(
        &self,
        groups: &ProcessGroups,
        comm: ContextComm,
    ) -> Result<Self::Layer, ParallelError>;

    fn forward(
        layer: &Self::Layer,
        x: Tensor<3>,
        rope: &RopeTable,
        batch: &BatchContext,
    ) -> Tensor<3>;
}

/// The tokens of each row that a rank holds, and their positions.
fn held(case: &impl Subject, zigzag: Zigzag) -> Vec<[Vec<usize>; 2]> {
    let [s, b, _] = case.shape();
    let documents = case.documents();
    let row = |row| match &documents {
        None => [0; 2].map(|_| zigzag.positions(s).collect()),
        Some(all) => [
            all.tokens(row, zigzag).collect(),
            all.positions(row, zigzag).collect(),
        ],
    };
    (0..b).map(row).collect()
}

/// The `held` tokens of `[s, b, ..]`, and of these the shard of tensor-parallel rank `tp` of `tps`.
fn rows(whole: &TensorData, held: &[[Vec<usize>; 2]], [tp, tps]: [usize; 2]) -> TensorData {
    let shape = whole.shape().to_vec();
    let b = shape[1];
    let width = shape[2];
    let values: Vec<f32> = whole.clone().try_to_vec().unwrap();
    let len = held[0][0].len() / tps;
    let places = (tp * len..(tp + 1) * len).flat_map(|at| (0..b).map(move |row| (at, row)));
    let out = places.flat_map(|(at, row)| {
        let start = (held[row][0][at] * b + row) * width;
        values[start..start + width].to_vec()
    });
    TensorData::new(out.collect(), [len, b, width])
}

/// The results of a rank: output, input gradient, and parameter gradients with their shards.
struct Found {
    output: TensorData,
    input_grad: TensorData,
    grads: Vec<(String, ShardSpec, TensorData)>,
    held: Vec<[Vec<usize>; 2]>,
    stretch: [usize; 2],
}

fn on_rank<S: Subject>(
    case: &S,
    world: &Group,
    layout: Layout,
    comm: ContextComm,
    seed: u64,
) -> Found {
    let groups = ProcessGroups::new(world, layout).unwrap();
    let layer = case.layer(&groups, comm).unwrap();
    let zigzag = Zigzag::new(groups.cp.rank(), groups.cp.size());
    let held = held(case, zigzag);
    let stretch = if layout.sp {
        [groups.tp.rank(), groups.tp.size()]
    } else {
        [0, 1]
    };
    let [s, b, hidden] = case.shape();
    let local = |what: &str| rows(&normal(&[s, b, hidden], seed, what), &held, stretch);
    let x = leaf::<3>(local("input"));
    let positions: Vec<&[usize]> = held.iter().map(|held| &held[1][..]).collect();
    let rope = case
        .rope()
        .init(0..s, &autodiff())
        .unwrap()
        .rows(&positions);
    let batch = BatchContext {
        loss_factor: Some(1.0),
        counted: None,
        block: Some(TokenBlock::new(3, b + 1, 1)),
        documents: case.documents().map(PackedDocuments::new),
        parallel: case
            .told_with_tokens()
            .then(|| ContextParallel::new(&groups.cp, comm).unwrap()),
        ..BatchContext::default()
    };
    let y = S::forward(&layer, x.clone(), &rope, &batch);
    let weight = Tensor::from_data(local("weight"), &autodiff());
    let grads = (y.clone() * weight).sum().backward();
    let plan = shard_plan(&layer).unwrap();
    let of_params = param_grads(&layer, &grads).into_iter();
    let with_spec = |(path, data): (String, TensorData)| {
        (path.clone(), plan.get(&path).unwrap().shard.clone(), data)
    };
    Found {
        output: y.into_data(),
        input_grad: x.grad(&grads).unwrap().into_data(),
        grads: of_params.map(with_spec).collect(),
        held,
        stretch,
    }
}

/// The gradients of full parameters: summed over context-parallel ranks, joined over
/// tensor-parallel ranks.
fn whole_grads(found: &[Found], layout: Layout) -> BTreeMap<String, TensorData> {
    let sum = |tp: usize, index: usize| {
        let of = |cp: usize| &found[cp * layout.tp + tp].grads[index];
        let values = |cp: usize| of(cp).2.clone().try_to_vec::<f32>().unwrap();
        let sum = (1..layout.cp).map(values).fold(values(0), |sum, next| {
            sum.iter().zip(next).map(|(a, b)| a + b).collect()
        });
        (
            of(0).1.clone(),
            TensorData::new(sum, of(0).2.shape().clone()),
        )
    };
    let paths = found[0].grads.iter().enumerate();
    let whole = |(index, (path, ..)): (usize, &(String, ShardSpec, TensorData))| {
        let shards: Vec<_> = (0..layout.tp).map(|tp| sum(tp, index)).collect();
        (path.clone(), join(path, &shards))
    };
    paths.map(whole).collect()
}

/// The largest difference of gradients, relative to their norm. They pass through more sums in another
/// order than the output does: with scaled rotary positions 7e-6 was found for drawn inputs.
const GRADIENT: f64 = 1.5e-5;

/// Asserts that the layer gives the same results under `layout` as on one rank.
pub(crate) fn check(case: &impl Subject, layout: &str, comm: ContextComm) {
    let layout = layout.parse::<Layout>().unwrap();
    let seed = fresh_seed();
    let alone = on_ranks(1, seed, |world| {
        on_rank(case, &world, Layout::SINGLE, ContextComm::P2p, seed)
    });
    let many = on_ranks(layout.world_size(), seed, |world| {
        on_rank(case, &world, layout, comm, seed)
    });
    let what = format!("{case:?}, {layout}, {comm}");
    let one = &alone[0];
    for found in &many {
        let [output, input_grad] =
            [&one.output, &one.input_grad].map(|whole| rows(whole, &found.held, found.stretch));
        assert_close(&format!("{what}: output"), &found.output, &output, 5e-6);
        assert_close(
            &format!("{what}: input gradient"),
            &found.input_grad,
            &input_grad,
            GRADIENT,
        );
    }
    let [found, expected] = [
        whole_grads(&many, layout),
        whole_grads(&alone, Layout::SINGLE),
    ];
    for (path, expected) in &expected {
        assert_close(
            &format!("{what}: gradient of {path}"),
            &found[path],
            expected,
            GRADIENT,
        );
    }
}
