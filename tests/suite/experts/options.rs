//! Options for routing, dispatch and schedules that `experts.toml` does not cover.

use std::{fs, path::Path};

use megaburn::{
    mesh::{Layout, PositionRng, Purpose},
    report::metrics::ExpertMetrics,
    train::ConfigLayers,
};
use rstest::rstest;

use crate::layouts::grid::{compare, train};
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
    #[values("dp4-ep4", "tp2-dp2-ep2-sp", "pp2-dp2-ep2", "cp2-dp2-ep2-etp2")] layout: &str,
) {
    assert_as_one_rank(family, 2, [moe, parallel], layout.parse().unwrap());
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
    #[values("dp2-ep2", "tp2-dp2-ep2-sp", "pp2-dp2-ep2", "cp2-ep2")] layout: &str,
) {
    assert_as_one_rank(family, 5, [moe, parallel], layout.parse().unwrap());
}

/// Each sample begins with one letter repeated eight times. These tokens have the same inputs, so
/// their weights are equal except for rounding, which depends on the layout. Which of them are
/// dropped shows at the last one, after which the text continues.
#[rstest]
fn of_tokens_with_the_same_weight_every_layout_drops_the_same(
    #[values(Kind::Mixtral, Kind::DeepseekV3)] family: Kind,
    #[values(
        "dp4-ep4",
        "tp2-dp2-ep2-sp",
        "tp4-ep4-sp",
        "pp2-dp2-ep2",
        "cp4",
        "cp2-dp2-ep2-etp2"
    )]
    layout: &str,
) {
    let write = |path: &Path| write_repeated_letters(path, 20_000, SEQ_LEN, SEED);
    let moe = "capacity_factor = 0.6";
    let told = assert_text_as_one_rank(write, family, 2, [moe, ""], layout.parse().unwrap());
    let told = told.unwrap();
    assert!(told.dropped > 0.1, "{told:?}");
}

const SEQ_LEN: usize = 16;

fn assert_as_one_rank(family: Kind, top_k: usize, [moe, parallel]: [&str; 2], layout: Layout) {
    if parallel.contains("schedule") && layout.pp == 1 {
        return;
    }
    let write = |path: &Path| write_random_text(path, 20_000, SEED);
    let told = assert_text_as_one_rank(write, family, top_k, [moe, parallel], layout);
    if moe.contains("force_balance") {
        let told = told.unwrap();
        assert!(
            told.busiest
                .iter()
                .chain(&told.idlest)
                .all(|&load| load == 1.0),
            "{told:?}"
        );
    }
}

/// Compares a run under `layout` with one rank. Returns one rank's expert metrics of the last step.
fn assert_text_as_one_rank(
    write: impl Fn(&Path),
    family: Kind,
    top_k: usize,
    [moe, parallel]: [&str; 2],
    layout: Layout,
) -> Option<ExpertMetrics> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write(&path);
    let experts = 8;
    let ffn = 12;
    let kv_heads = 2;
    let layers = 4;
    let seq_len = SEQ_LEN;
    let batch = 4 * layout.dp;
    let drops = false;
    let model = Model {
        experts,
        top_k,
        ffn,
        kv_heads,
        layers,
        seq_len,
        batch,
        drops,
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
    let load = |text: &str| {
        let layers = ConfigLayers::new().with_text("options", text).unwrap();
        layers
            .with_layout(&layout.to_string())
            .unwrap()
            .load()
            .unwrap()
    };
    let shared = load(&format!(
        "{text}\n[parallel]\n{parallel}\nbucket_size = 3000"
    ));
    let one = ConfigLayers::new()
        .with_text("one rank", &text)
        .unwrap()
        .load()
        .unwrap();
    let expected = train(one, Layout::SINGLE);
    compare(
        &train(shared, layout),
        &expected,
        &format!("{moe} {parallel} {layout}"),
    );
    expected.steps[4].experts.clone()
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
