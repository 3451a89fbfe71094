//! The program of `examples/own_family`, whose family the `megaburn` command does not have.

use std::{fs, path::Path};

use megaburn_test_support::run::Run;
use serde_json::Value;

use super::outside::program;
use crate::{
    models::{
        round_trip::{megaburn, text},
        transformers::fixture,
    },
    runs::child::{Ended, Ranks},
};

/// What the program is started with to train the family.
const SETS: [&str; 3] = [
    "model.family=phi",
    "train.checkpoint_interval=3",
    "model.tied=false",
];

fn own(args: &[&str]) -> Ended {
    Ranks::program(&program("own_family"), args)
        .wait_all()
        .remove(0)
}

fn succeed(args: &[&str]) -> String {
    let ended = own(args);
    assert_eq!(ended.code, Some(0), "{args:?}: {ended:#?}");
    ended.stdout
}

fn train(run: &Run, layout: &str, steps: u64, sets: &[&str]) {
    let args = run.args(layout, steps, &[&SETS, sets].concat());
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    succeed(&[&["train"], &args[..]].concat());
}

/// A run of six steps: three under `tp2-pp2` and three under another layout.
fn trained() -> Run {
    let run = Run::new();
    train(&run, "tp2-pp2-sp", 3, &[]);
    train(&run, "dp2", 6, &["parallel.zero=3"]);
    run
}

#[test]
fn a_run_that_resumes_under_another_layout_equals_one_rank() {
    let one_rank = Run::new();
    train(&one_rank, "tp1", 6, &[]);
    let run = trained();
    let [found, expected] = [run.steps(), one_rank.steps()];
    assert_eq!((found.len(), expected.len()), (6, 6));
    assert!(expected[5].loss < expected[0].loss, "it does not learn");
    for (found, expected) in found.iter().zip(&expected) {
        for (found, expected) in [
            (found.loss, expected.loss),
            (found.grad_norm, expected.grad_norm),
        ] {
            assert!(
                (found - expected).abs() <= 1e-4 * expected,
                "{found} and {expected}"
            );
        }
    }
}

#[test]
fn its_checkpoints_are_exported_imported_compared_and_continued() {
    let run = trained();
    let [hf, back] = ["hf", "back"].map(|name| run.path(name));
    let from = run.path("run");
    let from = text(&from);
    succeed(&["convert", "export", from, text(&hf)]);
    let config = fs::read_to_string(hf.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["architectures"][0], "PhiForCausalLM");
    assert_eq!(config["rope_parameters"]["partial_rotary_factor"], 0.5);
    succeed(&["convert", "import", text(&hf), text(&back)]);
    for other in [&hf, &back] {
        let same = succeed(&["verify", from, text(other), "--json"]);
        assert!(same.contains("lm_head.bias"), "{same}");
    }
    let continued = |model: &str, layout: &str| {
        let prompt = [
            "--prompt-ids",
            "5,17,3",
            "--max-tokens",
            "6",
            "--layout",
            layout,
        ];
        succeed(&[&["generate", model], &prompt[..]].concat())
    };
    assert_eq!(continued(from, "tp2"), continued(from, "tp1"));
    assert_eq!(continued(text(&back), "pp2"), continued(text(&hf), "tp1"));
    let shown = succeed(&["checkpoint", "show", from]);
    assert!(shown.contains("phi"), "{shown}");

    // The `megaburn` command does not have the family.
    let refused = |args: &[&str], why: &str| {
        let ended = megaburn(args);
        assert_eq!(ended.code, Some(2), "{args:?}: {ended:#?}");
        assert!(ended.stderr.contains(why), "{args:?}: {ended:#?}");
    };
    let unknown = "unknown family `phi`, expected one of `gpt2`, `llama`";
    for command in [
        &["convert", "export", from, "unused"][..],
        &["generate", from, "--prompt", "a"],
        &["verify", from, text(&back)],
    ] {
        refused(command, unknown);
        refused(
            command,
            "needs the program that registers it (Cli::with_family)",
        );
    }
    refused(
        &["convert", "import", text(&hf), "unused"],
        "architecture `PhiForCausalLM` is not supported",
    );
    let to_megatron = own(&["checkpoint", "to-megatron", from, "unused"]);
    assert_eq!(to_megatron.code, Some(2), "{to_megatron:#?}");
    let why = "the output head of phi";
    assert!(to_megatron.stderr.contains(why), "{to_megatron:#?}");
    assert!(!Path::new("unused").exists());
}

#[test]
fn its_results_are_those_of_transformers() {
    let hf = fixture("phi");
    let mut args = vec!["verify", text(&hf)];
    for layout in [
        "tp1",
        "tp2-sp",
        "tp4-dp2-sp",
        "pp2",
        "tp2-pp2-sp",
        "dp2",
        "cp2",
    ] {
        args.extend(["--layout", layout]);
    }
    succeed(&args);
}

#[test]
fn a_name_that_is_not_registered_is_refused_with_the_nearest_one() {
    let ended = own(&["train", "--set", "model.family=pih"]);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    for part in [
        "unknown family `pih`",
        "`phi`; a family of another crate",
        "did you mean `phi",
    ] {
        assert!(ended.stderr.contains(part), "{part}: {ended:#?}");
    }
    let schema = succeed(&["config", "schema"]);
    assert!(schema.contains("\"phi\""));
}
