//! Hugging Face models that are imported, trained, used to generate, and exported on the command
//! line.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rstest::rstest;
use serde_json::Value;

use crate::{
    models::transformers::{each_fixture, each_generating, fixture},
    runs::child::{Ended, Ranks},
};
use megaburn_test_support::{
    run::Run,
    text::{fresh_seed, write_random_text},
};

pub(crate) fn megaburn(args: &[&str]) -> Ended {
    Ranks::command(args).wait_all().remove(0)
}

pub(crate) fn succeed(args: &[&str]) -> String {
    let ended = megaburn(args);
    assert_eq!(ended.code, Some(0), "{args:?}: {ended:#?}");
    ended.stdout
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

each_fixture! {
    fn a_model_comes_back_byte_for_byte(name, _) {
        assert_comes_back(name);
    }
}

pub(crate) fn assert_comes_back(name: &str) {
    let hf = fixture(name);
    let dir = tempfile::tempdir().unwrap();
    let [checkpoint, back, sharded, half] =
        ["checkpoint", "back", "sharded", "half"].map(|name| dir.path().join(name));
    succeed(&["convert", "import", text(&hf), text(&checkpoint)]);
    succeed(&["convert", "export", text(&checkpoint), text(&back)]);
    let found = fs::read(back.join("model.safetensors")).unwrap();
    assert!(
        found == fs::read(hf.join("model.safetensors")).unwrap(),
        "other bytes"
    );
    for name in ["config.json", "generation_config.json"] {
        assert_eq!(
            fs::read(back.join(name)).ok(),
            fs::read(hf.join(name)).ok(),
            "{name}"
        );
    }
    succeed(&[
        "convert",
        "export",
        text(&checkpoint),
        text(&sharded),
        "--max-shard-gb",
        "4e-5",
    ]);
    assert!(sharded.join("model.safetensors.index.json").is_file());
    for other in [&back, &sharded, &checkpoint] {
        succeed(&["verify", text(&hf), text(other)]);
        succeed(&["verify", text(other), text(&hf), "--json"]);
    }
    succeed(&[
        "convert",
        "import",
        text(&sharded),
        text(&half),
        "--dtype",
        "bf16",
    ]);
    let ended = megaburn(&["verify", text(&checkpoint), text(&half), "--json"]);
    assert_eq!(ended.code, Some(1));
    for line in ended.stdout.lines() {
        let tensor: Value = serde_json::from_str(line).unwrap();
        let stays = tensor["name"].as_str().unwrap().ends_with("router.bias");
        assert_eq!(
            tensor["b"]["dtype"],
            if stays { "f32" } else { "bf16" },
            "{tensor}"
        );
        // A bf16 keeps 8 bits, and the values here are below 2.
        assert!(
            tensor["max_abs"].as_f64().unwrap() < 1.0 / 128.0,
            "{tensor}"
        );
    }
}

#[derive(serde::Deserialize)]
struct Continuations {
    prompts: Vec<Vec<u32>>,
    continuations: Vec<Vec<u32>>,
}

each_generating! {
    fn greedy_text_is_that_of_transformers(name, most) {
        assert_writes_what_transformers_does(name, ["tp1", "tp2", &format!("tp{most}"), "pp2"]);
    }
}

/// Compares generated tokens with Transformers. The third layout is used on a checkpoint.
pub(crate) fn assert_writes_what_transformers_does(name: &str, layouts: [&str; 4]) {
    let hf = fixture(name);
    let file = fs::read_to_string(hf.join("continuations.json")).unwrap();
    let Continuations {
        prompts,
        continuations,
    } = serde_json::from_str(&file).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = dir.path().join("checkpoint");
    succeed(&["convert", "import", text(&hf), text(&checkpoint)]);
    let tokens = continuations[0].len().to_string();
    let prompts: Vec<String> = prompts
        .iter()
        .map(|ids| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(","))
        .collect();
    for (model, layout) in [&hf, &hf, &checkpoint, &hf].into_iter().zip(layouts) {
        let mut args = vec!["generate", text(model), "--layout", layout, "--json"];
        args.extend(["--ignore-eos", "--max-tokens", &tokens]);
        prompts
            .iter()
            .for_each(|ids| args.extend(["--prompt-ids", ids]));
        let found = succeed(&args);
        for (line, expected) in found.lines().zip(&continuations) {
            let found: Value = serde_json::from_str(line).unwrap();
            assert_eq!(
                found["ids"],
                serde_json::json!(expected),
                "{name}, {layout}"
            );
        }
        assert_eq!(found.lines().count(), continuations.len());
    }
}

/// A run on random text that starts from `init`.
pub(crate) struct Started {
    run: Run,
    init: String,
}

impl Started {
    pub(crate) fn new(init: &Path) -> Self {
        let run = Run::new();
        write_random_text(&run.path("text.txt"), 20_000, fresh_seed());
        Self {
            run,
            init: format!("model.init={}", init.display()),
        }
    }

    pub(crate) fn train(&self, layout: &str, steps: u64, sets: &[&str]) -> Ended {
        let dir = self.run.path("run");
        let data = self.run.path("text.txt");
        let mut args: Vec<String> = ["train", "--layout", layout, "--steps"]
            .map(String::from)
            .into();
        args.push(steps.to_string());
        let fixed = [
            format!("run.dir={}", dir.display()),
            format!("data.path={}", data.display()),
            self.init.clone(),
        ];
        let sizes = [
            "data.seq_len=16",
            "train.global_batch=4",
            "train.micro_batch=1",
            "optimizer.warmup_steps=0",
            "optimizer.decay_steps=8",
            "generate.tokens=4",
        ];
        let sets = fixed
            .iter()
            .map(String::as_str)
            .chain(sizes)
            .chain(sets.iter().copied());
        args.extend(sets.flat_map(|set| ["--set".to_string(), set.to_string()]));
        megaburn(&args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The path of a file next to the run's folder, which is `run`.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.run.path(name)
    }

    pub(crate) fn losses(&self) -> Vec<f64> {
        self.run.steps().iter().map(|step| step.loss).collect()
    }
}

#[test]
fn a_run_starts_from_a_model_resumes_and_is_exported() {
    // The model's vocabulary holds the 260 ids of the byte tokenizer.
    let hf = fixture("qwen3-tied");
    let dir = tempfile::tempdir().unwrap();
    let [checkpoint, half, back] = ["checkpoint", "half", "back"].map(|name| dir.path().join(name));
    succeed(&["convert", "import", text(&hf), text(&checkpoint)]);
    succeed(&[
        "convert",
        "import",
        text(&hf),
        text(&half),
        "--dtype",
        "bf16",
    ]);

    let whole = Started::new(&hf);
    let ended = whole.train("tp1", 4, &[]);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    assert!(ended.stdout.contains("qwen3"), "{ended:#?}");
    for (init, layout, tolerance) in [
        (&hf, "tp2-dp2-sp", 1e-5),
        (&checkpoint, "tp4", 1e-5),
        (&half, "dp2", 2e-3),
    ] {
        let split = Started::new(init);
        fs::copy(whole.run.path("text.txt"), split.run.path("text.txt")).unwrap();
        for steps in [2, 4] {
            let ended = split.train(layout, steps, &[]);
            assert_eq!(ended.code, Some(0), "{ended:#?}");
            assert_eq!(
                ended.stdout.contains("after step 2 "),
                steps == 4,
                "{ended:#?}"
            );
        }
        for (found, expected) in split.losses().iter().zip(whole.losses()) {
            let relative = (found - expected).abs() / expected;
            assert!(
                relative <= tolerance,
                "{layout}: {found}, on one rank {expected}"
            );
        }
        assert_eq!(split.losses().len(), 4);
    }

    let run = whole.run.path("run");
    succeed(&["convert", "export", text(&run), text(&back)]);
    let config = |folder: &Path| -> Value {
        let mut json: Value =
            serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
        json.as_object_mut()
            .unwrap()
            .retain(|key, _| !key.ends_with("_token_id"));
        json
    };
    assert_eq!(config(&back), config(&hf));
    // The model was trained on bytes, so this is the byte tokenizer's id.
    let tokens: Value =
        serde_json::from_slice(&fs::read(back.join("generation_config.json")).unwrap()).unwrap();
    assert_eq!(tokens["eos_token_id"], 257);
    let ended = megaburn(&["verify", text(&hf), text(&back)]);
    assert_eq!(ended.code, Some(1), "training changes the weights");
    assert!(!ended.stdout.contains("only in"), "{ended:#?}");
    succeed(&["verify", text(&run), text(&back)]);
    let again = dir.path().join("again");
    succeed(&["convert", "import", text(&back), text(&again)]);
    succeed(&["verify", text(&run), text(&again)]);
    // A run starts from another run, and is used to generate.
    let next = Started::new(&run);
    assert_eq!(
        next.train("tp2", 1, &["train.global_batch=2"]).code,
        Some(0)
    );
    let found = succeed(&[
        "generate",
        text(&run),
        "--prompt",
        "ab",
        "--max-tokens",
        "3",
        "--json",
    ]);
    assert_eq!(
        serde_json::from_str::<Value>(&found).unwrap()["prompt_ids"],
        serde_json::json!([97, 98])
    );
}

#[test]
fn a_run_that_has_begun_needs_its_model_no_more_until_it_begins_anew() {
    let dir = tempfile::tempdir().unwrap();
    let hf = dir.path().join("hf");
    fs::create_dir(&hf).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture("qwen3-tied").join(file), hf.join(file)).unwrap();
    }
    let generation = hf.join("generation_config.json");
    fs::write(&generation, r#"{"eos_token_id": 111}"#).unwrap();
    let started = Started::new(&hf);
    assert_eq!(started.train("tp2", 2, &[]).code, Some(0));
    fs::rename(&hf, dir.path().join("elsewhere")).unwrap();
    let ended = started.train("dp2", 4, &[]);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    assert!(ended.stdout.contains("after step 2 "), "{ended:#?}");
    let config = started.run.path("run/config.toml");
    succeed(&["train", "--config", text(&config), "--steps", "5"]);
    let ended = started.train("dp2", 4, &["run.seed=9"]);
    assert_eq!(ended.code, Some(2), "another order of samples is refused");
    // A fresh start needs the model; nothing of the first start must remain then.
    let args = ["train", "--config", text(&config), "--fresh"];
    let ended = megaburn(&args);
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("is not a folder"), "{ended:#?}");
    fs::rename(dir.path().join("elsewhere"), &hf).unwrap();
    fs::remove_file(&generation).unwrap();
    fs::write(started.run.path("run/hf/merges.txt"), "stale").unwrap();
    succeed(&args);
    assert!(!started.run.path("run/hf/merges.txt").exists());
}

#[rstest]
#[case("model.hidden=64", "`model.hidden` is set to 64, but `")]
#[case("model.tied=false", "has true: the model is taken from there")]
#[case(
    "data.seq_len=300",
    "sequences of 300 tokens exceed the model's limit of 128"
)]
#[case("model.init=/no/such", "/no/such: is not a folder")]
fn a_run_that_contradicts_its_model_is_refused(#[case] set: &str, #[case] message: &str) {
    let ended = Started::new(&fixture("qwen3-tied")).train("tp1", 1, &[set]);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.stderr.contains(message), "{ended:#?}");
}
