//! Statistics of layers.

use std::fs;

use megaburn_test_support::run::Run;
use rstest::rstest;
use serde_json::Value;

use super::train;
use crate::runs::child::Ranks;

const INTERVAL: &str = "log.layer_statistics_interval=2";

/// The lines of statistics of a run.
fn lines(run: &Run) -> Vec<Value> {
    let text = fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    lines
        .filter(|line: &Value| line.get("layer_statistics").is_some())
        .collect()
}

fn trained(layout: &str, sets: &[&str]) -> (Run, Vec<Value>) {
    let run = Run::new();
    Ranks::threads(&run.args(layout, 4, &[&[INTERVAL], sets].concat())).finish();
    let found = lines(&run);
    (run, found)
}

/// Whether all numbers of both lines are equal, but for rounding.
fn check_close(a: &Value, b: &Value, path: &str) {
    match (a, b) {
        (Value::Object(a), Value::Object(other)) => {
            assert_eq!(a.len(), other.len(), "{path}");
            for (key, value) in a {
                check_close(value, &other[key], &format!("{path}.{key}"));
            }
        }
        (Value::Array(a), Value::Array(b)) => {
            assert_eq!(a.len(), b.len(), "{path}");
            for (at, (a, b)) in a.iter().zip(b).enumerate() {
                check_close(a, b, &format!("{path}[{at}]"));
            }
        }
        (Value::Number(a), Value::Number(b)) => {
            let [a, b] = [a, b].map(|number| number.as_f64().unwrap());
            // A gradient that is zero but for rounding may be zero.
            let least = if path.ends_with("zeros") { 1e-3 } else { 1e-6 };
            assert!(
                (a - b).abs() <= 2e-3 * a.abs() + least,
                "{path}: {a} and {b}"
            );
        }
        _ => assert_eq!(a, b, "{path}"),
    }
}

#[rstest]
#[case("tp2-dp2-sp", &[])]
#[case("tp2", &["recompute.method=uniform"])]
#[case("tp4-pp2", &["parallel.zero=1"])]
#[case("dp2-cp2", &["parallel.zero=3"])]
#[case("dp4", &["parallel.zero=2", "parallel.zero_ranks=2"])]
fn layers_have_the_statistics_of_one_rank(#[case] layout: &str, #[case] sets: &[&str]) {
    let (_, expected) = trained("tp1", &[]);
    let (_, found) = trained(layout, sets);
    let steps: Vec<u64> = found
        .iter()
        .map(|line| line["layer_statistics"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, [2, 4]);
    for (found, expected) in found.iter().zip(&expected) {
        check_close(expected, found, layout);
    }
    let layers = expected[0]["layers"].as_array().unwrap();
    let names: Vec<&str> = layers
        .iter()
        .map(|layer| layer["layer"].as_str().unwrap())
        .collect();
    assert!(
        names.starts_with(&["blocks.0", "blocks.1", "embedding"]),
        "{names:?}"
    );
    for layer in layers {
        let is_block = layer["layer"].as_str().unwrap().starts_with("blocks");
        assert_eq!(layer.get("activations").is_some(), is_block, "{layer}");
        for of in ["gradients", "weights"] {
            assert!(layer[of]["norm"].as_f64().unwrap() > 0.0, "{layer}");
            assert_eq!(layer[of]["non_finite"], 0.0);
        }
    }
}

#[test]
fn experts_count_once_over_the_ranks_that_hold_them() {
    let sets = [
        "model.family=mixtral",
        "model.experts.num=4",
        "model.experts.top_k=2",
    ];
    let (_, expected) = trained("tp1", &sets);
    let (_, found) = trained("dp2-ep2", &sets);
    for (found, expected) in found.iter().zip(&expected) {
        check_close(expected, found, "dp2-ep2");
    }
    let zero = [&sets[..], &["parallel.zero=1"]].concat();
    let (_, found) = trained("tp2-dp2-ep2-sp", &zero);
    for (found, expected) in found.iter().zip(&expected) {
        check_close(expected, found, "tp2-dp2-ep2-sp");
    }
}

#[test]
fn norms_are_those_of_the_step_and_no_number_changes() {
    let sets = ["train.log_params_norm=true"];
    let (run, found) = trained("tp2-dp2-sp", &sets);
    let plain = Run::new();
    Ranks::threads(&plain.args("tp2-dp2-sp", 4, &sets)).finish();
    assert_eq!(run.numbers(), plain.numbers());
    assert!(lines(&plain).is_empty());
    for line in found {
        let step = line["layer_statistics"].as_u64().unwrap();
        let metrics = run
            .steps()
            .into_iter()
            .find(|metrics| metrics.step == step)
            .unwrap();
        let total = |of: &str| {
            let layers = line["layers"].as_array().unwrap().iter();
            let norms = layers.map(|layer| layer[of]["norm"].as_f64().unwrap());
            norms.map(|norm| norm * norm).sum::<f64>().sqrt()
        };
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-4 * b, "{a} and {b}");
        close(total("gradients"), metrics.grad_norm);
        close(total("weights"), metrics.params_norm.unwrap());
    }
}

/// Lines of steps that are trained again are not there twice.
#[test]
fn a_resumed_run_has_each_line_once() {
    let run = Run::new();
    train(&run, 4, &[INTERVAL, "train.checkpoint_interval=3"]);
    fs::remove_dir_all(run.checkpoints().join("step-00000004")).unwrap();
    train(&run, 6, &[INTERVAL]);
    let steps: Vec<u64> = lines(&run)
        .iter()
        .map(|line| line["layer_statistics"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, [2, 4, 6]);
}
