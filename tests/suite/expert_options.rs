//! Other ways to choose experts, to send them tokens and to schedule them than `experts.toml` has.

use megaburn::{mesh::Layout, train::ConfigLayers};
use rstest::rstest;

use crate::{
    expert_matrix::{Kind, Model, SEED},
    layouts::{compare, train},
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
#[case::in_turn(Kind::Mixtral, "force_balance = true", "")]
#[case::quantile(Kind::DeepseekV3, "bias_update = \"quantile\"", "")]
#[case::zero_bubble(Kind::Mixtral, "", "schedule = \"zb-h1\"")]
#[case::vee(Kind::DeepseekV3, "", "schedule = \"zb-v\"")]
#[case::interleaved(Kind::Mixtral, "", "schedule = \"interleaved\"")]
#[case::overlapped(Kind::DeepseekV3, "", "overlap_moe = true")]
#[case::overlapped_zero_bubble(Kind::Mixtral, "", "schedule = \"zb-h1\"\noverlap_moe = true")]
fn every_option_trains_as_one_rank_does(
    #[case] family: Kind,
    #[case] moe: &str,
    #[case] parallel: &str,
    #[values("dp4-ep4", "tp2-dp2-ep2-sp", "pp2-dp2-ep2", "cp2-dp2-ep2-etp2")] layout: &str,
) {
    assert_as_one_rank(family, 2, [moe, parallel], layout.parse().unwrap());
}

/// Tokens with so many experts go once to each of two ranks.
#[rstest]
#[case::plain(Kind::Mixtral, "", "")]
#[case::padded(Kind::Mixtral, "capacity_factor = 1.1\npad_to_capacity = true", "")]
#[case::dropped(Kind::Mixtral, "capacity_factor = 0.8", "")]
#[case::overlapped(Kind::DeepseekV3, "", "overlap_moe = true")]
#[case::zero_bubble(Kind::Mixtral, "", "schedule = \"zb-h1\"")]
fn many_experts_a_token_train_as_on_one_rank(
    #[case] family: Kind,
    #[case] moe: &str,
    #[case] parallel: &str,
    #[values("dp2-ep2", "tp2-dp2-ep2-sp", "pp2-dp2-ep2", "cp2-ep2")] layout: &str,
) {
    assert_as_one_rank(family, 5, [moe, parallel], layout.parse().unwrap());
}

fn assert_as_one_rank(family: Kind, top_k: usize, [moe, parallel]: [&str; 2], layout: Layout) {
    if parallel.contains("schedule") && layout.pp == 1 {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 20_000, SEED);
    let (experts, ffn, kv_heads, layers) = (8, 12, 2, 4);
    let (seq_len, batch, drops) = (16, 4 * layout.dp, false);
    let model = Model { experts, top_k, ffn, kv_heads, layers, seq_len, batch, drops, family };
    let text = model.text(path.to_str().unwrap());
    // Groups have no quantiles.
    let text = match moe.contains("quantile") {
        true => text.replace("groups = [2, 1, 2]\n", ""),
        false => text,
    };
    let text = text.replacen("[moe]", &format!("[moe]\n{moe}"), 1);
    let load = |text: &str| {
        let layers = ConfigLayers::new().with_text("options", text).unwrap();
        layers.with_layout(&layout.to_string()).unwrap().load().unwrap()
    };
    let shared = load(&format!("{text}\n[parallel]\n{parallel}\nbucket_size = 3000"));
    let one = ConfigLayers::new().with_text("one rank", &text).unwrap().load().unwrap();
    let expected = train(one, Layout::SINGLE);
    compare(&train(shared, layout), &expected, &format!("{moe} {parallel} {layout}"));
    let told = expected.steps[4].experts.as_ref().unwrap();
    if moe.contains("force_balance") {
        assert!(told.busiest.iter().chain(&told.idlest).all(|&load| load == 1.0), "{told:?}");
    }
}
