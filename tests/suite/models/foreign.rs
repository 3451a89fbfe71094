//! Models in files of PyTorch and in checkpoints of torchtitan, on the command line.
//!
//! `tests/tools/torch_formats.py` and `tests/tools/torchtitan_checkpoint.py` made them.

use std::{
    fs::{self, File},
    io::Write,
    path::Path,
};

use megaburn::{
    checkpoint::TensorFile,
    torch::{
        DType,
        pickle::Tree,
        pt::{PtWriter, tensor_tree},
    },
};
use rstest::rstest;

use crate::models::{
    published::read,
    round_trip::{Started, megaburn, succeed, text},
    transformers::fixture,
};

/// Logits may differ from torchtitan's by this part of the largest one.
const LOGITS: f64 = 1e-5;

/// A folder of the fixture `llama-one-group` whose weights are in files of PyTorch.
fn in_files_of_torch(form: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    let weights = fixture("torch").join("weights").join(form);
    let weights = fs::read_dir(weights).unwrap();
    let mut files: Vec<_> = weights.map(|file| file.unwrap().path()).collect();
    let of_model = ["config.json", "generation_config.json"];
    files.extend(of_model.map(|name| fixture("llama-one-group").join(name)));
    for file in files {
        fs::copy(&file, model.join(file.file_name().unwrap())).unwrap();
    }
    dir
}

#[rstest]
fn weights_of_pytorch_become_the_published_model(#[values("bin", "sharded")] form: &str) {
    let dir = in_files_of_torch(form);
    let [model, checkpoint, back] =
        ["model", "checkpoint", "back"].map(|name| dir.path().join(name));
    succeed(&["convert", "import", text(&model), text(&checkpoint)]);
    succeed(&["convert", "export", text(&checkpoint), text(&back)]);
    let published = fixture("llama-one-group");
    for file in ["model.safetensors", "config.json"] {
        let found = fs::read(back.join(file)).unwrap();
        assert!(found == fs::read(published.join(file)).unwrap(), "{file}");
    }
    let generated = [&published, &model].map(|model| {
        let prompt = [
            "--prompt-ids",
            "5,17,3",
            "--max-tokens",
            "6",
            "--layout",
            "tp2",
        ];
        succeed(&[&["generate", text(model)], &prompt[..]].concat())
    });
    assert_eq!(generated[0], generated[1]);
}

/// The weights of a fixture whose vocabulary has all bytes, as `torch.save` would write them.
#[test]
fn a_run_starts_from_weights_of_pytorch() {
    let dir = tempfile::tempdir().unwrap();
    let published = fixture("qwen3-tied");
    fs::copy(
        published.join("config.json"),
        dir.path().join("config.json"),
    )
    .unwrap();
    let tensors = read(&published.join("model.safetensors"));
    let names = tensors.keys().cloned().map(Tree::Str);
    let values = tensors.values().enumerate().map(|(number, (_, shape, _))| {
        tensor_tree(DType::F32, shape, &number.to_string()).unwrap()
    });
    let state = Tree::Dict(names.zip(values).collect());
    let file = File::create(dir.path().join("pytorch_model.bin")).unwrap();
    let mut writer = PtWriter::new(file, &state).unwrap();
    for (number, (_, _, bytes)) in tensors.values().enumerate() {
        let write = |out: &mut dyn Write| out.write_all(bytes);
        writer.storage(&number.to_string(), write).unwrap();
    }
    writer.finish().unwrap();
    assert_eq!(
        succeed(&["verify", text(&published), text(dir.path())]),
        succeed(&["verify", text(&published), text(&published)])
    );
    let ended = Started::new(dir.path()).train("tp2-dp2", 1, &[]);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
}

#[test]
fn a_hostile_file_is_one_error() {
    let dir = in_files_of_torch("hostile");
    let [model, out] = ["model", "out"].map(|name| dir.path().join(name));
    for ended in [
        megaburn(&["convert", "import", text(&model), text(&out)]),
        megaburn(&["generate", text(&model), "--prompt-ids", "1"]),
        Started::new(&model).train("tp2", 1, &[]),
    ] {
        assert_eq!(ended.code, Some(2), "{ended:#?}");
        let said = &ended.stderr;
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(
            said.contains("pytorch_model.bin") && said.contains("`posix.system`"),
            "{said}"
        );
    }
    assert!(!out.exists());
}

#[test]
fn safetensors_beside_files_of_pytorch_are_used_and_a_line_says_so() {
    let dir = in_files_of_torch("bin");
    let [model, out] = ["model", "out"].map(|name| dir.path().join(name));
    let safe = fixture("llama-one-group").join("model.safetensors");
    fs::copy(safe, model.join("model.safetensors")).unwrap();
    let ended = megaburn(&["convert", "import", text(&model), text(&out)]);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let said = "pytorch_model.bin is not read, because the folder has safetensors files";
    assert_eq!(ended.stderr.matches(said).count(), 1, "{}", ended.stderr);
}

/// Logits, loss, gradients and training are those of torchtitan's own model.
#[test]
fn a_checkpoint_of_torchtitan_computes_what_torchtitan_does() {
    let titan = fixture("torchtitan").join("flat");
    let reference = TensorFile::open(&titan.join("reference.safetensors")).unwrap();
    let logits: Vec<f32> = reference.read("logits").unwrap().try_to_vec().unwrap();
    let largest = logits
        .iter()
        .fold(0f32, |most, logit| most.max(logit.abs()));
    let tolerance = (f64::from(largest) * LOGITS).to_string();
    let layouts = ["tp1", "tp2-dp3-sp", "pp2"]
        .map(|layout| ["--layout", layout])
        .concat();
    let args = ["verify", text(&titan), "--tol-logits", &tolerance];
    succeed(&[&args[..], &layouts].concat());
}

#[test]
fn a_checkpoint_of_torchtitan_is_imported_exported_and_trained() {
    let dir = tempfile::tempdir().unwrap();
    let titan = fixture("torchtitan").join("flat");
    let [checkpoint, back] = ["checkpoint", "back"].map(|name| dir.path().join(name));
    let ended = megaburn(&["convert", "import", text(&titan), text(&checkpoint)]);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let said = "and not dataloader, lr_scheduler, optimizer, train_state";
    assert_eq!(ended.stderr.matches(said).count(), 1, "{}", ended.stderr);
    succeed(&["convert", "export", text(&checkpoint), text(&back)]);
    for other in [&checkpoint, &back] {
        succeed(&["verify", text(&titan), text(other)]);
    }
    let config = fs::read_to_string(back.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    assert_eq!(
        (&config["head_dim"], &config["num_key_value_heads"]),
        (&6.into(), &2.into())
    );
    // The vocabulary of the fixture is smaller than that of bytes.
    let generate = [
        "generate",
        text(&titan),
        "--prompt-ids",
        "5,17,3",
        "--max-tokens",
        "4",
    ];
    assert_eq!(
        succeed(&generate),
        succeed(&[&["generate", text(&back)], &generate[2..]].concat())
    );
}

#[test]
fn a_checkpoint_of_torchtitan_without_its_configuration_is_one_error() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let bare = fixture("torchtitan").join("nested");
    let ended = megaburn(&["convert", "import", text(&bare), text(&out)]);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    let said = [
        "config.json: `num_attention_heads`, `rms_norm_eps`",
        "write them into this file",
    ];
    assert!(
        said.iter().all(|said| ended.stderr.contains(said)),
        "{}",
        ended.stderr
    );
    assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    assert!(Path::new(&bare).exists() && !out.exists());
}
