//! Models with multi-token prediction train under every layout as on one rank.

use megaburn::{
    mesh::Layout,
    train::{ConfigLayers, TrainConfig},
};
use rstest::rstest;

use crate::{
    context::grid::{Model, Texts},
    context::packed::with_evaluation,
    layouts::grid::{compare, train},
};
use megaburn_test_support::{expert_grid::SEED, layout_grid::EPSILON, text::write_random_text};

/// Layouts with further configuration keys. They cover every pipeline schedule, context-parallel
/// exchange and ZeRO stage.
const DENSE: [(&str, &[&str]); 29] = [
    ("tp2", &[]),
    ("tp2-sp", &["train.fused_linear_cross_entropy=true"]),
    ("tp4-sp", &["recompute.modules=[\"norm\"]"]),
    ("dp2", &["parallel.zero=1"]),
    ("dp4", &["parallel.zero=2"]),
    ("dp2", &["parallel.zero=3"]),
    ("dp2", &["parallel.zero=3", "recompute.method=uniform"]),
    ("dp2", &["parallel.zero=3", "parallel.overlap=false"]),
    ("pp2", &["parallel.schedule=gpipe"]),
    (
        "pp2",
        &[
            "parallel.schedule=1f1b",
            "train.fused_linear_cross_entropy=true",
        ],
    ),
    (
        "pp2",
        &["parallel.schedule=interleaved", "parallel.chunks=2"],
    ),
    ("pp2", &["parallel.schedule=zb-h1"]),
    ("pp2", &["parallel.schedule=zb-v"]),
    (
        "pp2",
        &["parallel.schedule=zb-v", "recompute.method=uniform"],
    ),
    (
        "pp2",
        &[
            "parallel.last_stage_layers=1",
            "recompute.method=block",
            "recompute.num_layers=2",
        ],
    ),
    (
        "pp2",
        &[
            "parallel.pipeline_layout=Ettt|tm*2L",
            "recompute.method=block",
        ],
    ),
    ("pp4", &["parallel.count_loss=true"]),
    (
        "pp2-dp2",
        &[
            "parallel.schedule=interleaved",
            "parallel.chunks=2",
            "parallel.zero=1",
        ],
    ),
    ("pp2-dp2", &["parallel.schedule=zb-h1", "parallel.zero=2"]),
    ("pp2-dp2", &["parallel.schedule=zb-v", "parallel.zero=3"]),
    ("cp2", &["parallel.cp_comm=[\"p2p\"]"]),
    (
        "cp2",
        &[
            "parallel.cp_comm=[\"all_gather\"]",
            "recompute.method=uniform",
        ],
    ),
    ("cp2", &["parallel.cp_comm=[\"a2a\"]"]),
    ("cp4", &["parallel.cp_comm=[\"a2a2+p2p\"]"]),
    ("cp2-dp2", &["parallel.zero=3"]),
    (
        "tp2-cp2-pp2-sp",
        &["recompute.modules=[\"norm\", \"activation\", \"core_attention\", \"mlp\"]"],
    ),
    (
        "tp2-pp2-dp2-sp",
        &[
            "parallel.zero=1",
            "recompute.method=uniform",
            "recompute.num_layers=2",
        ],
    ),
    ("tp2-cp2-dp2-sp", &["parallel.zero=2"]),
    (
        "tp1",
        &["recompute.method=uniform", "recompute.offload=true"],
    ),
];

const OF_EXPERTS: [(&str, &[&str]); 14] = [
    ("tp1", &["recompute.method=uniform"]),
    ("dp2-ep2", &["parallel.zero=1"]),
    ("dp4-ep4", &["parallel.zero=3"]),
    ("dp4-ep2", &["parallel.zero=2"]),
    ("dp2-ep2", &["moe.dispatcher=allgather"]),
    ("dp2-etp2", &[]),
    ("tp2-ep2-sp", &["train.fused_linear_cross_entropy=true"]),
    ("tp2-dp2-ep2-etp2-sp", &[]),
    ("cp2-ep2", &["recompute.modules=[\"mlp\"]"]),
    ("tp2-cp2-ep4-sp", &["parallel.zero=1"]),
    ("pp2-ep1", &["parallel.schedule=zb-v"]),
    (
        "pp2-dp2-ep2",
        &["parallel.schedule=interleaved", "parallel.chunks=2"],
    ),
    (
        "pp2-dp2-ep2",
        &["parallel.schedule=zb-h1", "parallel.zero=2"],
    ),
    ("tp2-pp2-dp2-ep4-sp", &["recompute.method=uniform"]),
];

const LLAMA: &str = "kv_heads = 2\nhead_dim = 4";
const DEEPSEEK: &str = "family = \"deepseek_v3\"\nkv_heads = 4
    [model.experts]\nnum = 8\ntop_k = 2\nffn = 8\ngroups = [2, 1, 2]\nlayer_freq = \"[0]+[1]*3\"
    [model.latent]\nkv_lora_rank = 8\nqk_nope_head_dim = 4\nqk_rope_head_dim = 4\nv_head_dim = 4
    [moe]\naux_loss = 0.05\nseq_aux_loss = 0.05\nglobal_aux_loss = 0.05\nz_loss = 0.01\nbias_update = \"sign\"";

/// The configuration of a run. Micro-batches have one sequence under every layout.
fn config(model: &str, data: &str, sets: &[&str]) -> ConfigLayers {
    let text = format!(
        "[data]\npath = {data:?}\nseq_len = 16
        [train]\nsteps = 4\nglobal_batch = 4\nmicro_batch = 1\nmtp_loss_scaling_factor = 0.3
        [optimizer]\nlr = 1e-3\neps = {EPSILON}\nwarmup_steps = 0
        [parallel]\nbucket_size = 3000
        [model]\nmtp_layers = 2\nhidden = 16\nffn = 24\nlayers = 4\nheads = 4\n{model}",
    );
    let layers = ConfigLayers::new()
        .with_text("mtp_grids.rs", &text)
        .unwrap();
    sets.iter()
        .fold(layers, |layers, set| layers.with_set(set).unwrap())
}

fn on(layers: ConfigLayers, layout: &str) -> (TrainConfig, Layout) {
    (
        layers.with_layout(layout).unwrap().load().unwrap(),
        layout.parse().unwrap(),
    )
}

fn assert_trains_as_one_rank(model: &str, own: &[&str], rows: &[(&str, &[&str])]) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 10_000, SEED);
    let data = path.to_str().unwrap();
    let run = |layout, sets: &[&str]| {
        let (config, layout) = on(config(model, data, &[own, sets].concat()), layout);
        train(config, layout)
    };
    let expected = run("tp1", &[]);
    assert!(expected.steps.iter().all(|step| step.mtp_losses.len() == 2));
    assert!(expected.steps[2].mtp_losses != expected.steps[0].mtp_losses);
    for (layout, sets) in rows {
        compare(
            &run(layout, sets),
            &expected,
            &format!("{model}, {layout}, {sets:?}"),
        );
    }
}

#[rstest]
fn every_layout_trains_as_one_rank_does(
    #[values("tied = true", "tied = false")] tied: &str,
    #[values(0, 1, 2)] third: usize,
) {
    let rows: Vec<_> = DENSE.into_iter().skip(third).step_by(3).collect();
    assert_trains_as_one_rank(&format!("{LLAMA}\n{tied}"), &[], &rows);
}

#[test]
fn learned_positions_are_in_the_stream_already() {
    // Biases start at zero, so they consist only of Adam's updates, which magnify the rounding of
    // small gradients.
    let rows = [DENSE[1], DENSE[11], DENSE[12], DENSE[21], DENSE[26]];
    assert_trains_as_one_rank(
        "family = \"gpt2\"\nkv_heads = 4",
        &["optimizer.eps=1e-2"],
        &rows,
    );
}

#[rstest]
fn every_expert_grid_trains_as_one_rank_does(
    #[values("", "capacity_factor = 0.9")] capacity: &str,
    #[values(0, 1)] half: usize,
) {
    let rows: Vec<_> = OF_EXPERTS.into_iter().skip(half).step_by(2).collect();
    assert_trains_as_one_rank(&format!("{DEEPSEEK}\n{capacity}"), &[], &rows);
}

#[test]
fn dropout_is_that_of_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 10_000, SEED);
    let run = |layout, dropout: &str, sets: &[&str]| {
        let sets = [&[dropout], sets].concat();
        let (config, layout) = on(config(LLAMA, path.to_str().unwrap(), &sets), layout);
        train(config, layout)
    };
    let expected = run("tp1", "train.hidden_dropout=0.2", &[]);
    assert!(
        run("tp1", "train.hidden_dropout=0", &[]).steps[0].mtp_losses
            != expected.steps[0].mtp_losses
    );
    for (layout, sets) in [DENSE[1], DENSE[6], DENSE[12], DENSE[21], DENSE[26]] {
        let found = run(layout, "train.hidden_dropout=0.2", sets);
        compare(&found, &expected, &format!("{layout}, {sets:?}"));
    }
}

/// Packed documents, documents assigned to ranks, and sequences that are padded for context
/// parallelism.
#[rstest]
#[case("cp2", 64, Some(4), "")]
#[case("tp2-cp2-sp", 64, Some(4), "")]
#[case("cp2-pp2", 64, Some(4), "")]
#[case("dp2", 64, Some(4), "max_tokens_per_rank = 40")]
#[case("cp2-dp2", 64, Some(4), "max_tokens_per_rank = 24\nzero = 3")]
#[case("cp3", 64, None, "cp_pad = true")]
#[case("cp2-pp2", 18, None, "cp_pad = true")]
fn documents_are_those_of_one_rank(
    #[case] layout: &str,
    #[case] seq_len: usize,
    #[case] packed: Option<usize>,
    #[case] parallel: &str,
    #[values("llama", "mixtral")] family: &str,
) {
    let texts = Texts::write();
    let data = texts.path(packed.is_some());
    let of: Layout = layout.parse().unwrap();
    let model = Model {
        heads: [4, 2],
        layers: 2,
        seq_len,
        batch: 2 * of.dp,
        packed,
    };
    let own = format!("[model]\nmtp_layers = 2\nfamily = {family:?}");
    let text = model.text(&data, 1).replacen("[model]", &own, 1);
    let shared = format!("{text}\n[parallel]\n{parallel}");
    let found = with_evaluation(&shared, layout).unwrap();
    let expected = with_evaluation(&text, "tp1").unwrap();
    assert_eq!((found.len(), expected.len()), (3 * 5 + 3, 3 * 5 + 3));
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let relative = (found - expected).abs() / expected;
        assert!(
            relative <= 2e-5,
            "{layout}, {index}: {found}, not {expected}"
        );
    }
}
