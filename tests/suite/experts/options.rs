//! Options for routing, dispatch and schedules that `experts.toml` does not cover.

use std::{collections::BTreeMap, fs, path::Path};

use megaburn::{
    mesh::{Layout, PositionRng, Purpose},
    report::metrics::ExpertMetrics,
    train::ConfigLayers,
};
use rstest::rstest;

use crate::layouts::grid::{Trained, compare, train};
use megaburn_test_support::{
    expert_grid::{Kind, Model, SEED},
    text::write_random_text,
};

#[rstest]
#[case::all_gather(Kind::Mixtral, "dispatcher = \"allgather\"", "")]
#[case::padded(Kind::DeepseekV3, "capacity_factor = 1.1\npad_to_capacity = true", "")]
#[case::padded_all_gather(
    Kind::Mixtral,
    "capacity_factor = 0.8\npad_to_capacity = true\ndispatcher = \"allgather\"\ndrop_policy = \"position\"",
    ""
)]
#[case::round_robin(Kind::Mixtral, "force_balance = true", "")]
#[case::quantile(Kind::DeepseekV3, "bias_update = \"quantile\"", "")]
#[case::zero_bubble(Kind::Mixtral, "", "schedule = \"zb-h1\"")]
#[case::vee(Kind::DeepseekV3, "", "schedule = \"zb-v\"")]
#[case::interleaved(Kind::Mixtral, "", "schedule = \"interleaved\"")]
fn every_option_trains_as_one_rank_does(
    #[case] family: Kind,
    #[case] moe: &str,
    #[case] parallel: &str,
) {
    let layouts = [
        "dp4-ep4",
        "tp2-dp2-ep2-sp",
        "pp2-dp2-ep2",
        "cp2-dp2-ep2-etp2",
    ];
    assert_as_one_rank(family, 2, [moe, parallel], &layouts);
}

/// With this many experts per token, the deduplicated all-to-all sends each token once to each of
/// two ranks.
#[rstest]
#[case::plain(Kind::Mixtral, "", "")]
#[case::padded(Kind::Mixtral, "capacity_factor = 1.1\npad_to_capacity = true", "")]
#[case::dropped(Kind::Mixtral, "capacity_factor = 0.8", "")]
#[case::shared_expert(Kind::DeepseekV3, "", "")]
#[case::zero_bubble(Kind::Mixtral, "", "schedule = \"zb-h1\"")]
fn many_experts_a_token_train_as_on_one_rank(
    #[case] family: Kind,
    #[case] moe: &str,
    #[case] parallel: &str,
) {
    let layouts = ["dp2-ep2", "tp2-dp2-ep2-sp", "pp2-dp2-ep2", "cp2-ep2"];
    assert_as_one_rank(family, 5, [moe, parallel], &layouts);
}

/// Each sample begins with one letter repeated eight times. These tokens have the same inputs, so
/// their weights are equal except for rounding, which depends on the layout. Which of them are
/// dropped shows at the last one, after which the text continues.
#[rstest]
fn of_tokens_with_the_same_weight_every_layout_drops_the_same(
    #[values(Kind::Mixtral, Kind::DeepseekV3)] family: Kind,
) {
    let write = |path: &Path| write_repeated_letters(path, 20_000, SEQ_LEN, SEED);
    let moe = "capacity_factor = 0.6";
    let layouts = [
        "dp4-ep4",
        "tp2-dp2-ep2-sp",
        "tp4-ep4-sp",
        "pp2-dp2-ep2",
        "cp4",
        "cp2-dp2-ep2-etp2",
    ];
    for metrics in assert_text_as_one_rank(write, family, 2, [moe, ""], &layouts) {
        assert!(metrics.dropped > 0.1, "{metrics:?}");
    }
}

const SEQ_LEN: usize = 16;

/// Skips layouts without a pipeline if a schedule is set.
fn assert_as_one_rank(family: Kind, top_k: usize, [moe, parallel]: [&str; 2], layouts: &[&str]) {
    let is_possible = |layout: &str| !parallel.contains("schedule") || layout.contains("pp");
    let mut layouts = layouts.to_vec();
    layouts.retain(|layout| is_possible(layout));
    assert!(!layouts.is_empty());
    let write = |path: &Path| write_random_text(path, 20_000, SEED);
    let of_one_rank = assert_text_as_one_rank(write, family, top_k, [moe, parallel], &layouts);
    if moe.contains("force_balance") {
        for metrics in of_one_rank {
            let mut loads = metrics.busiest.iter().chain(&metrics.idlest);
            assert!(loads.all(|&load| load == 1.0), "{metrics:?}");
        }
    }
}

/// Compares a run under each of `layouts` with one rank. Returns one rank's expert metrics of the
/// last step for each batch size, which depends on the layout.
fn assert_text_as_one_rank(
    write: impl Fn(&Path),
    family: Kind,
    top_k: usize,
    [moe, parallel]: [&str; 2],
    layouts: &[&str],
) -> Vec<ExpertMetrics> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write(&path);
    let mut one_rank: BTreeMap<usize, Trained> = BTreeMap::new();
    for layout in layouts {
        let layout: Layout = layout.parse().unwrap();
        let batch = 4 * layout.dp;
        let model = Model {
            experts: 8,
            top_k,
            ffn: 12,
            kv_heads: 2,
            layers: 4,
            seq_len: SEQ_LEN,
            batch,
            drops: false,
            family,
        };
        let text = model.text(path.to_str().unwrap());
        // Quantile balancing does not support groups.
        let text = if moe.contains("quantile") {
            text.replace("groups = [2, 1, 2]\n", "")
        } else {
            text
        };
        let text = text.replacen("[moe]", &format!("[moe]\n{moe}"), 1);
        let config = |text: &str| ConfigLayers::new().with_text("options", text).unwrap();
        let expected = one_rank
            .entry(batch)
            .or_insert_with(|| train(config(&text).load().unwrap(), Layout::SINGLE));
        let keys = format!("{text}\n[parallel]\n{parallel}\nbucket_size = 3000");
        let config = config(&keys).with_layout(&layout.to_string()).unwrap();
        compare(
            &train(config.load().unwrap(), layout),
            expected,
            &format!("{moe} {parallel} {layout}"),
        );
    }
    let metrics = |run: Trained| run.steps[4].experts.clone().unwrap();
    one_rank.into_values().map(metrics).collect()
}

/// Writes `len` letters in sections of `section_len`: one letter repeated in the first half, random
/// letters in the second.
fn write_repeated_letters(path: &Path, len: usize, section_len: usize, seed: u64) {
    let rng = PositionRng::new(seed, Purpose::Sampling, "letters");
    let letter = |index: usize| {
        let start = index - index % section_len;
        let drawn = if index - start < section_len / 2 {
            start
        } else {
            index
        };
        char::from(b'a' + rng.below(drawn as u64, 26) as u8)
    };
    fs::write(path, (0..len).map(letter).collect::<String>()).unwrap();
}
