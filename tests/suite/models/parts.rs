//! Models whose parts differ from their family's, under every layout.

use std::collections::BTreeSet;

use megaburn::{
    mesh::{Layout, PositionRng, Purpose},
    train::{ConfigLayers, TrainConfig, TrainError, config::ModelConfig},
};
use megaburn_test_support::{
    layout_grid::{EPSILON, STEPS},
    text::{fresh_seed, write_random_text},
};

use crate::layouts::grid::{compare_within, train};

/// The choices of a model. A value is a list of keys to set, separated by `;`; the first one of each
/// column is Llama's.
const CHOICES: [&[&str]; 19] = [
    &["", "norm=layer"],
    &[
        "",
        "norm_placement=output",
        "norm_placement=sandwich",
        "norm_placement=post",
    ],
    &["", "embedding_norm=true;token_types=2"],
    &["", "zero_centered_gamma=true"],
    &[
        "",
        "block_order=parallel",
        "block_order=parallel_shared_norm",
    ],
    &[
        "",
        "activation=geglu",
        "activation=geglu_tanh",
        "activation=clamped_swiglu",
        "activation=gelu",
        "activation=gelu_tanh",
        "activation=relu",
        "activation=squared_relu",
    ],
    &["", "qkv_bias=true;output_bias=true", "mlp_bias=true"],
    &["", "qk_norm=head", "qk_norm=width", "qk_norm=l2"],
    &[
        "",
        "attention_scale=0.3",
        "attention_soft_cap=0.8",
        "attention_sinks=true",
    ],
    &[
        "",
        "positions=learned",
        "positions=none",
        "positions=alibi",
        "positions=alibi;alibi_scaled=true",
        "positions=relative;relative_buckets=6;relative_max_distance=9",
        "rotary_percent=0.5",
        "rotary_interleaved=true",
        "rotary_layers=[1]*1+[0]*1",
    ],
    &[
        "",
        "model.window=5",
        "model.window=5;window_layers=[0]*1+[1]*1",
        "model.window=5;window_rope_theta=100.0",
    ],
    &[
        "",
        "embedding_multiplier=2.0;residual_multiplier=0.5;logits_scaling=2.0",
        "logits_soft_cap=1.5",
        "mup_base_hidden=8",
    ],
    &["", "masked_head=true"],
    &["model.tied=false", "model.tied=true"],
    &[
        "",
        "model.experts.num=4",
        "model.experts.num=4;model.experts.router_bias=true",
    ],
    &[
        "",
        "train.fused_linear_cross_entropy=true",
        "train.label_smoothing=0.1;train.z_loss=0.01",
    ],
    &["", "model.mtp_layers=1"],
    &[
        "",
        "recompute.modules=[\"norm\", \"activation\", \"core_attention\"]",
        "recompute.method=\"uniform\";recompute.num_layers=1",
    ],
    &[
        "",
        "optimizer.qk_clip=true;optimizer.qk_clip_threshold=0.002",
    ],
];

/// The layouts, with keys of `[parallel]`.
const LAYOUTS: [&str; 8] = [
    "tp2",
    "tp2-sp",
    "tp4-sp",
    "pp2",
    "dp2 zero=3",
    "cp2",
    "tp2-pp2-sp",
    "tp2-cp2-dp2-sp zero=1",
];

/// A model and a layout: an index into each column, the last one into the layouts.
type Row = [usize; CHOICES.len() + 1];

/// A value of a column.
fn text(column: usize, value: usize) -> &'static str {
    CHOICES.get(column).unwrap_or(&&LAYOUTS[..])[value]
}

fn len_of(column: usize) -> usize {
    CHOICES
        .get(column)
        .map_or(LAYOUTS.len(), |choices| choices.len())
}

/// The configuration of a row, in its layout or on one rank.
fn config(row: &Row, data: &str, on_one_rank: bool) -> Result<(TrainConfig, Layout), TrainError> {
    let text = format!(
        "[model]\nhidden = 16\nffn = 24\nheads = 4\nkv_heads = 2\nhead_dim = 8\nlayers = 2
        [data]\npath = {data:?}\nseq_len = 16
        [train]\nsteps = {STEPS}\nglobal_batch = 4\nmicro_batch = {}
        [optimizer]\nlr = 1e-3\neps = {EPSILON}\nwarmup_steps = 0",
        if on_one_rank { 4 } else { 1 }
    );
    let mut layers = ConfigLayers::new().with_text("parts", &text)?;
    let mut words = LAYOUTS[row[CHOICES.len()]].split(' ');
    let layout = words.next().unwrap();
    for (choices, index) in CHOICES.iter().zip(row) {
        for set in choices[*index].split(';').filter(|set| !set.is_empty()) {
            let is_full = set.split('=').next().unwrap().contains('.');
            let set = if is_full {
                set.into()
            } else {
                format!("model.parts.{set}")
            };
            // Memory is saved under the layout only.
            let saves_memory = set.starts_with("recompute") || set.starts_with("train.fused");
            if !(on_one_rank && saves_memory) {
                layers = layers.with_set(&set)?;
            }
        }
    }
    if !on_one_rank {
        layers = layers.with_layout(layout)?;
        for set in words {
            layers = layers.with_set(&format!("parallel.{set}"))?;
        }
    }
    let layout = if on_one_rank {
        Layout::SINGLE
    } else {
        layout.parse().unwrap()
    };
    Ok((layers.load()?, layout))
}

/// Whether the choices of a row go together, and its layout can split the model.
fn is_possible(row: &Row) -> bool {
    config(row, "text.txt", false).is_ok_and(|(config, layout)| {
        let shape = config.model.shape(config.data.seq_len);
        let model = config.model.decoder(config.data.seq_len, 1);
        layout.validate_for(&shape).is_ok()
            && model.check_context_parallel(layout.cp).is_ok()
            && config.layout(None).is_ok()
    })
}

/// The pairs of values of two columns in a row.
fn pairs(row: &Row) -> BTreeSet<[(usize, usize); 2]> {
    let cells = || row.iter().copied().enumerate();
    let after = |(column, value)| cells().skip(column + 1).map(move |b| [(column, value), b]);
    cells().flat_map(after).collect()
}

/// Values that do not go together, as parts of their texts.
const EXCLUDED: [[&str; 2]; 21] = [
    ["norm_placement", "parallel_shared_norm"],
    ["norm_placement=post", "block_order=parallel"],
    // The activation of the head is that of the MLP; Llama's is gated.
    ["geglu", "masked_head"],
    ["clamped_swiglu", "masked_head"],
    ["", "masked_head"],
    ["masked_head", "train.fused"],
    ["positions=learned", "window_rope_theta"],
    ["positions=none", "window_rope_theta"],
    ["positions=alibi", "window_rope_theta"],
    ["positions=relative", "window_rope_theta"],
    ["attention_soft_cap", "positions=alibi"],
    ["attention_soft_cap", "positions=relative"],
    ["attention_sinks", "positions=relative"],
    ["positions=relative", "mtp_layers"],
    // The bias is not split into the chunks of a sequence.
    ["positions=relative", "cp2"],
    ["positions=relative", "tp2-cp2-dp2-sp zero=1"],
    ["mup_base_hidden", "masked_head"],
    ["mup_base_hidden", "experts"],
    ["qk_norm", "qk_clip"],
    ["positions=relative", "qk_clip"],
    // Experts over several tensor-parallel ranks need sequence parallelism.
    ["experts", "tp2"],
];

/// Rows that are drawn anew in each run, and that hold every pair of values that go together.
fn drawn() -> Vec<Row> {
    let rng = PositionRng::new(fresh_seed(), Purpose::Sampling, "parts of models");
    let mut draws = 0;
    let mut draw = |most: usize| {
        draws += 1;
        rng.below(draws, most as u64) as usize
    };
    let columns = 0..=CHOICES.len();
    let mut missing = BTreeSet::new();
    for a in columns.clone() {
        for b in a + 1..=CHOICES.len() {
            let values = |column| (0..len_of(column)).map(move |value| (column, value));
            missing.extend(values(a).flat_map(|a| values(b).map(move |b| [a, b])));
        }
    }
    let mut rows = Vec::new();
    while let Some(&pair) = missing.first() {
        let [a, b] = pair.map(|(column, value)| text(column, value));
        let is_layout = pair[1].0 == CHOICES.len();
        let may_be_excluded = EXCLUDED.iter().any(|[first, second]| {
            // Every text contains the empty one, which stands for the default.
            let is_first = a.contains(first) && a.is_empty() == first.is_empty();
            is_first && (b == *second || (!is_layout && b.contains(second)))
        });
        let mut best: Option<(usize, Row)> = None;
        // A pair of which 300 drawn rows are impossible does not go together if it may be excluded.
        // Some values go together with few others, so that more rows are needed for other pairs.
        for tries in 0..if may_be_excluded { 300 } else { 5000 } {
            if tries >= 300 && best.is_some() {
                break;
            }
            let mut row: Row = std::array::from_fn(|column| draw(len_of(column)));
            pair.into_iter()
                .for_each(|(column, value)| row[column] = value);
            let found = pairs(&row).intersection(&missing).count();
            if best.is_none_or(|(most, _)| found > most) && is_possible(&row) {
                best = Some((found, row));
            }
        }
        match best {
            Some((_, row)) => {
                missing = &missing - &pairs(&row);
                rows.push(row);
            }
            None => {
                assert!(may_be_excluded, "no model has both {a} and {b}");
                missing.remove(&pair);
            }
        }
    }
    rows
}

#[test]
fn every_choice_trains_as_on_one_rank_under_a_drawn_layout() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 4_000, fresh_seed());
    let data = path.to_str().unwrap();
    let rows = drawn();
    // 8 activations with 8 layouts are 64 pairs, of which a row holds one.
    assert!((64..220).contains(&rows.len()), "{} rows", rows.len());
    // A run of the tests trains half of them.
    for row in rows.into_iter().filter(|_| fastrand::bool()) {
        let name = || {
            let choices = CHOICES
                .iter()
                .zip(row)
                .map(|(choices, index)| choices[index]);
            let set: Vec<_> = choices.filter(|choice| !choice.is_empty()).collect();
            format!("{}: {}", LAYOUTS[row[CHOICES.len()]], set.join("; "))
        };
        let (drawn, _) = config(&row, data, false).unwrap();
        let model = drawn.model.decoder(16, 300);
        let read_back = ModelConfig::of(&model).decoder(16, 300);
        assert_eq!(read_back, model, "{}: the section of the model", name());
        let [found, expected] = [false, true].map(|on_one_rank| {
            let (config, layout) = config(&row, data, on_one_rank).unwrap();
            train(config, layout)
        });
        // Rounding may flip a ReLU or an expert's choice, and it is all that a parameter has which
        // starts at zero in a direction without a gradient.
        compare_within(&found, &expected, &name(), 1e-3);
    }
}
