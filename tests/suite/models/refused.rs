//! Models, references and targets that cannot be used: each gives one error and leaves no files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rstest::rstest;
use serde_json::Value;

use crate::{
    models::round_trip::{Started, megaburn, succeed, text},
    models::transformers::fixture,
};

/// Every path in a folder and below, sorted.
fn tree(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(tree(&path));
        }
        found.push(path);
    }
    found.sort();
    found
}

/// A damaged copy of a fixture, and the errors that are reported for it.
fn damaged(name: &str, damage: impl Fn(&Path)) -> (tempfile::TempDir, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let hf = dir.path().join("hf");
    fs::create_dir(&hf).unwrap();
    for file in fs::read_dir(fixture(name)).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), hf.join(file.file_name())).unwrap();
    }
    damage(&hf);
    let out = dir.path().join("out");
    let before = tree(dir.path());
    let ended = [
        megaburn(&["convert", "import", text(&hf), text(&out)]),
        megaburn(&["verify", text(&hf)]),
        megaburn(&["generate", text(&hf), "--prompt-ids", "1"]),
        Started::new(&hf).train("tp1", 1, &[]),
    ];
    let errors = ended.map(|ended| {
        assert_eq!(ended.code, Some(2), "{ended:#?}");
        assert!(
            ended.stderr.starts_with("error: ") && ended.stderr.lines().count() == 1,
            "{ended:#?}"
        );
        ended.stderr
    });
    assert_eq!(tree(dir.path()), before, "something half-written is left");
    (dir, errors.into())
}

fn edit_json(path: &Path, edit: impl Fn(&mut Value)) {
    let mut json = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut json);
    fs::write(path, json.to_string()).unwrap();
}

#[rstest]
#[case::architecture("architectures", serde_json::json!(["MambaForCausalLM"]), "`MambaForCausalLM` is not supported")]
#[case::missing_tensor("num_hidden_layers", serde_json::json!(5), "has no tensor `model.layers.4.self_attn.o_proj.weight`; the nearest")]
#[case::extra_tensor("num_hidden_layers", serde_json::json!(3), "`model.layers.3.input_layernorm.weight`: its shape is [32], but")]
#[case::shape("intermediate_size", serde_json::json!(96), "down_proj.weight`: expected [32, 96] by config.json, found [32, 48]")]
#[case::activation("hidden_act", serde_json::json!("relu"), "only \"silu\" is supported")]
fn a_config_that_is_not_of_its_weights_is_one_error(
    #[case] key: &str,
    #[case] value: Value,
    #[case] message: &str,
) {
    let (_dir, errors) = damaged("llama", |hf| {
        edit_json(&hf.join("config.json"), |json| json[key] = value.clone());
    });
    assert!(
        errors.iter().all(|error| error.contains(message)),
        "{errors:#?}"
    );
}

#[test]
fn damaged_weights_are_one_error() {
    let (_dir, errors) = damaged("mistral", |hf| {
        let path = hf.join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1000]).unwrap();
    });
    assert!(
        errors
            .iter()
            .all(|e| e.contains("model.safetensors") && e.contains("truncated")),
        "{errors:#?}"
    );
    let (_dir, errors) = damaged("gpt2", |hf| {
        fs::rename(hf.join("model.safetensors"), hf.join("a.safetensors")).unwrap();
        let index = r#"{"weight_map": {"transformer.wte.weight": "b.safetensors"}}"#;
        fs::write(hf.join("model.safetensors.index.json"), index).unwrap();
    });
    assert!(
        errors
            .iter()
            .all(|e| e.contains("`b.safetensors`, which is missing")),
        "{errors:#?}"
    );
}

#[test]
fn a_checkpoint_with_a_flipped_bit_is_used_for_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let [checkpoint, out] = ["checkpoint", "out"].map(|name| dir.path().join(name));
    succeed(&[
        "convert",
        "import",
        text(&fixture("qwen3-tied")),
        text(&checkpoint),
    ]);
    let path = checkpoint.join("rank-00000.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    for ended in [
        megaburn(&["convert", "export", text(&checkpoint), text(&out)]),
        megaburn(&["generate", text(&checkpoint), "--prompt-ids", "1"]),
        Started::new(&checkpoint).train("tp2-dp2", 1, &[]),
    ] {
        assert_eq!(ended.code, Some(2), "{ended:#?}");
        assert!(
            ended.stderr.contains("rank-00000.safetensors is damaged"),
            "{ended:#?}"
        );
    }
    assert!(!out.exists());
}

#[test]
fn what_stands_there_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let hf = fixture("llama");
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("notes"), "mine").unwrap();
    for force in [&[][..], &["--force"]] {
        let ended = megaburn(&[&["convert", "import", text(&hf), text(&out)], force].concat());
        assert_eq!(ended.code, Some(2), "{ended:#?}");
        assert_eq!(fs::read_to_string(out.join("notes")).unwrap(), "mine");
        assert_eq!(tree(dir.path()).len(), 2);
    }
    fs::remove_file(out.join("notes")).unwrap();
    succeed(&["convert", "import", text(&hf), text(&out), "--force"]);
    assert_eq!(
        megaburn(&["convert", "import", text(&hf), text(&out)]).code,
        Some(2)
    );
}

#[rstest]
#[case(&["--layout", "tp16"], 1, "attention heads 8 is not divisible by tp 16")]
#[case(&["--layout", "cp3"], 1, "sequence length 32 is not divisible by 2 x cp = 6")]
#[case(&["--layout", "cp2", "--cp-comm", "ring"], 2, "unknown cp_comm `ring`")]
#[case(&["--layout", "ep2"], 1, "but the model has no experts")]
#[case(&["--layout", "pp99"], 1, "layers cannot fill 99 pipeline stages")]
#[case(&["--layout", "sp"], 1, "needs tp > 1")]
#[case(&["--layout", "dp3"], 1, "batch of 4 samples")]
#[case(&["--layout", "two"], 2, "`two` is not a known axis")]
#[case(&["--tol-logits", "0"], 1, "\"ok\":false")]
fn a_layout_that_cannot_be_is_refused(
    #[case] args: &[&str],
    #[case] code: i32,
    #[case] message: &str,
) {
    let hf = fixture("llama");
    let ended = megaburn(&[&["verify", text(&hf), "--json"], args].concat());
    assert_eq!(ended.code, Some(code), "{ended:#?}");
    assert!(
        format!("{}{}", ended.stdout, ended.stderr).contains(message),
        "{ended:#?}"
    );
    assert_eq!(ended.stdout.lines().count(), usize::from(code == 1));
}

#[test]
fn a_reference_that_lacks_parts_is_no_proof() {
    let dir = tempfile::tempdir().unwrap();
    let hf = fixture("llama-one-group");
    for name in ["config.json", "model.safetensors", "reference.json"] {
        fs::copy(hf.join(name), dir.path().join(name)).unwrap();
    }
    let file = fs::read(hf.join("reference.safetensors")).unwrap();
    let parts = megaburn_parts(&file);
    for (lacks, ok) in [
        ("train_losses", true),
        ("logits", false),
        ("loss", false),
        ("grad.model.norm.weight", false),
    ] {
        let rest = parts
            .iter()
            .filter(|(name, _)| name != lacks)
            .map(|(name, view)| (name, view));
        safetensors::serialize_to_file(rest, None, &dir.path().join("reference.safetensors"))
            .unwrap();
        let ended = megaburn(&["verify", text(dir.path()), "--layout", "tp2", "--json"]);
        let report: Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(report["ok"], ok, "{report}");
        assert_eq!(report["skipped"], serde_json::json!([lacks]));
        assert_eq!(ended.code, Some(i32::from(!ok)));
    }
}

fn megaburn_parts(file: &[u8]) -> Vec<(String, safetensors::tensor::TensorView<'_>)> {
    safetensors::SafeTensors::deserialize(file)
        .unwrap()
        .tensors()
}
