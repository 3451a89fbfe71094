//! A resumed run reports changed settings, and keeps the settings with which it was started.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{
    config::refused::assert_refused,
    models::round_trip::{megaburn, succeed, text},
    models::transformers::fixture,
    runs::child::{Ended, Ranks},
};
use megaburn_test_support::{
    run::{Run, tensor_files},
    text::{fresh_seed, write_random_text},
};

pub(crate) fn start(run: &Run, steps: u64, sets: &[&str]) -> Ended {
    Ranks::threads(&run.args("tp1", steps, sets))
        .wait_all()
        .remove(0)
}

pub(crate) fn resume(run: &Run, more: &[&str]) -> Ended {
    let dir = run.path("run");
    megaburn(&[&["train", "--resume", text(&dir)], more].concat())
}

#[track_caller]
pub(crate) fn assert_done(ended: &Ended) -> &str {
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    &ended.stdout
}

/// The lines of `metrics.jsonl` that record starts.
fn starts(run: &Run) -> Vec<Value> {
    let metrics = fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    let lines = metrics
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    lines
        .filter(|line: &Value| line.get("start").is_some())
        .collect()
}

#[test]
fn what_changes_numbers_is_told() {
    let run = Run::new();
    assert_done(&start(&run, 2, &[]));
    let changed = [
        "optimizer.clip_grad=0.5",
        "train.hidden_dropout=0.1",
        "optimizer.eps=1e-6",
    ];
    let ended = start(&run, 3, &changed);
    let told: Vec<&str> = assert_done(&ended)
        .lines()
        .filter(|line| line.starts_with("changed "))
        .collect();
    let expected = [
        "changed  optimizer.clip_grad: 1.0 -> 0.5",
        "changed  optimizer.eps: 1e-8 -> 1e-6",
        "changed  train.hidden_dropout: 0.0 -> 0.1",
        "changed  train.steps: 2 -> 3",
    ];
    assert_eq!(told, expected, "{ended:#?}");
    let first = json!({ "key": "optimizer.clip_grad", "old": "1.0", "new": "0.5" });
    let starts = starts(&run);
    assert_eq!(
        (&starts[0]["from_step"], &starts[1]["from_step"]),
        (&json!(0), &json!(2))
    );
    assert_eq!(
        (&starts[0]["changes"], &starts[1]["changes"][0]),
        (&json!([]), &first)
    );
    assert_eq!(starts[1]["changes"].as_array().unwrap().len(), 4);
    // The next start is compared with the changed settings.
    let ended = start(
        &run,
        4,
        &[&changed[..], &["parallel.zero=1", "train.log_interval=1"]].concat(),
    );
    assert_eq!(
        assert_done(&ended).matches("changed ").count(),
        1,
        "{ended:#?}"
    );
    let ended = start(
        &run,
        4,
        &[&changed[..], &["data.validation_fraction=0.050001"]].concat(),
    );
    assert_refused(
        &ended,
        "is from another run: data.validation_fraction is 0.05 there and 0.050001 here",
    );
}

#[test]
fn a_run_is_resumed_by_its_folder_alone_wherever_it_was_moved() {
    let whole = Run::new();
    let run = Run::new();
    fs::copy(whole.path("text.txt"), run.path("text.txt")).unwrap();
    let sets = [
        "train.dtype=bf16",
        "optimizer.end_weight_decay=0.5",
        "optimizer.weight_decay_steps=6",
    ];
    assert_done(&start(&whole, 6, &sets));
    assert_done(&start(&run, 3, &sets));
    // The default command would train another model on another text.
    let ended = resume(&run, &["--steps", "6"]);
    let out = assert_done(&ended);
    assert!(
        out.contains("resumed  after step 3 ") && out.contains("finished 6 steps"),
        "{out}"
    );
    assert_eq!(
        out.matches("changed ").collect::<Vec<_>>().len(),
        1,
        "only the steps: {out}"
    );
    assert_eq!(whole.numbers(), run.numbers());
    assert_eq!(whole.tensors(6), run.tensors(6));

    fs::rename(run.path("run"), run.path("moved")).unwrap();
    let moved = run.path("moved");
    let out = succeed(&[
        "train",
        "--resume",
        text(&moved),
        "--steps",
        "7",
        "--layout",
        "dp2",
    ]);
    assert!(
        out.contains("dp2: 2 ranks") && out.contains("after step 6 "),
        "{out}"
    );
    assert!(!run.path("run").exists());
    let refused = [
        (
            vec!["--set", "run.dir=elsewhere"],
            "`run.dir` is elsewhere: it must be omitted with",
        ),
        (vec!["--fresh"], "cannot be used with"),
    ];
    for (more, message) in refused {
        let ended = megaburn(&[&["train", "--resume", text(&moved)], &more[..]].concat());
        assert_refused(&ended, message);
    }
    let nothing = run.path("nothing");
    let ended = megaburn(&["train", "--resume", text(&nothing)]);
    assert_refused(
        &ended,
        "is not a run that can be resumed: it has no config.toml",
    );
    assert!(!nothing.exists());
}

#[test]
fn a_start_that_trains_nothing_says_so_and_leaves_the_configuration() {
    let run = Run::new();
    assert_done(&start(&run, 4, &[]));
    let config = || fs::read_to_string(run.path("run/config.toml")).unwrap();
    let before = config();
    let ended = start(&run, 2, &["optimizer.clip_grad=0.5"]);
    let out = assert_done(&ended);
    let said = "4 steps are done, and train.steps is 2: there is nothing to train, and config.toml is left unchanged";
    assert!(
        out.contains(said) && out.contains("finished 4 steps"),
        "{ended:#?}"
    );
    assert_eq!(config(), before);
    // The defaults' changes were not applied.
    assert!(!out.contains("changed "), "{out}");
    assert_eq!(starts(&run)[1]["changes"], json!([]));
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(from.join(file), to.join(file)).unwrap();
    }
}

/// Starts a run from the model `init`.
fn start_from(run: &Run, init: &str, steps: &str, more: &[&str]) -> Ended {
    let dir = run.path("run");
    let data = run.path("text.txt");
    let dir = format!("run.dir={}", dir.display());
    let data = format!("data.path={}", data.display());
    let args = [
        "train", "--init", init, "--layout", "tp1", "--steps", steps, "--set", &dir,
    ];
    let small = [
        "--set",
        &data,
        "--set",
        "train.eval_batches=1",
        "--set",
        "generate.tokens=0",
    ];
    megaburn(&[&args[..], &small, more].concat())
}

#[test]
fn another_model_to_start_from_is_refused_and_the_same_is_said_not_to_be_read() {
    let run = Run::new();
    write_random_text(&run.path("text.txt"), 20_000, fresh_seed());
    let first = run.path("first");
    let other = run.path("other");
    copy(&fixture("qwen3-tied"), &first);
    copy(&fixture("qwen3-tied"), &other);
    let ended = start_from(&run, text(&first), "1", &[]);
    let tuning = "tuning   optimizer.lr 2e-5, optimizer.min_lr 2e-6, optimizer.warmup_fraction 0.03, data.seq_len 128";
    assert!(assert_done(&ended).contains(tuning), "{ended:#?}");
    let config = fs::read_to_string(run.path("run/config.toml")).unwrap();
    assert!(
        config.contains("\nlr = 2e-5") || config.contains("\nlr = 0.00002"),
        "{config}"
    );
    for init in [
        text(&other),
        "meta-llama/Llama-3.2-1B",
        text(&fixture("llama-linear")),
    ] {
        let ended = start_from(&run, init, "2", &[]);
        assert_refused(&ended, &format!("so it cannot start from `{init}` now"));
        let advice = ["megaburn train --resume ", "run.dir=...", "--fresh"];
        let places = advice.map(|text| ended.stderr.find(text).unwrap());
        assert!(places.is_sorted(), "{ended:#?}");
    }
    assert_eq!(
        fs::read_to_string(run.path("run/config.toml")).unwrap(),
        config
    );
    let ended = start_from(&run, text(&first), "2", &["--set", "optimizer.lr=1e-5"]);
    let out = assert_done(&ended);
    assert!(out.contains("which is not read again"), "{ended:#?}");
    assert!(out.contains("changed  optimizer.lr: 2e-5 -> 1e-5"), "{out}");

    // A run that did not start from a model.
    let plain = Run::new();
    assert_done(&start(&plain, 1, &[]));
    let init = format!("model.init={}", first.display());
    let args = ["train", "--set", &init, "--set"];
    let dir = format!("run.dir={}", plain.path("run").display());
    let ended = megaburn(&[&args[..], &[dir.as_str()]].concat());
    assert_refused(&ended, "has checkpoints and started from no other model");
}

#[test]
fn a_tokenizer_that_cannot_be_read_is_refused_unless_bytes_are_meant() {
    let run = Run::new();
    write_random_text(&run.path("text.txt"), 20_000, fresh_seed());
    let model = run.path("model");
    copy(&fixture("qwen3-tied"), &model);
    fs::write(model.join("tekken.json"), "{}").unwrap();
    let ended = start_from(&run, text(&model), "1", &[]);
    assert_refused(&ended, "tekken.json` cannot be read");
    assert_refused(&ended, "`data.tokenizer=byte` to train on bytes");
    assert!(!run.path("run").exists());
    let ended = start_from(&run, text(&model), "1", &["--set", "data.tokenizer=byte"]);
    assert!(
        assert_done(&ended).contains("tokens are bytes"),
        "{ended:#?}"
    );
}

fn shorten(checkpoint: &Path) {
    let path = tensor_files(checkpoint).remove(0);
    let bytes = fs::read(&path).unwrap();
    fs::write(path, &bytes[..100]).unwrap();
}

/// Damages a tensor file without changing its length.
fn flip(checkpoint: &Path) {
    let path = tensor_files(checkpoint).remove(0);
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_damaged_newest_checkpoint_hides_no_older_whole_one_from_any_reader() {
    let run = Run::new();
    write_random_text(&run.path("text.txt"), 20_000, fresh_seed());
    assert_done(&start(
        &run,
        3,
        &["train.checkpoint_interval=1", "train.keep_checkpoints=9"],
    ));
    let step = |step: u64| -> PathBuf { run.checkpoints().join(format!("step-{step:08}")) };
    shorten(&step(3));
    flip(&step(2));
    let dir = run.path("run");
    let hf = run.path("hf");
    let next = Run::new();
    fs::copy(run.path("text.txt"), next.path("text.txt")).unwrap();
    let readers = [
        megaburn(&["generate", text(&dir), "--prompt", "a", "--max-tokens", "2"]),
        megaburn(&[
            "generate",
            text(&dir),
            "--prompt",
            "a",
            "--max-tokens",
            "2",
            "--layout",
            "tp2",
        ]),
        megaburn(&["convert", "export", text(&dir), text(&hf)]),
        start_from(&next, text(&dir), "1", &[]),
    ];
    for ended in &readers {
        assert_done(ended);
        for step in ["step-00000003", "step-00000002"] {
            assert!(
                ended.stderr.contains(&format!("{step} is refused")),
                "{ended:#?}"
            );
        }
        assert_eq!(ended.stderr.matches("is refused").count(), 2, "{ended:#?}");
    }
    let ended = megaburn(&["verify", text(&step(1)), text(&hf)]);
    assert_eq!(ended.code, Some(0), "the export is step 1: {ended:#?}");
    let config = fs::read_to_string(next.path("run/config.toml")).unwrap();
    assert!(
        config.contains("run/checkpoints/step-00000001"),
        "pinned to step 1: {config}"
    );

    // The run that started from it no longer needs it, nor its own newest checkpoint.
    assert_done(&start_from(&next, text(&dir), "2", &[]));
    fs::rename(&dir, run.path("gone")).unwrap();
    shorten(&next.checkpoints().join("step-00000002"));
    let ended = start_from(&next, text(&dir), "2", &[]);
    assert!(assert_done(&ended).contains("after step 1 "), "{ended:#?}");
    for step in [1, 2] {
        shorten(&next.checkpoints().join(format!("step-{step:08}")));
    }
    let ended = start_from(&next, text(&dir), "2", &[]);
    assert_refused(&ended, "is damaged, and no other checkpoint is intact");
}

/// Reading `/proc/self/mem` at its start gives EIO to any reader.
#[cfg(target_os = "linux")]
#[test]
fn an_error_that_is_no_damage_uses_no_older_checkpoint_and_cuts_no_metrics() {
    let run = Run::new();
    assert_done(&start(&run, 3, &["train.checkpoint_interval=1"]));
    let metrics = || fs::read(run.path("run/metrics.jsonl")).unwrap();
    let before = metrics();
    let manifest = run.checkpoints().join("step-00000003/manifest.json");
    fs::rename(&manifest, run.path("aside")).unwrap();
    std::os::unix::fs::symlink("/proc/self/mem", &manifest).unwrap();
    let dir = run.path("run");
    let generate = |path: &Path| megaburn(&["generate", text(path), "--prompt", "a"]);
    // The model may be named by its run or by its checkpoint.
    let step = manifest.parent().unwrap();
    for ended in [start(&run, 4, &[]), generate(&dir), generate(step)] {
        assert_eq!(ended.code, Some(1), "{ended:#?}");
        assert!(
            ended.stderr.contains("step-00000003/manifest.json: "),
            "{ended:#?}"
        );
        assert!(
            ended.stderr.contains("error: host ") && ended.stderr.contains("not damage"),
            "{ended:#?}"
        );
        assert!(metrics() == before, "metrics were cut");
    }
    fs::remove_file(&manifest).unwrap();
    fs::rename(run.path("aside"), &manifest).unwrap();
    assert!(assert_done(&start(&run, 4, &[])).contains("after step 3 "));

    let model = run.path("model");
    copy(&fixture("qwen3-tied"), &model);
    fs::remove_file(model.join("config.json")).unwrap();
    std::os::unix::fs::symlink("/proc/self/mem", model.join("config.json")).unwrap();
    let ended = generate(&model);
    assert_eq!(ended.code, Some(1), "{ended:#?}");
    assert!(ended.stderr.contains("model/config.json: "), "{ended:#?}");
}

#[test]
fn a_text_that_outgrows_the_models_positions_is_told() {
    let hf = fixture("gpt2");
    let ask = |tokens| {
        let args = [
            "generate",
            text(&hf),
            "--prompt-ids",
            "1,2,3",
            "--ignore-eos",
            "--max-tokens",
        ];
        megaburn(&[&args[..], &[tokens]].concat())
    };
    assert_eq!(assert_done(&ask("126")).lines().count(), 1);
    assert!(ask("126").stderr.is_empty());
    let ended = ask("127");
    assert!(
        ended
            .stderr
            .contains("130 tokens, but the model has 128 positions"),
        "{ended:#?}"
    );
}
