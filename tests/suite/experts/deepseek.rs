//! DeepSeek models from scratch: trained on one rank and on a grid, exported, used to generate.

use std::{collections::BTreeMap, fs, path::Path};

use rstest::rstest;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::models::round_trip::{megaburn, succeed, text};
use megaburn_test_support::{run::Run, text::write_random_text};

const STEPS: u64 = 4;
/// A fixed seed: if two experts score almost equally for a token, rounding decides between them.
const SEED: u64 = 7;

/// Sizes of no published model, and experts in groups.
const SETS: [&str; 10] = [
    "model.kv_heads=4",
    "model.tied=false",
    "model.latent.q_lora_rank=24",
    "model.latent.v_head_dim=20",
    "model.rope_scaling.kind=yarn",
    "model.rope_scaling.original_max_position_embeddings=8",
    "model.rope_scaling.mscale_all_dim=0.7",
    "model.experts.ffn=24",
    "model.experts.layer_freq=[0]*1+[1]*1",
    "optimizer.lr=1e-3",
];

fn trained(family: &str, layout: &str, sets: &[&str]) -> Run {
    let run = Run::new();
    write_random_text(&run.path("text.txt"), 10_000, SEED);
    let groups = if family == "deepseek_v3" {
        "[4,2,2]"
    } else {
        "[4,2,1]"
    };
    let own = [
        format!("model.family={family}"),
        format!("model.experts.groups={groups}"),
    ];
    let own = own.iter().map(String::as_str);
    let sets: Vec<&str> = own.chain(SETS).chain(sets.iter().copied()).collect();
    let args = run.args(layout, STEPS, &sets);
    let args: Vec<&str> = ["train"]
        .into_iter()
        .chain(args.iter().map(String::as_str))
        .collect();
    let ended = megaburn(&args);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    run
}

fn dtypes(file: &Path) -> BTreeMap<String, Dtype> {
    let file = fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap().tensors();
    tensors
        .into_iter()
        .map(|(name, view)| (name, view.dtype()))
        .collect()
}

#[rstest]
fn a_deepseek_from_scratch_is_the_same_on_a_grid_and_is_exported(
    #[values("deepseek_v2", "deepseek_v3")] family: &str,
) {
    let one = trained(family, "tp1", &[]);
    let losses = |run: &Run| run.steps().iter().map(|step| step.loss).collect::<Vec<_>>();
    assert_eq!(losses(&one).len(), STEPS as usize);
    for layout in ["tp2-dp2-ep4-sp", "pp2-cp2-ep2"] {
        let grid = trained(family, layout, &[]);
        for (found, expected) in losses(&grid).iter().zip(losses(&one)) {
            assert!(
                (found - expected).abs() < 2e-5 * expected,
                "{layout}: {found}, {expected}"
            );
        }
    }
    let [run, hf, again] = ["run", "hf", "again"].map(|name| one.path(name));
    succeed(&["convert", "export", text(&run), text(&hf)]);
    succeed(&["convert", "import", text(&hf), text(&again)]);
    succeed(&["verify", text(&run), text(&again)]);
    let ask = [
        "--prompt-ids",
        "1,2,3",
        "--max-tokens",
        "6",
        "--json",
        "--ignore-eos",
    ];
    let written = |model: &Path, layout| {
        let found = succeed(&[&["generate", text(model), "--layout", layout], &ask[..]].concat());
        // Compare token ids, because only the run has a tokenizer.
        serde_json::from_str::<Value>(&found).unwrap()["ids"].clone()
    };
    let expected = written(&run, "tp1");
    assert_eq!(written(&hf, "tp2-ep2-sp"), expected);
    assert_eq!(written(&again, "pp2"), expected);
}

#[test]
fn biases_of_a_bf16_run_are_exported_in_f32() {
    let run = trained("deepseek_v3", "dp2-ep2", &["train.dtype=bf16"]);
    let [from, hf] = ["run", "hf"].map(|name| run.path(name));
    for dtype in [&[][..], &["--dtype", "bf16"]] {
        succeed(
            &[
                &["convert", "export", text(&from), text(&hf), "--force"],
                dtype,
            ]
            .concat(),
        );
        for (name, found) in dtypes(&hf.join("model.safetensors")) {
            let is_bias = name.ends_with("e_score_correction_bias");
            let narrow = if dtype.is_empty() { found } else { Dtype::BF16 };
            assert_eq!(
                found,
                if is_bias { Dtype::F32 } else { narrow },
                "{name} {dtype:?}"
            );
        }
    }
}
