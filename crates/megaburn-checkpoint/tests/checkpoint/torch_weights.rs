//! Weights that PyTorch wrote are those of the safetensors file of the same model.
//!
//! `tests/tools/torch_formats.py` made the files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::DType;
use megaburn_checkpoint::{CheckpointError, HfDir, TensorSource};
use megaburn_mesh::{Axis, FusedPart, ShardSpec};
use rstest::rstest;
use tempfile::TempDir;

use crate::model::Random;

const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(name)
}

/// The model with its safetensors file.
fn published() -> HfDir {
    HfDir::open(&fixture("llama-one-group")).unwrap()
}

/// A folder of the model with the weights in one of the forms of PyTorch.
fn folder(form: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = fixture("llama-one-group").join("config.json");
    fs::copy(config, dir.path().join("config.json")).unwrap();
    for file in fs::read_dir(fixture("torch/weights").join(form)).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    dir
}

/// The name of a tensor in the safetensors file, which has one for the tied two.
fn safe_name(name: &str) -> &str {
    if name == HEAD { EMBEDDING } else { name }
}

#[rstest]
#[case("bin", true)]
#[case("sharded", true)]
#[case("views", false)]
fn rows_are_equal_to_the_bit(#[case] form: &str, #[case] is_f32: bool) {
    let (safe, dir) = (published(), folder(form));
    let torch = HfDir::open(dir.path()).unwrap();
    let mut random = Random::fresh();
    let mut types = Vec::new();
    assert_eq!(torch.tensors().count(), safe.tensors().count() + 1);
    assert!(torch.are_equal(HEAD, EMBEDDING).unwrap(), "they are tied");
    for header in torch.tensors() {
        let of_safe = safe.require(safe_name(&header.name)).unwrap();
        assert_eq!(header.shape, of_safe.shape, "{}", header.name);
        assert_eq!(header.dtype == DType::F32, is_f32, "{}", header.name);
        types.push(header.dtype);
        let num_rows = header.num_rows();
        for _ in 0..4 {
            let start = random.below(num_rows as u64 + 1) as usize;
            let rows = start..start + random.below((num_rows - start) as u64 + 1) as usize;
            let found = torch.read_rows(&header.name, rows.clone()).unwrap();
            let expected = safe.read_rows(&of_safe.name, rows.clone()).unwrap();
            let expected = expected.convert_dtype(header.dtype);
            let what = (&header.name, rows);
            assert_eq!(found.shape(), expected.shape(), "{what:?}");
            assert!(found.as_bytes() == expected.as_bytes(), "{what:?}");
        }
    }
    for dtype in [DType::F64, DType::BF16, DType::F16] {
        assert_eq!(types.contains(&dtype), !is_f32, "{dtype:?}");
    }
}

#[rstest]
fn shards_are_equal_to_the_bit(
    #[values("bin", "sharded", "views")] form: &str,
    #[values(1, 2, 3)] tp: usize,
) {
    let (safe, dir) = (published(), folder(form));
    let torch = HfDir::open(dir.path()).unwrap();
    let names = |layer: usize, parts: &[&str]| -> Vec<String> {
        let name = |part: &&str| format!("model.layers.{layer}.{part}.weight");
        parts.iter().map(name).collect()
    };
    let up = ["mlp.gate_proj", "mlp.up_proj"];
    let params = [
        (names(0, &up), [48, 144], 1, vec![FusedPart::new(72); 2]),
        (names(1, &up), [48, 144], 1, vec![FusedPart::new(72); 2]),
        (
            names(0, &["mlp.down_proj"]),
            [72, 48],
            0,
            vec![FusedPart::new(72)],
        ),
        (
            names(1, &["mlp.down_proj"]),
            [72, 48],
            0,
            vec![FusedPart::new(72)],
        ),
        (
            names(1, &["self_attn.q_proj"]),
            [48, 48],
            1,
            vec![FusedPart::units(6, 8)],
        ),
    ];
    for (names, shape, dim, parts) in params {
        for rank in 0..tp {
            let spec = ShardSpec::split(&shape, dim, &parts, Axis::Tp, rank, tp).unwrap();
            let stored = torch.require(&names[0]).unwrap().dtype;
            let found = torch.read_shard(&names, true, &spec, None).unwrap();
            let expected = safe.read_shard(&names, true, &spec, Some(stored)).unwrap();
            assert_eq!(found.dtype(), stored, "{names:?}");
            assert!(found.as_bytes() == expected.as_bytes(), "{names:?} {rank}");
        }
    }
}

/// The file is cut after the rows that are read, once it is open.
#[test]
fn only_the_bytes_of_a_contiguous_slice_are_read() {
    let (safe, dir) = (published(), folder("bin"));
    let path = dir.path().join("pytorch_model.bin");
    let rows = safe.read_rows(EMBEDDING, 0..7).unwrap();
    let bytes = fs::read(&path).unwrap();
    let mut places = bytes.windows(rows.as_bytes().len());
    let start = places.position(|found| found == rows.as_bytes()).unwrap();
    let torch = HfDir::open(dir.path()).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_len((start + rows.as_bytes().len()) as u64)
        .unwrap();
    let found = torch.read_rows(EMBEDDING, 0..7).unwrap();
    assert!(found.as_bytes() == rows.as_bytes());
    let error = torch.read_rows(EMBEDDING, 0..8).unwrap_err();
    let named = error
        .to_string()
        .contains("pytorch_model.bin is damaged: it became shorter");
    assert!(named && error.is_damage(), "{error}");
}

/// Python would make a file when it loads the weights.
#[test]
fn a_hostile_pickle_is_named_and_not_executed() {
    let dir = folder("hostile");
    let error = HfDir::open(dir.path()).unwrap_err().to_string();
    for said in [
        "pytorch_model.bin",
        "its pickle names `posix.system`",
        "nothing of the file was",
    ] {
        assert!(error.contains(said), "no `{said}` in `{error}`");
    }
    assert!(!Path::new("megaburn-was-here").exists());
}

#[test]
fn safetensors_come_before_files_of_pytorch() {
    let dir = folder("hostile");
    let safe = fixture("llama-one-group").join("model.safetensors");
    fs::copy(safe, dir.path().join("model.safetensors")).unwrap();
    let opened = HfDir::open(dir.path()).unwrap();
    assert_eq!(opened.tensors().count(), published().tensors().count());
}

#[test]
fn one_of_several_files_has_to_be_chosen() {
    let dir = folder("views");
    let to = |name: &str| dir.path().join(name);
    // Those of a trainer are no weights.
    for name in [
        "optimizer.pt",
        "scheduler.pt",
        "rng_state_0.pth",
        "training_args.bin",
    ] {
        fs::write(to(name), "no weights").unwrap();
    }
    HfDir::open(dir.path()).unwrap();
    fs::copy(to("consolidated.pt"), to("last.pth")).unwrap();
    let error = HfDir::open(dir.path()).unwrap_err();
    let is_refused = matches!(error, CheckpointError::SeveralWeights { .. });
    assert!(
        is_refused && error.to_string().contains("consolidated.pt, last.pth"),
        "{error}"
    );
    fs::rename(to("last.pth"), to("pytorch_model.bin")).unwrap();
    HfDir::open(dir.path()).unwrap();
}

#[rstest]
#[case("bin", "pytorch_model.bin", "is damaged")]
#[case("sharded", "pytorch_model-00001-of-00002.bin", "is damaged")]
#[case("sharded", "pytorch_model-00002-of-00002.bin", "is damaged")]
fn a_file_that_is_cut_is_damaged(#[case] form: &str, #[case] file: &str, #[case] said: &str) {
    let dir = folder(form);
    let path = dir.path().join(file);
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 700]).unwrap();
    let error = HfDir::open(dir.path()).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains(file) && text.contains(said) && error.is_damage(),
        "{text}"
    );
    fs::remove_file(&path).unwrap();
    let text = HfDir::open(dir.path()).unwrap_err().to_string();
    let expected = match form {
        "bin" => "has neither `model.safetensors`".to_string(),
        _ => format!("to `{file}`, which is missing"),
    };
    assert!(text.contains(&expected), "{text}");
}
