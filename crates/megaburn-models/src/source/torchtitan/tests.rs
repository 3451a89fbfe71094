//! `tests/tools/torchtitan_checkpoint.py` made the checkpoints.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use burn::tensor::DType;
use megaburn_checkpoint::{HfDir, TensorSource};
use megaburn_mesh::{Axis, FusedPart, ShardSpec};
use megaburn_torch::dcp::DcpDir;
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    open,
    tensor::{Rows, TitanTensor},
};

const HEAD_DIM: usize = 6;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/torchtitan")
        .join(name)
}

/// A copy of a checkpoint with the configuration, which is edited.
fn folder(name: &str, edit: impl FnOnce(&mut Value)) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in fs::read_dir(fixture(name)).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let text = fs::read(fixture("flat").join("config.json")).unwrap();
    let mut config = serde_json::from_slice(&text).unwrap();
    edit(&mut config);
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

fn rows(dir: &HfDir, name: &str) -> Vec<u8> {
    let header = dir.require(name).unwrap();
    let data = dir.read_rows(name, 0..header.num_rows()).unwrap();
    data.convert_dtype(DType::BF16).as_bytes().to_vec()
}

#[rstest]
fn checkpoints_of_all_versions_hold_one_model(#[values("nested", "renamed")] name: &str) {
    let flat = open(&fixture("flat")).unwrap();
    let dir = folder(name, |_| {});
    let other = open(dir.path()).unwrap();
    assert_eq!(other.config(), flat.config());
    let names = |dir: &HfDir| dir.tensors().map(|header| header.name).collect::<Vec<_>>();
    assert_eq!(names(&other), names(&flat));
    assert_eq!(names(&flat).len(), 3 + 2 * 9);
    for name in names(&flat) {
        let found = other.require(&name).unwrap();
        assert_eq!(found.dtype, DType::BF16);
        assert_eq!(found.shape, flat.require(&name).unwrap().shape);
        assert!(rows(&other, &name) == rows(&flat, &name), "{name}");
    }
}

/// Every row of queries and keys, from the definition: rows `2 i` and `2 i + 1` of a head, which are
/// a complex number, are rows `i` and `head_dim / 2 + i`.
#[rstest]
fn rows_of_heads_are_halves(
    #[values(("q_proj", "wq", 4), ("k_proj", "wk", 2))] of: (&str, &str, usize),
) {
    let (hf, titan, heads) = of;
    let opened = open(&fixture("flat")).unwrap();
    let dir = DcpDir::open(fixture("flat")).unwrap();
    let name = format!("model.layers.1.self_attn.{hf}.weight");
    for head in 0..heads {
        for i in 0..HEAD_DIM / 2 {
            for (row, of_titan) in [(i, 2 * i), (HEAD_DIM / 2 + i, 2 * i + 1)] {
                let [row, of_titan] = [row, of_titan].map(|row| head * HEAD_DIM + row);
                let found = opened.read_rows(&name, row..row + 1).unwrap();
                let titan = format!("layers.1.attention.{titan}.weight");
                let expected = dir.read_region(&titan, &[of_titan, 0], &[1, 24]).unwrap();
                assert!(found.as_bytes() == expected, "{row}");
            }
        }
    }
}

/// Any range of bytes, inside of a line and across lines, heads and the chunks of the ranks.
#[test]
fn any_bytes_are_read() {
    use megaburn_checkpoint::TensorBytes;
    let dir = Arc::new(DcpDir::open(fixture("flat")).unwrap());
    for (name, shape, order) in [
        (
            "layers.0.attention.wq.weight",
            vec![24, 24],
            Rows::Halves { head_dim: HEAD_DIM },
        ),
        ("tok_embeddings.weight", vec![131, 24], Rows::Same),
        ("norm.weight", vec![24], Rows::Same),
    ] {
        let tensor = TitanTensor::new(dir.clone(), name.into(), &shape, 4, order).unwrap();
        let mut whole = vec![0; shape.iter().product::<usize>() * 4];
        tensor.read_at(&mut whole, 0).unwrap();
        if matches!(order, Rows::Same) {
            assert!(whole == dir.read(name).unwrap(), "{name}");
        }
        let ends = (0..whole.len()).step_by(61).chain([whole.len()]);
        for (index, end) in ends.enumerate() {
            let start = end - end.min(index * 37 % 400);
            let mut found = vec![0; end - start];
            tensor.read_at(&mut found, start as u64).unwrap();
            assert!(found == whole[start..end], "{name}: {start} to {end}");
        }
    }
}

#[rstest]
fn a_shard_is_a_part_of_the_whole(#[values(1, 2, 4)] tp: usize) {
    let opened = open(&fixture("flat")).unwrap();
    let names = ["model.layers.0.self_attn.q_proj.weight".to_string()];
    let shard = |dim, rank, tp| {
        let spec = ShardSpec::split(
            &[24, 24],
            dim,
            &[FusedPart::units(4, 6)],
            Axis::Tp,
            rank,
            tp,
        );
        let data = opened
            .read_shard(&names, true, &spec.unwrap(), None)
            .unwrap();
        data.try_to_vec::<f32>().unwrap()
    };
    let whole = shard(1, 0, 1);
    let width = 24 / tp;
    for rank in 0..tp {
        let expected: Vec<f32> = (0..24)
            .flat_map(|row| whole[row * 24 + rank * width..][..width].to_vec())
            .collect();
        assert_eq!(shard(1, rank, tp), expected);
        assert_eq!(shard(0, rank, tp), whole[rank * width * 24..][..width * 24]);
    }
}

fn refused(name: &str, edit: impl FnOnce(&mut Value)) -> String {
    let dir = folder(name, edit);
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains(dir.path().to_str().unwrap()), "{error}");
    error
}

#[test]
fn what_the_configuration_lacks_is_listed() {
    let error = refused("renamed", |config| *config = json!({}));
    let all = "`num_attention_heads`, `rms_norm_eps`, `max_position_embeddings`, `rope_theta`, \
               `rope_scaling` are missing";
    assert!(
        error.contains(all) && error.contains("config.json"),
        "{error}"
    );
    for key in [
        "num_attention_heads",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
    ] {
        let error = refused("renamed", |config| {
            drop(config.as_object_mut().unwrap().remove(key))
        });
        assert!(
            error.contains(&format!("config.json: `{key}` is missing")),
            "{error}"
        );
    }
    // Null is an answer for scaling only.
    let error = refused("renamed", |config| config["rms_norm_eps"] = Value::Null);
    assert!(error.contains("`rms_norm_eps` is missing"), "{error}");
    let dir = folder("renamed", |config| config["rope_scaling"] = Value::Null);
    open(dir.path()).unwrap();
    let dir = folder("renamed", |config| {
        let keys = config.as_object_mut().unwrap();
        let theta = keys.remove("rope_theta");
        keys.remove("rope_scaling");
        config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": theta});
    });
    open(dir.path()).unwrap();
}

#[rstest]
#[case("hidden_size", json!(25), "`hidden_size` is 25, but by the tensors of the checkpoint it is 24")]
#[case("num_hidden_layers", json!(3), "`num_hidden_layers` is 3")]
#[case("head_dim", json!(8), "`head_dim` is 8")]
#[case("architectures", json!(["Qwen3ForCausalLM"]), "`architectures` is [\"Qwen3ForCausalLM\"]")]
#[case("num_attention_heads", json!(5), "`num_attention_heads` is 5, but wq has 24 rows")]
#[case("num_attention_heads", json!(8), "`num_attention_heads` is 8, but wq has 24 rows")]
#[case("num_attention_heads", json!(0), "`num_attention_heads` is 0, but wq has 24 rows")]
#[case("num_attention_heads", json!("4"), "`num_attention_heads` is \"4\", but wq has 24 rows")]
#[case("num_attention_heads", json!(1), "wk has 12 rows, which are no heads of 24")]
fn a_configuration_that_contradicts_the_tensors_is_refused(
    #[case] key: &str,
    #[case] value: Value,
    #[case] said: &str,
) {
    let error = refused("renamed", |config| config[key] = value);
    assert!(error.contains(said), "{error}");
}

/// Another folder of `torch.distributed.checkpoint`, and one that is cut.
#[test]
fn other_checkpoints_are_refused() {
    let other = fixture("../torch/dcp/shards");
    let error = open(&other).unwrap_err().to_string();
    assert!(
        error.contains("tensor `columns`: is [3, 6], but torchtitan's"),
        "{error}"
    );
    let dir = folder("renamed", |_| {});
    let file = dir.path().join("__0_0.distcp");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let opened = open(dir.path()).unwrap();
    let read = |name: String| opened.read_rows(&name, 0..1).map(drop);
    let names = opened.tensors().map(|header| header.name);
    let errors: Vec<_> = names.filter_map(|name| read(name).err()).collect();
    assert!(!errors.is_empty());
    for error in errors {
        let said = error.to_string();
        assert!(said.contains("__0_0.distcp") && error.is_damage(), "{said}");
    }
}
