//! Attention of sequences that ranks share is that of one rank.

use std::collections::BTreeMap;

use burn::{
    nn::Initializer,
    tensor::{Tensor, TensorData},
};
use megaburn_collective::{Group, ProcessGroups};
use megaburn_kernels::RopeConfig;
use megaburn_mesh::{Documents, Layout, ShardSpec, Zigzag};
use megaburn_parallel::{
    ContextComm, ContextParallel, PackedDocuments, ParallelError, SelfAttention,
    SelfAttentionConfig, TokenBlock, TokenContext, shard_plan,
};
use rstest::rstest;

use crate::support::{
    assert_close, autodiff, fresh_seed, join, leaf, normal, on_ranks, param_grads,
};

/// What is attended, and how.
#[derive(Clone, Debug)]
struct Case {
    /// `[s, b]`.
    tokens: [usize; 2],
    heads: [usize; 2],
    causal: bool,
    window: Option<usize>,
    /// Bounds of documents, by row.
    documents: Option<Vec<Vec<usize>>>,
    dropout: f64,
    again: bool,
}

const HEAD_DIM: usize = 4;
const HIDDEN: usize = 12;

impl Case {
    fn plain(tokens: [usize; 2], heads: [usize; 2]) -> Self {
        let (window, documents) = (None, None);
        Self { tokens, heads, causal: true, window, documents, dropout: 0.0, again: false }
    }

    fn layer(
        &self,
        groups: &ProcessGroups,
        comm: ContextComm,
    ) -> Result<SelfAttention, ParallelError> {
        let name = "blocks.0.attention";
        let [heads, kv_heads] = self.heads;
        let mut config = SelfAttentionConfig::new(HIDDEN, heads, kv_heads, HEAD_DIM)
            .with_initializer(Initializer::Normal { mean: 0.0, std: 0.4 })
            .with_causal(self.causal)
            .with_sequence_parallel(groups.layout().sp)
            .with_name(name);
        config.window = self.window;
        config
            .init(&groups.tp, &autodiff())?
            .with_dropout(self.dropout, name, &groups.tp)?
            .with_recompute(self.again)
            .with_context_parallel(&ContextParallel::new(&groups.cp, comm)?, name)
    }

    /// Which tokens of each row a rank holds, and their positions.
    fn held(&self, zigzag: Zigzag) -> Vec<[Vec<usize>; 2]> {
        let [s, b] = self.tokens;
        let documents = self.documents();
        let row = |row| match &documents {
            None => [0; 2].map(|_| zigzag.positions(s).collect()),
            Some(all) => [all.tokens(row, zigzag).collect(), all.positions(row, zigzag).collect()],
        };
        (0..b).map(row).collect()
    }

    fn documents(&self) -> Option<Documents> {
        self.documents.clone().map(|rows| Documents::new(rows).unwrap())
    }
}

/// `[s, b, ..]` of which `held` says what a rank has, and of that a tensor-parallel rank's stretch.
fn rows(whole: &TensorData, held: &[[Vec<usize>; 2]], [tp, tps]: [usize; 2]) -> TensorData {
    let shape = whole.shape().to_vec();
    let (b, width) = (shape[1], shape[2]);
    let values: Vec<f32> = whole.clone().try_to_vec().unwrap();
    let len = held[0][0].len() / tps;
    let places = (tp * len..(tp + 1) * len).flat_map(|at| (0..b).map(move |row| (at, row)));
    let out = places.flat_map(|(at, row)| {
        let start = (held[row][0][at] * b + row) * width;
        values[start..start + width].to_vec()
    });
    TensorData::new(out.collect(), [len, b, width])
}

/// What a rank computes: output, input gradient, and parameters' gradients with their shards.
struct Found {
    output: TensorData,
    input_grad: TensorData,
    grads: Vec<(String, ShardSpec, TensorData)>,
    held: Vec<[Vec<usize>; 2]>,
    stretch: [usize; 2],
}

fn on_rank(case: &Case, world: &Group, layout: Layout, comm: ContextComm, seed: u64) -> Found {
    let groups = ProcessGroups::new(world, layout).unwrap();
    let layer = case.layer(&groups, comm).unwrap();
    let zigzag = Zigzag::new(groups.cp.rank(), groups.cp.size());
    let held = case.held(zigzag);
    let stretch = if layout.sp { [groups.tp.rank(), groups.tp.size()] } else { [0, 1] };
    let [s, b] = case.tokens;
    let local = |what: &str| rows(&normal(&[s, b, HIDDEN], seed, what), &held, stretch);
    let x = leaf::<3>(local("input"));
    let positions: Vec<&[usize]> = held.iter().map(|held| &held[1][..]).collect();
    let rope = RopeConfig::new(HEAD_DIM).init(0..s, &autodiff()).unwrap().rows(&positions);
    let context = TokenContext {
        rope: Some(rope),
        block: Some(TokenBlock::new(3, b + 1, 1)),
        documents: case.documents().map(PackedDocuments::new),
        ..TokenContext::default()
    };
    let y = layer.forward_in(x.clone(), &context);
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

/// The gradients of whole parameters: summed over context-parallel ranks, joined over the others.
fn whole_grads(found: &[Found], layout: Layout) -> BTreeMap<String, TensorData> {
    let sum = |tp: usize, index: usize| {
        let of = |cp: usize| &found[cp * layout.tp + tp].grads[index];
        let values = |cp: usize| of(cp).2.clone().try_to_vec::<f32>().unwrap();
        let sum = (1..layout.cp)
            .map(values)
            .fold(values(0), |sum, next| sum.iter().zip(next).map(|(a, b)| a + b).collect());
        (of(0).1.clone(), TensorData::new(sum, of(0).2.shape().clone()))
    };
    let paths = found[0].grads.iter().enumerate();
    let whole = |(index, (path, ..)): (usize, &(String, ShardSpec, TensorData))| {
        let shards: Vec<_> = (0..layout.tp).map(|tp| sum(tp, index)).collect();
        (path.clone(), join(path, &shards))
    };
    paths.map(whole).collect()
}

fn check(case: &Case, layout: &str, comm: ContextComm) {
    let (layout, seed) = (layout.parse::<Layout>().unwrap(), fresh_seed());
    let alone =
        on_ranks(1, seed, |world| on_rank(case, &world, Layout::SINGLE, ContextComm::P2p, seed));
    let many =
        on_ranks(layout.world_size(), seed, |world| on_rank(case, &world, layout, comm, seed));
    let what = format!("{case:?}, {layout}, {comm}");
    let one = &alone[0];
    for found in &many {
        let [output, input_grad] =
            [&one.output, &one.input_grad].map(|whole| rows(whole, &found.held, found.stretch));
        assert_close(&format!("{what}: output"), &found.output, &output, 5e-6);
        assert_close(&format!("{what}: input gradient"), &found.input_grad, &input_grad, 5e-6);
    }
    let [found, expected] = [whole_grads(&many, layout), whole_grads(&alone, Layout::SINGLE)];
    for (path, expected) in &expected {
        assert_close(&format!("{what}: gradient of {path}"), &found[path], expected, 5e-6);
    }
}

const RING: ContextComm = ContextComm::P2p;
const GATHERED: ContextComm = ContextComm::AllGather;
const HEADS: ContextComm = ContextComm::A2a;

#[rstest]
fn every_way_is_attention_to_whole_sequences(
    #[values(1, 2, 3, 4)] cp: usize,
    #[values(RING, GATHERED, HEADS)] comm: ContextComm,
    #[values(true, false)] causal: bool,
    #[values(None, Some(1), Some(5), Some(40))] window: Option<usize>,
) {
    let plain = Case::plain([12 * cp, 2], [2 * cp, if comm == HEADS { cp } else { 2 }]);
    check(&Case { causal, window, ..plain }, &format!("cp{cp}"), comm);
}

#[rstest]
#[case("cp8", RING)]
#[case("cp8", GATHERED)]
#[case("cp8", HEADS)]
#[case("cp7", RING)]
#[case("cp5", GATHERED)]
#[case("cp6", ContextComm::A2aP2p { low: 2 })]
#[case("cp6", ContextComm::A2aP2p { low: 3 })]
#[case("cp8", ContextComm::A2aP2p { low: 4 })]
#[case("tp2-cp2", RING)]
#[case("tp2-cp2-sp", RING)]
#[case("tp2-cp4-sp", GATHERED)]
#[case("tp4-cp2-sp", HEADS)]
#[case("tp2-cp4-sp", ContextComm::A2aP2p { low: 2 })]
fn ways_work_with_tensor_parallelism_and_at_any_size(
    #[case] layout: &str,
    #[case] comm: ContextComm,
) {
    let of: Layout = layout.parse().unwrap();
    let multiple = 2 * of.cp * of.tp;
    let kv_heads = if comm == HEADS { of.cp * of.tp } else { of.tp * 6 };
    let kv_heads = if of.cp == 8 && comm != RING { 8 } else { kv_heads };
    check(&Case::plain([multiple, 3], [2 * kv_heads, kv_heads]), layout, comm);
    check(&Case::plain([3 * multiple, 1], [kv_heads, kv_heads]), layout, comm);
}

#[rstest]
fn packed_documents_are_cut_each(
    #[values("cp1", "cp2", "cp3", "tp2-cp2-sp")] layout: &str,
    #[values(RING, GATHERED, HEADS)] comm: ContextComm,
    #[values(true, false)] causal: bool,
    #[values(None, Some(4))] window: Option<usize>,
) {
    let of: Layout = layout.parse().unwrap();
    let chunk = 2 * of.cp;
    let bounds = |lens: &[usize]| -> Vec<usize> {
        let ends = lens.iter().scan(0, |end, len| {
            *end += len * chunk;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    };
    let documents = vec![bounds(&[1, 4, 0, 3]), bounds(&[8]), bounds(&[2, 2, 1, 1, 2])];
    let heads = 2 * of.tp * of.cp;
    let plain = Case::plain([8 * chunk, 3], [heads, heads / 2]);
    check(&Case { documents: Some(documents), causal, window, ..plain }, layout, comm);
}

#[rstest]
fn packed_documents_go_round_neighbours_that_share_heads(#[values(true, false)] causal: bool) {
    let documents = Some(vec![vec![0, 8, 32, 48], vec![0, 40, 48]]);
    let plain = Case::plain([48, 2], [4, 2]);
    check(&Case { documents, causal, ..plain }, "cp4", ContextComm::A2aP2p { low: 2 });
}

#[rstest]
fn the_same_probabilities_drop_and_once_more(
    #[values("cp2", "cp3", "tp2-cp2-sp")] layout: &str,
    #[values(RING, GATHERED, HEADS)] comm: ContextComm,
    #[values(true, false)] again: bool,
) {
    let of: Layout = layout.parse().unwrap();
    let heads = 2 * of.tp * of.cp;
    let plain = Case::plain([4 * of.cp * of.tp, 2], [heads, heads / 2]);
    check(&Case { dropout: 0.3, again, ..plain }, layout, comm);
}

#[rstest]
#[case(HEADS, "cp_comm `a2a`: 4 query and 2 key/value heads of a rank cannot be shared out over 4")]
#[case(ContextComm::A2aP2p { low: 3 }, "4 ranks are no groups of 3")]
fn heads_and_ranks_that_do_not_divide_are_refused(
    #[case] comm: ContextComm,
    #[case] message: &str,
) {
    let case = Case::plain([8, 1], [4, 2]);
    for error in on_ranks(4, 0, |world| {
        let groups = ProcessGroups::new(&world, "cp4".parse().unwrap()).unwrap();
        case.layer(&groups, comm).unwrap_err().to_string()
    }) {
        assert!(error.contains(message), "{error}");
    }
}
