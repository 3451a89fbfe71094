//! `megaburn plan CONFIG` on the command line.

use std::{fs, time::Instant};

use rstest::rstest;
use serde_json::Value;

use super::root;
use crate::runs::child::{Ended, Ranks};

fn plan(name: &str, args: &[&str]) -> Ended {
    let config = root()
        .join(format!("configs/{name}.toml"))
        .display()
        .to_string();
    let args = [&["plan", &config], args].concat();
    Ranks::command(&args).wait_all().remove(0)
}

/// The text of a plan that fits, as `docs/plan.md` shows it.
#[test]
fn a_plan_is_printed_as_the_page_shows_it() {
    let ended = plan(
        "llama-3-70b",
        &["--gpu", "h200", "--tokens", "1T", "--price", "2.5"],
    );
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let page = fs::read_to_string(root().join("docs/plan.md")).unwrap();
    assert!(
        page.contains(&format!("```text\n{}```", ended.stdout)),
        "docs/plan.md must show:\n{}",
        ended.stdout
    );
}

#[test]
fn a_plan_that_does_not_fit_says_what_makes_it_fit() {
    let ended = plan("llama-3-8b", &["--gpus", "8", "--set", "parallel.zero=0"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let text = &ended.stdout;
    assert!(text.contains("verdict  does not fit: "), "{text}");
    assert!(text.contains("change   --set parallel.zero="), "{text}");
    let ended = plan("llama-3-70b", &["--gpus", "1", "--layout", "tp1"]);
    let text = &ended.stdout;
    assert!(
        text.contains("change   no change of up to four settings"),
        "{text}"
    );
}

#[test]
fn json_has_the_same_numbers_with_their_units() {
    let dir = tempfile::tempdir().unwrap();
    let picture = dir.path().join("plan.svg");
    let picture = picture.to_str().unwrap();
    let args = ["--gpu", "h200", "--price", "2", "--json", "--svg", picture];
    let ended = plan("llama-3-70b", &args);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let plan: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(plan["layout"], "tp8-pp4-dp2-sp");
    assert_eq!(plan["model"]["parameters"], 70_553_706_496_u64);
    assert_eq!(plan["gpu"]["memory_bytes"].as_u64().unwrap() >> 30, 139);
    assert_eq!(plan["memory"].as_array().unwrap().len(), 4);
    let number = |path: &[&str]| -> f64 {
        let value = path.iter().fold(&plan, |value, key| &value[*key]);
        value
            .as_f64()
            .unwrap_or_else(|| panic!("{path:?} in {plan}"))
    };
    let seconds = number(&["time", "step_ms"]) / 1e3;
    let tokens = number(&["batch", "tokens"]);
    let rate = number(&["tokens_per_second_per_gpu"]);
    assert!((tokens / seconds / 64.0 / rate - 1.0).abs() < 1e-9);
    let hours = number(&["run", "gpu_hours"]);
    assert!((hours / 64.0 / 24.0 / number(&["run", "days"]) - 1.0).abs() < 1e-9);
    assert_eq!(number(&["run", "dollars"]), 2.0 * hours);
    // The parts of a step add up to it.
    let parts = plan["time"].as_object().unwrap().iter();
    let parts = parts.filter(|(name, _)| *name != "step_ms");
    let sum: f64 = parts.map(|(_, ms)| ms.as_f64().unwrap()).sum();
    assert!(
        (sum / number(&["time", "step_ms"]) - 1.0).abs() < 1e-6,
        "{sum}"
    );
    let drawn = fs::read_to_string(picture).unwrap();
    assert!(drawn.starts_with("<svg ") && drawn.ends_with("</svg>\n"));
    assert_eq!(drawn.matches("stage ").count(), 4, "a bar for each stage");
    assert_eq!(drawn.matches("<svg ").count(), 2, "the pipeline is inside");
}

#[rstest]
#[case(&["--gpu", "v100"], "`--gpu v100` is not known: choose one of a100, h100, h200, b200")]
#[case(&["--gpus", "12"], "12")]
#[case(&["--layout", "tp8-pp4-dp4-sp", "--gpus", "64"], "64")]
#[case(&["--layout", "tp3-sp"], "attention heads 64 is not divisible by tp 3")]
#[case(&["--set", "parallel.zer=1"], "unknown key `parallel.zer`")]
#[case(&["--set", "precision.recipe=tensorwise", "--gpu", "a100"], "no units for products in FP8")]
#[case(&["--tokens", "many"], "write a positive number, such as 2.5, 300B or 15T")]
#[case(&["--schedule", "1f1b"], "cannot be used with")]
fn bad_input_is_one_clear_error(#[case] args: &[&str], #[case] message: &str) {
    let ended = plan("llama-3-70b", args);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains(message), "{ended:?}");
    assert_eq!(ended.stderr.matches("error: ").count(), 1, "{ended:?}");
    assert_eq!(ended.stdout, "");
}

#[test]
fn a_configuration_that_does_not_exist_is_named() {
    let ended = plan("no-such-model", &[]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("cannot read `"), "{ended:?}");
    assert!(
        ended.stderr.contains("no-such-model.toml`: No such file"),
        "{ended:?}"
    );
}

/// A plan of a large model is fast even in this unoptimised build.
#[test]
fn a_plan_takes_seconds_at_most() {
    let start = Instant::now();
    let sets = [
        "--layout",
        "tp8-pp16-dp128-sp",
        "--set",
        "train.global_batch=2048",
    ];
    let sets = [&sets[..], &["--set", "model.layers=128"]].concat();
    let ended = plan("llama-3-70b", &sets);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("16384 x NVIDIA H100"), "{ended:?}");
    let taken = start.elapsed().as_secs_f64();
    assert!(taken < 20.0, "{taken} s");
}
