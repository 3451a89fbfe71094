//! Sequences that ranks share train as those of one rank do.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use burn::prelude::Device;
use megaburn::{
    collective::{GroupOptions, ProcessGroups, run_threads},
    mesh::Layout,
    train::{ConfigLayers, RunData, TrainConfig, TrainError, Trainer},
};
use rstest::rstest;
use serde::Deserialize;

use crate::{
    layouts::{Trained, compare, train},
    matrix::{EPSILON, STEPS},
    text::{fresh_seed, write_random_documents, write_random_text},
};

/// `contexts.toml`.
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
    /// Heads over two neighbours.
    #[serde(rename = "a2a+p2p")]
    A2aP2p,
}

/// What a model and its data are, whatever the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Model {
    heads: [usize; 2],
    layers: usize,
    seq_len: usize,
    batch: usize,
    /// What documents are padded to a multiple of, where rows are such.
    packed: Option<usize>,
}

impl Row {
    fn layout(&self) -> Layout {
        let Self { cp, tp, sp, pp, dp, .. } = *self;
        Layout { tp, cp, pp, dp, sp, ..Layout::SINGLE }
    }

    fn is_possible(&self) -> bool {
        let Self { cp, comm, tp, sp, dp, zero, .. } = *self;
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
        let Self { cp, comm, tp, pp, dp, grouped, packed, .. } = *self;
        let over = match comm {
            Comm::P2p | Comm::AllGather => 1,
            Comm::A2a => cp,
            Comm::A2aP2p => 2,
        };
        let kv_heads = tp * over;
        Model {
            heads: [if grouped { 2 * kv_heads } else { kv_heads }, kv_heads],
            layers: pp.max(2),
            // Chunks of an odd number of tokens where they can be.
            seq_len: 2 * cp * if tp > 1 { 4 } else { 5 },
            batch: 2 * dp,
            packed: packed.then_some(2 * cp),
        }
    }

    /// What each column holds.
    fn values(&self) -> [String; 9] {
        let Self { cp, comm, tp, sp, pp, dp, zero, grouped, packed } = self;
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
        let keys =
            format!("cp_comm = [{:?}]\nzero = {}\nbucket_size = 3000", self.cp_comm(), self.zero);
        let text = format!("{}\n[parallel]\n{keys}", self.model().text(data, 1));
        let layers = ConfigLayers::new().with_text("contexts.toml", &text).unwrap();
        layers.with_layout(&self.layout().to_string()).unwrap().load().unwrap()
    }
}

impl Model {
    fn text(&self, data: &str, micro_batch: usize) -> String {
        let Self { heads: [heads, kv_heads], layers, seq_len, batch, packed } = self;
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
    toml::from_str::<Contexts>(include_str!("../contexts.toml")).unwrap().rows
}

/// A text, and documents, in a folder.
struct Texts(tempfile::TempDir);

impl Texts {
    fn write() -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_random_text(&dir.path().join("text.txt"), 20_000, fresh_seed());
        // Of some that take a few chunks and some that take most of a sequence.
        write_random_documents(&dir.path().join("documents.jsonl"), 1000, 60, fresh_seed());
        Self(dir)
    }

    fn path(&self, packed: bool) -> String {
        let name = if packed { "documents.jsonl" } else { "text.txt" };
        self.0.path().join(name).to_str().unwrap().into()
    }
}

#[rstest]
fn every_context_trains_as_one_rank_does(#[values(1, 2, 3, 4, 5, 6, 7, 8)] cp: usize) {
    assert_as_one_rank(rows().into_iter().filter(|row| row.cp == cp));
}

/// All that the columns can be: minutes, by `cargo test --test suite product -- --ignored`.
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
        let (model, data) = (row.model(), texts.path(row.packed));
        let expected = one_rank.entry(model).or_insert_with(|| {
            let text = model.text(&data, model.batch);
            let config = ConfigLayers::new().with_text("one rank", &text).unwrap().load().unwrap();
            train(config, Layout::SINGLE)
        });
        compare(&train(row.config(&data), row.layout()), expected, &format!("{row:?}"));
    }
    assert!(one_rank.values().all(|run| run.steps[2].loss != run.steps[0].loss));
}

/// Losses and gradient norms of three steps, and an evaluation.
fn with_evaluation(text: &str, layout: &str) -> Result<Vec<f64>, String> {
    let config = ConfigLayers::new().with_text("dynamic", text).and_then(ConfigLayers::load);
    let config = Arc::new(config.map_err(|error| error.to_string())?);
    let layout: Layout = layout.parse().unwrap();
    let data = Arc::new(RunData::load(&config).unwrap());
    let options = GroupOptions { seed: config.run.seed, ..Default::default() };
    let ranks = run_threads(layout.world_size(), options, |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let device = Device::flex().autodiff();
        let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
        let mut numbers = Vec::new();
        for _ in 0..STEPS {
            let step = trainer.step()?;
            numbers.extend([step.loss, step.grad_norm, step.tokens as f64]);
        }
        numbers.push(trainer.evaluate()?.eval_loss);
        Ok::<_, TrainError>(numbers)
    });
    let ranks: Result<Vec<_>, _> = ranks.into_iter().collect();
    Ok(ranks.map_err(|error| error.to_string())?.swap_remove(0))
}

#[rstest]
fn documents_are_dealt_out_to_as_many_ranks_as_they_need(
    #[values("tp1", "dp2", "cp2", "dp3", "dp2-cp2", "dp5", "dp8", "tp2-dp4-sp", "tp2-cp2-dp2")]
    layout: &str,
    #[values(0, 2, 3)] zero: u8,
    #[values("auto", "p2p", "all_gather", "a2a2+p2p")] comm: &str,
) {
    let texts = Texts::write();
    let data = texts.path(true);
    let of: Layout = layout.parse().unwrap();
    let ranks = of.dp * of.cp;
    // Longer than any rank takes alone, where there are several.
    let (heads, batch) = ([8, 4], 2 * of.dp);
    let model = Model { heads, layers: 2, seq_len: 64, batch, packed: Some(4) };
    let most = 64 / (1 << ranks.min(4).ilog2()) + 8;
    let text = format!(
        "{}\n[parallel]\ncp_comm = [{comm:?}]\nmax_tokens_per_rank = {most}\nzero = {}\nbucket_size = 3000",
        model.text(&data, 1),
        if ranks > 1 { zero } else { 0 },
    );
    let found = with_evaluation(&text, layout).unwrap();
    let expected = with_evaluation(&model.text(&data, 1), "tp1").unwrap();
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let relative = (found - expected).abs() / expected;
        assert!(relative <= 1e-5, "{layout}, {zero}, {comm}, {index}: {found}, not {expected}");
    }
}

#[rstest]
#[case("dp2", "max_tokens_per_rank = 16", "is too long for 2 ranks of 16 tokens each")]
#[case(
    "pp2",
    "max_tokens_per_rank = 64",
    "`parallel.max_tokens_per_rank` is 64: it must be absent in a pipeline"
)]
#[case(
    "cp2",
    "max_tokens_per_rank = 64\ncp_comm = [\"p2p\", \"a2a\"]",
    "it must be absent where layers have"
)]
#[case(
    "cp2",
    "max_tokens_per_rank = 64\n[train]\nhidden_dropout = 0.1",
    "`train.hidden_dropout` is 0.1: it must be 0 where documents"
)]
#[case(
    "cp2",
    "max_tokens_per_rank = 64\n[data]\ndocuments = false",
    "it must be absent without data.documents"
)]
#[case(
    "cp3",
    "cp_pad = false\n[data]\ndocuments = false",
    "sequence length 64 is not divisible by 2 x cp = 6"
)]
#[case(
    "cp4",
    "cp_comm = [\"a2a\"]",
    "cp_comm `a2a` shares 4 query and 2 key/value heads of a rank out over 4"
)]
#[case("cp4", "cp_comm = [\"a2a3+p2p\"]", "4 ranks are no groups of 3")]
#[case("cp2", "cp_comm = [\"p2p\", \"p2p\", \"p2p\"]", "one for each of the model's 2")]
fn what_ranks_cannot_share_is_one_error(
    #[case] layout: &str,
    #[case] keys: &str,
    #[case] message: &str,
) {
    let texts = Texts::write();
    let data = texts.path(true);
    let model = Model { heads: [4, 2], layers: 2, seq_len: 64, batch: 4, packed: Some(8) };
    // Later keys stand for earlier ones.
    let config = ConfigLayers::new().with_text("model", &model.text(&data, 2)).unwrap();
    let config = config.with_text("keys", &format!("[parallel]\n{keys}")).unwrap();
    let config = config.with_layout(layout).unwrap().load().unwrap();
    let layout: Layout = layout.parse().unwrap();
    let error = config.layout(Some(layout.world_size())).map(|_| config).and_then(|config| {
        let (config, options) = (Arc::new(config), GroupOptions::default());
        let data = Arc::new(RunData::load(&config)?);
        let ranks = run_threads(layout.world_size(), options, |world| {
            let groups = ProcessGroups::new(&world, layout)?;
            let device = Device::flex().autodiff();
            let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
            // The text of the longest document is in some batch.
            (0..20).try_for_each(|_| trainer.step().map(drop))
        });
        for rank in ranks {
            match rank {
                Err(megaburn::collective::RankFailure::Failed(error)) => return Err(error),
                other => assert!(other.is_ok(), "{other:?}"),
            }
        }
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

#[rstest]
fn layers_exchange_as_each_is_told_and_sequences_are_padded(
    #[values(60, 62, 57)] seq_len: usize,
    #[values("cp4", "tp2-cp2-sp", "cp3-pp2")] layout: &str,
) {
    let texts = Texts::write();
    let data = texts.path(false);
    let model = Model { heads: [8, 8], layers: 4, seq_len, batch: 2, packed: None };
    let comms = "cp_comm = [\"p2p\", \"all_gather\", \"auto\", \"p2p\"]\ncp_pad = true";
    let text = format!("{}\n[parallel]\n{comms}", model.text(&data, 1));
    let found = with_evaluation(&text, layout).unwrap();
    let expected = with_evaluation(&model.text(&data, 2), "tp1").unwrap();
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() <= 1e-5 * expected, "{layout}: {found}, not {expected}");
    }
}

/// Pairs of values of two columns.
fn pairs<'a>(rows: impl IntoIterator<Item = &'a Row>) -> BTreeSet<(String, String)> {
    let mut pairs = BTreeSet::new();
    for row in rows {
        let values = row.values();
        for (index, a) in values.iter().enumerate() {
            pairs.extend(values[index + 1..].iter().map(|b| (a.clone(), b.clone())));
        }
    }
    pairs
}

/// All that there can be in a world of up to 8.
fn product() -> Vec<Row> {
    let bools = [true, false];
    let mut all = Vec::new();
    for (cp, comm) in (1..=8)
        .flat_map(|cp| [Comm::P2p, Comm::AllGather, Comm::A2a, Comm::A2aP2p].map(|comm| (cp, comm)))
    {
        for (tp, sp) in [(1, false), (2, false), (2, true), (4, false), (4, true)] {
            for (pp, dp) in [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (4, 1), (4, 2)] {
                for zero in 0..4 {
                    for (grouped, packed) in bools.iter().flat_map(|a| bools.map(|b| (*a, b))) {
                        all.push(Row { cp, comm, tp, sp, pp, dp, zero, grouped, packed });
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
    let (found, expected) = (pairs(&rows), pairs(&product()));
    let missing: Vec<_> = expected.difference(&found).collect();
    assert!(expected.len() > 300 && missing.is_empty(), "{missing:?}");
}
