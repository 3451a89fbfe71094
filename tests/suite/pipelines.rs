//! Every pipeline trains as one rank does.

use std::collections::{BTreeMap, BTreeSet};

use megaburn::{
    mesh::Layout,
    pipeline::ScheduleKind,
    train::{ConfigLayers, TrainConfig},
};
use rstest::rstest;
use serde::Deserialize;

use crate::{
    layouts::{Trained, compare, train},
    matrix::{EPSILON, STEPS},
    text::{fresh_seed, write_random_text},
};

/// `pipelines.toml`.
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
    micro_batches: usize,
}

/// How layers are split over stages.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Split {
    /// As evenly as can be.
    Even,
    /// The first stage has more.
    Uneven,
    /// Embedding and loss count.
    Counted,
    /// By a text, the last stage with the most.
    Text,
}

const SEQ_LEN: usize = 8;

impl Row {
    fn layout(&self) -> Layout {
        let Self { pp, tp, dp, sp, .. } = *self;
        Layout { tp, pp, dp, sp, ..Layout::SINGLE }
    }

    fn num_stages(&self) -> usize {
        self.pp * self.chunks
    }

    /// Layers enough for the stages, but never so many for each.
    fn num_layers(&self) -> usize {
        match self.split {
            Split::Even => (self.num_stages() + 1).max(5),
            Split::Counted => self.num_stages().max(4),
            Split::Uneven | Split::Text => self.num_stages() + 1,
        }
    }

    fn is_possible(&self) -> bool {
        let Self { pp, chunks, tp, dp, zero, sp, .. } = *self;
        let has_chunks = match self.schedule {
            ScheduleKind::GPipe => true,
            ScheduleKind::OneForwardOneBackward | ScheduleKind::ZbH1 => chunks == 1,
            ScheduleKind::ZbV => chunks == 2,
            ScheduleKind::Interleaved => chunks > 1,
            ScheduleKind::ForwardOnly => false,
        };
        pp * tp * dp <= 8 && (!sp || tp > 1) && (zero == 0 || dp > 1) && has_chunks
    }

    /// What each column holds.
    fn values(&self) -> [String; 10] {
        let Self { pp, chunks, tp, dp, zero, sp, schedule, tied, split, micro_batches } = self;
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
            format!("{micro_batches} micro-batches"),
        ]
    }

    fn config(&self, data: &str) -> TrainConfig {
        let Self { chunks, zero, schedule, split, .. } = self;
        let (num_stages, layers) = (self.num_stages(), self.num_layers());
        let split = match split {
            Split::Even => String::new(),
            Split::Uneven => "first_stage_layers = 2".into(),
            Split::Counted => "count_embedding = true\ncount_loss = true".into(),
            Split::Text => format!("pipeline_layout = \"E(t|)*{},ttL\"", num_stages - 1),
        };
        let text = format!(
            "{}\n[parallel]\nschedule = \"{schedule}\"\nchunks = {chunks}\nzero = {zero}\n\
             bucket_size = 3000\n{split}",
            base(data, layers, self.tied, self.micro_batches * self.dp, 1),
        );
        let layers = ConfigLayers::new().with_text("pipelines.toml", &text).unwrap();
        layers.with_layout(&self.layout().to_string()).unwrap().load().unwrap()
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
    toml::from_str::<Pipelines>(include_str!("../pipelines.toml")).unwrap().rows
}

#[rstest]
fn every_pipeline_trains_as_one_rank_does(#[values(2, 3, 4, 5, 6, 7, 8)] pp: usize) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 4000, fresh_seed());
    let data = path.to_str().unwrap();
    let mut one_rank: BTreeMap<(usize, bool, usize), Trained> = BTreeMap::new();
    for row in rows().into_iter().filter(|row| row.pp == pp) {
        let batch = row.micro_batches * row.dp;
        let sizes = (row.num_layers(), row.tied, batch);
        let expected = one_rank.entry(sizes).or_insert_with(|| {
            let text = base(data, sizes.0, sizes.1, batch, batch);
            let config = ConfigLayers::new().with_text("one rank", &text).unwrap().load().unwrap();
            train(config, Layout::SINGLE)
        });
        compare(&train(row.config(data), row.layout()), expected, &format!("{row:?}"));
    }
    assert!(one_rank.values().all(|run| run.steps[2].loss != run.steps[0].loss));
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
    let (data, layers) = (path.to_str().unwrap(), ConfigLayers::new());
    let text = format!("{}\n[parallel]\n{keys}", base(data, 2, tied, 3, 1));
    let config = layers.clone().with_text("pipeline", &text).unwrap().with_layout(layout).unwrap();
    let one_rank = layers.with_text("one rank", &base(data, 2, tied, 3, 3)).unwrap();
    let expected = train(one_rank.load().unwrap(), Layout::SINGLE);
    compare(&train(config.load().unwrap(), layout.parse().unwrap()), &expected, layout);
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

#[test]
fn the_rows_hold_every_pair_of_values() {
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
    let mut all: Vec<Row> = all.into_iter().filter(Row::is_possible).collect();
    // With these everything is possible: a few of their combinations have every pair.
    const SPLITS: [Split; 4] = [Split::Even, Split::Uneven, Split::Counted, Split::Text];
    all = all
        .into_iter()
        .flat_map(|row| {
            (0..16).map(move |i| Row {
                tied: i % 2 == 0,
                split: SPLITS[i / 4],
                micro_batches: [1, 3, 4, 5][(i + i / 4) % 4],
                ..row.clone()
            })
        })
        .collect();
    let rows = rows();
    assert!(rows.iter().all(Row::is_possible));
    let (found, expected) = (pairs(&rows), pairs(&all));
    let missing: Vec<_> = expected.difference(&found).collect();
    assert!(expected.len() > 600 && missing.is_empty(), "{missing:?}");
}
