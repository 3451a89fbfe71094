//! Searches for the fastest layout.

use std::fs;

use megaburn::plan::{Gpu, HEADROOM, SearchConfig};
use rstest::rstest;
use serde_json::Value;

use super::{LLAMA, config, plan, root};
use crate::runs::child::{Ended, Ranks};

/// Layouts of four ranks, with a schedule where they have a pipeline.
const LAYOUTS: [(&str, &str); 9] = [
    ("dp4", ""),
    ("tp2-dp2-sp", ""),
    ("tp4-sp", ""),
    ("cp2-dp2", ""),
    ("tp2-cp2-sp", ""),
    ("pp2-dp2", "parallel.schedule=1f1b"),
    ("pp2-dp2", "parallel.schedule=zb-v"),
    ("tp2-pp2-sp", "parallel.schedule=zb-h1"),
    ("pp4", "parallel.schedule=zb-v"),
];

fn search(args: &[&str]) -> Ended {
    Ranks::command(&[&["search"], args].concat())
        .wait_all()
        .remove(0)
}

/// No run that fits is faster than the one that is found, and what is found is what a plan says.
#[rstest]
#[case(8, 16)]
#[case(24, 8)]
fn nothing_that_fits_is_faster(#[case] layers: usize, #[case] samples: usize) {
    let gpu = Gpu::H100;
    let batch = format!("model.layers={layers} data.seq_len=8192");
    let start = config(LLAMA, "dp4", samples / 4, &batch);
    let found = SearchConfig::new(start, 4).search().unwrap();
    let best = &found.best[0];
    let refused: usize = found.refused.iter().map(|kind| kind.count).sum();
    assert_eq!(
        found.candidates,
        found.fit + found.slower + found.do_not_fit + refused,
        "{found:?}"
    );
    let free = HEADROOM * gpu.memory_bytes as f64;
    let mut compared = 0;
    for (layout, schedule) in LAYOUTS {
        let dp = layout.parse::<megaburn::mesh::Layout>().unwrap().dp;
        for (zero, micro_batch) in [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)] {
            if !samples.is_multiple_of(dp * micro_batch) {
                continue;
            }
            for more in ["", "train.fused_linear_cross_entropy=true"] {
                let sets = format!(
                    "{batch} {schedule} {more} parallel.zero={zero} train.micro_batch={micro_batch}"
                );
                let one = config(LLAMA, layout, samples / dp / micro_batch, &sets);
                let planned = plan(one, gpu);
                let fits =
                    |stage: &megaburn::plan::StageMemory| stage.headroom_bytes as f64 >= free;
                if planned.memory.iter().all(fits) {
                    compared += 1;
                    assert!(
                        best.step_ms <= 1.001 * planned.time.step_ms,
                        "{layout} {sets}: {} ms, but found {} with {} ms",
                        planned.time.step_ms,
                        best.flags,
                        best.step_ms
                    );
                }
            }
        }
    }
    assert!(compared > 10, "{compared}");
    for run in &found.best {
        let layout = run.layout.to_string();
        let micro_batch = run
            .settings
            .iter()
            .find_map(|set| set.strip_prefix("train.micro_batch="))
            .map_or(1, |size| size.parse().unwrap());
        let sets = format!("{batch} {}", run.settings.join(" "));
        let passes = samples / run.layout.dp / micro_batch;
        let planned = plan(config(LLAMA, &layout, passes, &sets), gpu);
        assert_eq!(planned.time.step_ms, run.step_ms, "{}", run.flags);
    }
}

/// A search simulates the runs that could be among the fastest, not all that fit.
#[test]
fn few_steps_are_simulated() {
    let start = config(LLAMA, "dp64", 4, "model.layers=32 data.seq_len=8192");
    let found = SearchConfig::new(start, 64).with_top(1).search().unwrap();
    let fitting = found.fit + found.slower;
    assert!(fitting > 100, "{found}");
    // A run's settings are timed one by one, each by one or two simulated steps.
    assert!(found.simulated >= found.fit, "{found:?}");
    assert!(found.simulated < fitting / 2, "{found:?}");
}

#[test]
fn experts_are_divided_in_every_way_that_the_model_permits() {
    let text = format!("{LLAMA}[model.experts]\nnum = 8\ntop_k = 2\n")
        .replace("[model]", "[model]\nfamily = \"mixtral\"\nlayers = 2");
    let start = config(&text, "dp8", 4, "data.seq_len=4096");
    let found = SearchConfig::new(start, 8)
        .with_gpu(Gpu::H200)
        .with_top(60)
        .search()
        .unwrap();
    let has = |ep: usize| found.best.iter().any(|run| run.layout.ep == ep);
    assert!(has(2) && has(4) && has(8), "{found}");
}

#[test]
fn the_command_prints_what_it_found_and_writes_the_fastest() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("found.toml");
    let written = file.to_str().unwrap();
    let path = root().join("configs/llama-3-8b.toml");
    let config = path.to_str().unwrap();
    let args = [config, "--gpus", "8", "--top", "2", "--write", written];
    let ended = search(&args);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let first = ended
        .stdout
        .lines()
        .find(|line| line.starts_with("flags  1"));
    let flags = first.unwrap().trim_start_matches("flags  1 ");
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains(flags), "{text}");
    let again = Ranks::command(&["plan", written]).wait_all().remove(0);
    assert!(again.stdout.contains("verdict  fits"), "{again:?}");

    let ended = search(&args);
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("the file exists"), "{ended:?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), text);
}

/// Days and cost of what was found are those of its plan.
#[test]
fn days_and_cost_are_those_of_a_plan() {
    let path = root().join("configs/llama-3-8b.toml");
    let config = path.to_str().unwrap();
    let whole = ["--tokens", "1T", "--price", "2"];
    let args = [&[config, "--gpus", "8", "--top", "1"], &whole[..]].concat();
    let json = search(&[&args[..], &["--json"]].concat());
    assert_eq!(json.code, Some(0), "{json:?}");
    let found: Value = serde_json::from_str(&json.stdout).unwrap();
    let best = &found["found"]["best"][0];
    let run = &best["run"];
    let layout = best["layout"].as_str().unwrap();
    let mut args = vec!["plan", config, "--layout", layout, "--json"];
    for set in best["settings"].as_array().unwrap() {
        args.extend(["--set", set.as_str().unwrap()]);
    }
    let planned = Ranks::command(&[&args[..], &whole].concat()).wait_all();
    let planned: Value = serde_json::from_str(&planned[0].stdout).unwrap();
    assert_eq!(*run, planned["run"], "{args:?}");

    let text = search(&[config, "--gpus", "8", "--top", "1", "--tokens", "1T"]);
    let without = text.stdout.lines().find(|line| line.contains("tok/s/GPU"));
    assert!(without.unwrap().contains("days  bubble"), "{text:?}");
    let days = format!("{:.1}", run["days"].as_f64().unwrap());
    let row = text.stdout.lines().find(|line| line.contains(&days));
    assert!(row.unwrap().contains(&format!(" {layout} ")), "{text:?}");
    let dollars = format!("${:.0}", run["dollars"].as_f64().unwrap());
    let with = search(&[&[config, "--gpus", "8", "--top", "1"], &whole[..]].concat());
    assert!(with.stdout.contains(&dollars), "{with:?}");
}

#[rstest]
#[case(&["--gpus", "0"], "`--gpus` is 0")]
#[case(&["--tokens", "0"], "write a positive number")]
#[case(&["--gpu", "h9"], "`--gpu h9` is not known")]
#[case(&["--set", "model.hiden=3"], "model.hiden")]
fn bad_input_is_named(#[case] args: &[&str], #[case] what: &str) {
    let path = root().join("configs/llama-tiny.toml");
    let ended = search(&[&[path.to_str().unwrap()], args].concat());
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains(what), "{ended:?}");
}

/// Ranks on the CPU train what was found, and nothing of it is left.
#[test]
fn the_fastest_are_measured() {
    let path = root().join("configs/llama-tiny.toml");
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text.txt");
    fs::write(&text, "All that is gold does not glitter. ".repeat(400)).unwrap();
    let data = format!("data.path={}", text.display());
    let small = [
        "model.hidden=32",
        "model.ffn=48",
        "model.layers=2",
        "model.heads=2",
        "model.kv_heads=2",
        "data.seq_len=16",
        "train.global_batch=4",
        "train.micro_batch=1",
        &data,
    ];
    let mut args = vec![
        path.to_str().unwrap(),
        "--gpus",
        "2",
        "--measure",
        "2",
        "--json",
    ];
    args.extend(["--device", "cpu"]);
    for set in small {
        args.extend(["--set", set]);
    }
    let ended = search(&args);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let found: Value = serde_json::from_str(&ended.stdout).unwrap();
    let measured = found["measured"].as_array().unwrap();
    assert_eq!(measured.len(), 2, "{found}");
    let times: Vec<f64> = measured
        .iter()
        .map(|run| run["step_ms"].as_f64().unwrap_or_else(|| panic!("{run}")))
        .collect();
    let fastest = usize::from(times[1] < times[0]);
    assert_eq!(found["best"]["flags"], measured[fastest]["flags"]);

    // A run that cannot start is named.
    args.extend(["--set", "data.path=nowhere.txt"]);
    let ended = search(&args);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let found: Value = serde_json::from_str(&ended.stdout).unwrap();
    let error = found["measured"][0]["error"].as_str().unwrap();
    assert!(error.contains("nowhere.txt"), "{error}");
}
