//! `weights` and `average`.

use std::{fs, os::unix::fs::symlink};

use megaburn::checkpoint::Checkpoint;
use serde_json::json;

use super::{json, names, output, refused, trained};
use crate::{models::transformers::fixture, runs::child::Ranks};

#[test]
fn the_weights_alone_are_the_model_and_can_be_trained_further() {
    let run = trained("tp2");
    let written = json(&run, "weights /run /w", 0);
    assert!(written[0]["parameters"].as_u64().unwrap() > 1000);
    let weights = Checkpoint::open(&run.path("w")).unwrap();
    assert_eq!((weights.step(), weights.trainer()), (6, &json!(null)));
    assert!(weights.manifest().run_id.is_none());
    output(&run, "verify /w", 0);
    let text = output(&run, "diff /run /w --tensors model.*", 0);
    assert!(text.contains(" 0 different"), "{text}");
    let text = output(&run, "diff /run /w", 1);
    assert!(
        text.contains("exp_avg.norm.gamma: only in a: f32 [32]"),
        "{text}"
    );
    assert!(text.contains("trainer.seed: 1234 and absent"), "{text}");
    let init = format!("model.init={}", run.path("w").display());
    let dir = format!("run.dir={}", run.path("further").display());
    let mut args = run.args("tp1", 2, &[&dir]);
    let model = args.iter().position(|arg| arg == "--config").unwrap();
    let config = fs::read_to_string(&args[model + 1]).unwrap();
    let (before, after) = config.split_once("[model]").unwrap();
    let after = after.split_once("\n\n").map_or("", |(_, after)| after);
    fs::write(run.path("init.toml"), format!("{before}\n{after}")).unwrap();
    args[model + 1] = run.path("init.toml").display().to_string();
    args.extend(["--set".to_string(), init]);
    Ranks::threads(&args).finish();

    assert!(refused(&run, "weights /run /w").contains("replace it with --force"));
    output(&run, "weights /run /w --dtype bf16 --force", 0);
    let shown = json(&run, "show /w", 0);
    assert_eq!(shown[0]["tensors"][0]["dtype"], json!("bf16"));
    output(&run, "diff /run /w --tensors model.* --rtol 0.01", 0);
    for (to, why) in [
        ("/run", "contains the model to be converted"),
        (
            "/run/checkpoints/step-00000006/w",
            "is inside the checkpoint",
        ),
        ("/text.txt", "it is not a folder"),
    ] {
        let error = refused(&run, &format!("weights /run {to} --force"));
        assert!(error.contains(why), "{error}");
    }
    let left: Vec<_> = names(&run.path(""))
        .into_iter()
        .filter(|name| name.contains(".tmp-"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn expert_biases_stay_wide_and_small_files_come_along() {
    let run = megaburn_test_support::run::Run::new();
    let hf = fixture("deepseek-v3");
    let imported = run.path("imported").display().to_string();
    let import = ["convert", "import", hf.to_str().unwrap(), &imported];
    Ranks::command(&import).finish();
    output(&run, "weights /imported /half --dtype bf16", 0);
    let tensors = json(&run, "show /half --tensors", 0);
    let dtypes = tensors[1..]
        .iter()
        .map(|of| (of["name"].as_str().unwrap(), &of["dtype"]));
    let mut num_wide = 0;
    for (name, dtype) in dtypes {
        let is_wide = name.contains("bias") && name.contains("router");
        num_wide += usize::from(is_wide);
        assert_eq!(*dtype, if is_wide { "f32" } else { "bf16" }, "{name}");
    }
    assert!(num_wide > 0);
    assert_eq!(names(&run.path("half/hf")), names(&run.path("imported/hf")));
    symlink(hf, run.path("hf")).unwrap();
    let error = refused(&run, "weights /hf /other");
    assert!(error.contains("is a Hugging Face model"), "{error}");
}

#[test]
fn an_average_is_of_one_model_only() {
    let run = trained("tp2");
    let at = |step: u64| format!("/run/checkpoints/step-{step:08}");
    let [two, four, six] = [2, 4, 6].map(at);
    let written = json(
        &run,
        &format!("average /mean {two} {four} {six} --weights 1,1,2"),
        0,
    );
    assert_eq!(written[0]["weights"], json!([1.0, 1.0, 2.0]));
    // The mean of the mean of 2 and 4, and 6.
    output(&run, &format!("average /half {two} {four}"), 0);
    output(
        &run,
        &format!("average /again /half {six} --weights 0.5,0.5"),
        0,
    );
    output(
        &run,
        "diff /mean /again --tensors model.* --rtol 1e-6 --atol 1e-9",
        0,
    );
    let text = output(&run, &format!("diff /mean {six} --tensors model.*"), 1);
    assert!(text.contains(" values differ"), "{text}");
    assert_eq!(Checkpoint::open(&run.path("mean")).unwrap().step(), 6);
    output(&run, &format!("average /same {six} /run"), 0);
    output(&run, "diff /same /run --tensors model.*", 0);

    let count = refused(&run, &format!("average /x {two} {four} --weights 1"));
    assert!(
        count.contains("a number for each of the 2 checkpoints"),
        "{count}"
    );
    let sum = refused(&run, &format!("average /x {two} {four} --weights 1,-1"));
    assert!(sum.contains("each must be 0 or more"), "{sum}");
    let hf = fixture("llama");
    let llama = run.path("llama").display().to_string();
    Ranks::command(&["convert", "import", hf.to_str().unwrap(), &llama]).finish();
    let other = refused(&run, &format!("average /x {two} /llama"));
    assert!(other.contains("is of another model than "), "{other}");
    assert!(!run.path("x").exists());
}
