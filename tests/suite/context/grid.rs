//! Context-parallel sequences train as on one rank.

use std::collections::BTreeMap;

use megaburn::{
    mesh::Layout,
    train::{ConfigLayers, TrainConfig},
};
use rstest::rstest;
use serde::Deserialize;

use crate::layouts::grid::{Trained, assert_every_pair, compare, train};
use megaburn_test_support::{
    layout_grid::{EPSILON, STEPS},
    text::{fresh_seed, write_random_documents, write_random_text},
};

/// The contents of `contexts.toml`.
#[derive(Deserialize)]
struct Contexts {
    rows: Vec<Row>,
}

#[derive(Clone, Debug, Deserialize)]
struct Row {
    cp: usize,
    comm: Comm,
    tp: usize,
    sp: bool,
    pp: usize,
    dp: usize,
    zero: u8,
    grouped: bool,
    packed: bool,
}

/// How keys and values are exchanged.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Comm {
    P2p,
    AllGather,
    A2a,
    /// All-to-all over pairs of neighbours, p2p between the pairs.
    #[serde(rename = "a2a+p2p")]
    A2aP2p,
}

/// A model and its data, which do not depend on the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Model {
    pub(crate) heads: [usize; 2],
    pub(crate) layers: usize,
    pub(crate) seq_len: usize,
    pub(crate) batch: usize,
    /// With packed sequences, documents are padded to a multiple of this.
    pub(crate) packed: Option<usize>,
}

impl Row {
    fn layout(&self) -> Layout {
        let Self {
            cp, tp, sp, pp, dp, ..
        } = *self;
        Layout {
            tp,
            cp,
            pp,
            dp,
            sp,
            ..Layout::SINGLE
        }
    }

    fn is_possible(&self) -> bool {
        let Self {
            cp,
            comm,
            tp,
            sp,
            dp,
            zero,
            ..
        } = *self;
        let has_groups = comm != Comm::A2aP2p || [4, 6, 8].contains(&cp);
        let shares = zero == 0 || dp * cp > 1;
        self.layout().world_size() <= 8 && (!sp || tp > 1) && shares && has_groups
    }

    fn cp_comm(&self) -> &'static str {
        match self.comm {
            Comm::P2p => "p2p",
            Comm::AllGather => "all_gather",
            Comm::A2a => "a2a",
            Comm::A2aP2p => "a2a2+p2p",
        }
    }

    fn model(&self) -> Model {
        let Self {
            cp,
            comm,
            tp,
            pp,
            dp,
            grouped,
            packed,
            ..
        } = *self;
        let over = match comm {
            Comm::P2p | Comm::AllGather => 1,
            Comm::A2a => cp,
            Comm::A2aP2p => 2,
        };
        let kv_heads = tp * over;
        Model {
            heads: [if grouped { 2 * kv_heads } else { kv_heads }, kv_heads],
            layers: pp.max(2),
            // Chunks have an odd number of tokens where possible.
            seq_len: 2 * cp * if tp > 1 { 4 } else { 5 },
            batch: 2 * dp,
            packed: packed.then_some(2 * cp),
        }
    }

    /// The value of each column.
    fn values(&self) -> [String; 9] {
        let Self {
            cp,
            comm,
            tp,
            sp,
            pp,
            dp,
            zero,
            grouped,
            packed,
        } = self;
        [
            format!("cp {cp}"),
            format!("{comm:?}"),
            format!("tp {tp}"),
            format!("sp {sp}"),
            format!("pp {pp}"),
            format!("dp {dp}"),
            format!("zero {zero}"),
            format!("grouped {grouped}"),
            format!("packed {packed}"),
        ]
    }

    fn config(&self, data: &str) -> TrainConfig {
        let keys = format!(
            "cp_comm = [{:?}]\nzero = {}\nbucket_size = 3000",
            self.cp_comm(),
            self.zero
        );
        let text = format!("{}\n[parallel]\n{keys}", self.model().text(data, 1));
        let layers = ConfigLayers::new()
            .with_text("contexts.toml", &text)
            .unwrap();
        layers
            .with_layout(&self.layout().to_string())
            .unwrap()
            .load()
            .unwrap()
    }
}

impl Model {
    pub(crate) fn text(&self, data: &str, micro_batch: usize) -> String {
        let Self {
            heads: [heads, kv_heads],
            layers,
            seq_len,
            batch,
            packed,
        } = self;
        let packed = packed.map_or(String::new(), |multiple| {
            format!("documents = true\ndocument_multiple = {multiple}")
        });
        format!(
            "[model]\nhidden = 16\nffn = 24\nheads = {heads}\nkv_heads = {kv_heads}\nhead_dim = 4\nlayers = {layers}
            [data]\npath = {data:?}\nseq_len = {seq_len}\n{packed}
            [train]\nsteps = {STEPS}\nglobal_batch = {batch}\nmicro_batch = {micro_batch}
            [optimizer]\nlr = 1e-3\neps = {EPSILON}\nwarmup_steps = 0"
        )
    }
}

fn rows() -> Vec<Row> {
    toml::from_str::<Contexts>(include_str!("../../contexts.toml"))
        .unwrap()
        .rows
}

/// A text and a file of documents, in a temporary folder.
pub(crate) struct Texts(tempfile::TempDir);

impl Texts {
    pub(crate) fn write() -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_random_text(&dir.path().join("text.txt"), 20_000, fresh_seed());
        // Some documents take a few chunks, others most of a sequence.
        write_random_documents(&dir.path().join("documents.jsonl"), 1000, 60, fresh_seed());
        Self(dir)
    }

    pub(crate) fn path(&self, packed: bool) -> String {
        let name = if packed {
            "documents.jsonl"
        } else {
            "text.txt"
        };
        self.0.path().join(name).to_str().unwrap().into()
    }
}

#[rstest]
fn every_context_trains_as_one_rank_does(#[values(1, 2, 3, 4, 5, 6, 7, 8)] cp: usize) {
    assert_as_one_rank(rows().into_iter().filter(|row| row.cp == cp));
}

/// Trains the full product of the columns. This takes minutes: `cargo test --test suite product --
/// --ignored`.
#[test]
#[ignore = "it takes minutes"]
fn the_whole_product_of_contexts_trains_as_one_rank_does() {
    let rows = product();
    println!("{} rows", rows.len());
    assert_as_one_rank(rows);
}

fn assert_as_one_rank(rows: impl IntoIterator<Item = Row>) {
    let texts = Texts::write();
    let mut one_rank: BTreeMap<Model, Trained> = BTreeMap::new();
    for row in rows {
        let model = row.model();
        let data = texts.path(row.packed);
        let expected = one_rank.entry(model).or_insert_with(|| {
            let text = model.text(&data, model.batch);
            let config = ConfigLayers::new()
                .with_text("one rank", &text)
                .unwrap()
                .load()
                .unwrap();
            train(config, Layout::SINGLE)
        });
        compare(
            &train(row.config(&data), row.layout()),
            expected,
            &format!("{row:?}"),
        );
    }
    assert!(
        one_rank
            .values()
            .all(|run| run.steps[2].loss != run.steps[0].loss)
    );
}

/// All valid rows in a world of up to 8 ranks.
fn product() -> Vec<Row> {
    let bools = [true, false];
    let mut all = Vec::new();
    for (cp, comm) in (1..=8)
        .flat_map(|cp| [Comm::P2p, Comm::AllGather, Comm::A2a, Comm::A2aP2p].map(|comm| (cp, comm)))
    {
        for (tp, sp) in [(1, false), (2, false), (2, true), (4, false), (4, true)] {
            for (pp, dp) in [
                (1, 1),
                (1, 2),
                (1, 3),
                (2, 1),
                (2, 2),
                (2, 3),
                (4, 1),
                (4, 2),
            ] {
                for zero in 0..4 {
                    for (grouped, packed) in bools.iter().flat_map(|a| bools.map(|b| (*a, b))) {
                        all.push(Row {
                            cp,
                            comm,
                            tp,
                            sp,
                            pp,
                            dp,
                            zero,
                            grouped,
                            packed,
                        });
                    }
                }
            }
        }
    }
    all.into_iter().filter(Row::is_possible).collect()
}

#[test]
fn the_rows_hold_every_pair_of_values() {
    let rows = rows();
    assert!(rows.iter().all(Row::is_possible));
    assert_every_pair(
        rows.iter().map(Row::values),
        product().iter().map(Row::values),
        300,
    );
}
