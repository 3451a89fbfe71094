//! Context-parallel attention equals attention on one rank.

use burn::{nn::Initializer, tensor::Tensor};
use megaburn_collective::ProcessGroups;
use megaburn_kernels::{RopeConfig, RopeTable};
use megaburn_mesh::{Layout, PackedRows};
use megaburn_parallel::{
    Attention, AttentionGroups, BatchContext, ContextComm, ContextParallel, ParallelError,
    SelfAttentionConfig,
};
use rstest::rstest;

use crate::{
    sequences::{Subject, check},
    support::{autodiff, on_ranks},
};

/// A case: the shapes, and the mask and options of attention.
#[derive(Clone, Debug)]
struct Case {
    /// `[s, b]`.
    tokens: [usize; 2],
    heads: [usize; 2],
    causal: bool,
    window: Option<usize>,
    /// Bounds of the documents in each row.
    documents: Option<Vec<Vec<usize>>>,
    dropout: f64,
    again: bool,
    /// Whether each head has a sink.
    sinks: bool,
}

const HEAD_DIM: usize = 4;
const HIDDEN: usize = 12;

impl Case {
    fn plain(tokens: [usize; 2], heads: [usize; 2]) -> Self {
        let window = None;
        let documents = None;
        Self {
            tokens,
            heads,
            causal: true,
            window,
            documents,
            dropout: 0.0,
            again: false,
            sinks: false,
        }
    }
}

impl Subject for Case {
    type Layer = Attention;

    fn shape(&self) -> [usize; 3] {
        let [s, b] = self.tokens;
        [s, b, HIDDEN]
    }

    fn rope(&self) -> RopeConfig {
        RopeConfig::new(HEAD_DIM)
    }

    fn documents(&self) -> Option<PackedRows> {
        self.documents
            .clone()
            .map(|rows| PackedRows::new(rows).unwrap())
    }

    fn told_with_tokens(&self) -> bool {
        false
    }

    fn layer(&self, groups: &ProcessGroups, comm: ContextComm) -> Result<Attention, ParallelError> {
        let [heads, kv_heads] = self.heads;
        let mut config = SelfAttentionConfig::new(HIDDEN, heads, kv_heads, HEAD_DIM)
            .with_initializer(Initializer::Normal {
                mean: 0.0,
                std: 0.4,
            })
            .with_causal(self.causal)
            .with_sequence_parallel(groups.layout().sp)
            .with_dropout(self.dropout)
            .with_recompute(self.again)
            .with_sinks(self.sinks)
            .with_name("blocks.0.attention");
        config.window = self.window;
        let groups = AttentionGroups {
            tp: groups.tp.clone(),
            cp: ContextParallel::new(&groups.cp, comm)?,
        };
        config.init(groups, &autodiff())
    }

    fn forward(
        layer: &Attention,
        x: Tensor<3>,
        rope: &RopeTable,
        batch: &BatchContext,
    ) -> Tensor<3> {
        layer.forward_in(x, Some(rope), batch)
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
    check(
        &Case {
            causal,
            window,
            ..plain
        },
        &format!("cp{cp}"),
        comm,
    );
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
    let kv_heads = if comm == HEADS {
        of.cp * of.tp
    } else {
        of.tp * 6
    };
    let kv_heads = if of.cp == 8 && comm != RING {
        8
    } else {
        kv_heads
    };
    check(
        &Case::plain([multiple, 3], [2 * kv_heads, kv_heads]),
        layout,
        comm,
    );
    check(
        &Case::plain([3 * multiple, 1], [kv_heads, kv_heads]),
        layout,
        comm,
    );
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
    let documents = vec![
        bounds(&[1, 4, 0, 3]),
        bounds(&[8]),
        bounds(&[2, 2, 1, 1, 2]),
    ];
    let heads = 2 * of.tp * of.cp;
    let plain = Case::plain([8 * chunk, 3], [heads, heads / 2]);
    check(
        &Case {
            documents: Some(documents),
            causal,
            window,
            ..plain
        },
        layout,
        comm,
    );
}

#[rstest]
fn packed_documents_go_round_neighbours_that_share_heads(#[values(true, false)] causal: bool) {
    let documents = Some(vec![vec![0, 8, 32, 48], vec![0, 40, 48]]);
    let plain = Case::plain([48, 2], [4, 2]);
    check(
        &Case {
            documents,
            causal,
            ..plain
        },
        "cp4",
        ContextComm::A2aP2p { low: 2 },
    );
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
    check(
        &Case {
            dropout: 0.3,
            again,
            ..plain
        },
        layout,
        comm,
    );
}

#[rstest]
fn sinks_are_those_of_the_heads_wherever_they_are(
    #[values("cp1", "tp2-sp", "cp3", "tp2-cp2-sp")] layout: &str,
    #[values(RING, GATHERED, HEADS)] comm: ContextComm,
    #[values((0.0, false), (0.3, true))] (dropout, again): (f64, bool),
    #[values(None, Some(3))] window: Option<usize>,
) {
    let of: Layout = layout.parse().unwrap();
    let heads = 2 * of.tp * of.cp;
    let plain = Case::plain([6 * of.cp * of.tp, 2], [heads, heads / 2]);
    check(
        &Case {
            dropout,
            again,
            window,
            sinks: true,
            ..plain
        },
        layout,
        comm,
    );
}

#[rstest]
#[case(
    HEADS,
    "cp_comm `a2a`: the 4 query and 2 key/value heads of a rank cannot be sharded over 4 ranks"
)]
#[case(ContextComm::A2aP2p { low: 3 }, "4 ranks are not divisible into groups of 3")]
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
