//! Every pipeline trains as one rank does.

use std::collections::BTreeMap;

use megaburn::{
    mesh::Layout,
    pipeline::ScheduleKind,
    train::{ConfigLayers, TrainConfig},
};
use rstest::rstest;
use serde::Deserialize;

use crate::layouts::grid::{Trained, assert_every_pair, compare, train};
use megaburn_test_support::{
    layout_grid::{EPSILON, STEPS},
    text::{fresh_seed, write_random_text},
};

/// The contents of `pipelines.toml`.
#[derive(Deserialize)]
struct Pipelines {
    rows: Vec<Row>,
}

#[derive(Clone, Debug, Deserialize)]
struct Row {
    pp: usize,
    chunks: usize,
    tp: usize,
    dp: usize,
    zero: u8,
    sp: bool,
    schedule: ScheduleKind,
    tied: bool,
    split: Split,
    recompute: Recomputed,
    micro_batches: usize,
}

/// What backward recomputes.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Recomputed {
    None,
    /// Norms, activations, attention and MLPs, each by itself.
    Modules,
    /// All layers, two at a time.
    Uniform,
    /// The first layer of each stage, with its residual stream in host memory where there are GPUs,
    /// and the norms of the other layers.
    Offload,
}

/// How layers are split over stages.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Split {
    /// As evenly as possible.
    Even,
    /// The first stage has more.
    Uneven,
    /// Embedding and loss count as layers.
    Counted,
    /// A layout text, in which the last stage has the most layers.
    Text,
}

const SEQ_LEN: usize = 8;

impl Row {
    fn layout(&self) -> Layout {
        let Self { pp, tp, dp, sp, .. } = *self;
        Layout {
            tp,
            pp,
            dp,
            sp,
            ..Layout::SINGLE
        }
    }

    fn num_stages(&self) -> usize {
        self.pp * self.chunks
    }

    /// Enough layers for the stages, but in general not the same number for each.
    fn num_layers(&self) -> usize {
        match self.split {
            Split::Even => (self.num_stages() + 1).max(5),
            Split::Counted => self.num_stages().max(4),
            Split::Uneven | Split::Text => self.num_stages() + 1,
        }
    }

    fn is_possible(&self) -> bool {
        let Self {
            pp,
            chunks,
            tp,
            dp,
            zero,
            sp,
            ..
        } = *self;
        let has_chunks = match self.schedule {
            ScheduleKind::GPipe => true,
            ScheduleKind::OneForwardOneBackward | ScheduleKind::ZbH1 => chunks == 1,
            ScheduleKind::ZbV => chunks == 2,
            ScheduleKind::Interleaved => chunks > 1,
            ScheduleKind::ForwardOnly => false,
        };
        pp * tp * dp <= 8 && (!sp || tp > 1) && (zero == 0 || dp > 1) && has_chunks
    }

    /// The row with the columns that combine with all others, chosen by number.
    fn with_rest(&self, tied: usize, split: usize, again: usize, micro_batches: usize) -> Self {
        const SPLITS: [Split; 4] = [Split::Even, Split::Uneven, Split::Counted, Split::Text];
        const RECOMPUTED: [Recomputed; 4] = [
            Recomputed::None,
            Recomputed::Modules,
            Recomputed::Uniform,
            Recomputed::Offload,
        ];
        Self {
            tied: tied == 0,
            split: SPLITS[split],
            recompute: RECOMPUTED[again % 4],
            micro_batches: [1, 3, 4, 5][micro_batches % 4],
            ..self.clone()
        }
    }

    /// The value of each column.
    fn values(&self) -> [String; 11] {
        let Self {
            pp,
            chunks,
            tp,
            dp,
            zero,
            sp,
            schedule,
            tied,
            split,
            recompute,
            micro_batches,
        } = self;
        [
            format!("pp {pp}"),
            format!("{chunks} chunks"),
            format!("tp {tp}"),
            format!("dp {dp}"),
            format!("zero {zero}"),
            format!("sp {sp}"),
            schedule.to_string(),
            format!("tied {tied}"),
            format!("{split:?}"),
            format!("recompute {recompute:?}"),
            format!("{micro_batches} micro-batches"),
        ]
    }

    fn config(&self, data: &str) -> TrainConfig {
        let Self {
            chunks,
            zero,
            schedule,
            split,
            recompute,
            ..
        } = self;
        let num_stages = self.num_stages();
        let layers = self.num_layers();
        let split = match split {
            Split::Even => String::new(),
            Split::Uneven => "first_stage_layers = 2".into(),
            Split::Counted => "count_embedding = true\ncount_loss = true".into(),
            Split::Text => format!("pipeline_layout = \"E(t|)*{},ttL\"", num_stages - 1),
        };
        let recompute = match recompute {
            Recomputed::None => "",
            Recomputed::Modules => {
                "modules = [\"norm\", \"activation\", \"core_attention\", \"mlp\"]"
            }
            Recomputed::Uniform => "method = \"uniform\"\nnum_layers = 2",
            Recomputed::Offload => "modules = [\"norm\"]\nmethod = \"block\"\noffload = true",
        };
        let text = format!(
            "{}\n[recompute]\n{recompute}\n[parallel]\nschedule = \"{schedule}\"\nchunks = {chunks}\nzero = {zero}\n\
             bucket_size = 3000\n{split}",
            base(data, layers, self.tied, self.micro_batches * self.dp, 1),
        );
        let layers = ConfigLayers::new()
            .with_text("pipelines.toml", &text)
            .unwrap();
        layers
            .with_layout(&self.layout().to_string())
            .unwrap()
            .load()
            .unwrap()
    }
}

fn base(data: &str, layers: usize, tied: bool, batch: usize, micro_batch: usize) -> String {
    format!(
        "[model]\nhidden = 16\nffn = 24\nheads = 4\nkv_heads = 4\nlayers = {layers}\ntied = {tied}
        [data]\npath = {data:?}\nseq_len = {SEQ_LEN}
        [train]\nsteps = {STEPS}\nglobal_batch = {batch}\nmicro_batch = {micro_batch}
        [optimizer]\nlr = 1e-3\neps = {EPSILON}\nwarmup_steps = 0"
    )
}

fn rows() -> Vec<Row> {
    toml::from_str::<Pipelines>(include_str!("../../pipelines.toml"))
        .unwrap()
        .rows
}

#[rstest]
fn every_pipeline_trains_as_one_rank_does(#[values(2, 3, 4, 5, 6, 7, 8)] pp: usize) {
    assert_as_one_rank(rows().into_iter().filter(|row| row.pp == pp));
}

/// Trains the full product of `parallel` settings, each with other splits, ties, micro-batches and
/// recomputation, which are drawn anew in every run. This takes minutes: `cargo test --test suite
/// product -- --ignored`.
#[test]
#[ignore = "it takes minutes"]
fn the_whole_product_trains_as_one_rank_does() {
    let mut draw = fresh_seed();
    let mut next = |num: usize| {
        draw = draw
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (draw >> 33) as usize % num
    };
    let rows = product()
        .into_iter()
        .map(|row| row.with_rest(next(2), next(4), next(4), next(4)));
    let rows: Vec<Row> = rows.collect();
    println!("{} rows", rows.len());
    assert_as_one_rank(rows);
}

fn assert_as_one_rank(rows: impl IntoIterator<Item = Row>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 4000, fresh_seed());
    let data = path.to_str().unwrap();
    let mut one_rank: BTreeMap<(usize, bool, usize), Trained> = BTreeMap::new();
    for row in rows {
        let batch = row.micro_batches * row.dp;
        let sizes = (row.num_layers(), row.tied, batch);
        let expected = one_rank.entry(sizes).or_insert_with(|| {
            let text = base(data, sizes.0, sizes.1, batch, batch);
            let config = ConfigLayers::new()
                .with_text("one rank", &text)
                .unwrap()
                .load()
                .unwrap();
            train(config, Layout::SINGLE)
        });
        compare(
            &train(row.config(data), row.layout()),
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

#[rstest]
#[case("pp4", "count_embedding = true\ncount_loss = true")]
#[case("pp2", "schedule = \"zb-v\"\npipeline_layout = \"E|t|t|L\"")]
fn stages_without_layers_at_the_ends_train_as_one_rank_does(
    #[case] layout: &str,
    #[case] keys: &str,
    #[values(true, false)] tied: bool,
) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 4000, fresh_seed());
    let data = path.to_str().unwrap();
    let layers = ConfigLayers::new();
    let text = format!("{}\n[parallel]\n{keys}", base(data, 2, tied, 3, 1));
    let config = layers
        .clone()
        .with_text("pipeline", &text)
        .unwrap()
        .with_layout(layout)
        .unwrap();
    let one_rank = layers
        .with_text("one rank", &base(data, 2, tied, 3, 3))
        .unwrap();
    let expected = train(one_rank.load().unwrap(), Layout::SINGLE);
    compare(
        &train(config.load().unwrap(), layout.parse().unwrap()),
        &expected,
        layout,
    );
}

/// All valid pipelines in a world of up to 8 ranks, without the columns of [`Row::with_rest`].
fn product() -> Vec<Row> {
    let first = Row {
        pp: 1,
        chunks: 1,
        tp: 1,
        dp: 1,
        zero: 0,
        sp: false,
        schedule: ScheduleKind::GPipe,
        tied: true,
        split: Split::Even,
        recompute: Recomputed::None,
        micro_batches: 1,
    };
    let mut all = vec![first];
    let mut vary = |set: &dyn Fn(&mut Row, usize), num: usize| {
        let varied = all.iter().flat_map(|row| {
            (0..num).map(|value| {
                let mut row = row.clone();
                set(&mut row, value);
                row
            })
        });
        all = varied.collect();
    };
    vary(&|row, value| row.pp = 2 + value, 7);
    vary(&|row, value| row.chunks = 1 + value, 4);
    vary(&|row, value| row.tp = [1, 2, 4][value], 3);
    vary(&|row, value| row.dp = 1 + value, 4);
    vary(&|row, value| row.zero = value as u8, 4);
    vary(&|row, value| row.sp = value == 1, 2);
    vary(&|row, value| row.schedule = ScheduleKind::ALL[value], 5);
    all.into_iter().filter(Row::is_possible).collect()
}

#[test]
fn the_rows_hold_every_pair_of_values() {
    // These columns combine with all others, so a few of their combinations contain every pair.
    let rest = |row: Row| {
        let with = move |i: usize| row.with_rest(i / 16, i / 4 % 4, i + i / 4 * 2, i + i / 4);
        (0..32).map(with).collect::<Vec<_>>()
    };
    let all: Vec<Row> = product().into_iter().flat_map(rest).collect();
    let rows = rows();
    assert!(rows.iter().all(Row::is_possible));
    assert_every_pair(
        rows.iter().map(Row::values),
        all.iter().map(Row::values),
        700,
    );
}
