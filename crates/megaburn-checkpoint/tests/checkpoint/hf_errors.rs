//! Each invalid folder gives one error that names the file or tensor, the expected value and the
//! actual one.

use std::{fs, path::Path};

use burn::tensor::DType;
use megaburn_checkpoint::{HfDir, TensorSource};
use megaburn_mesh::{Axis, ShardSpec};
use rstest::rstest;
use tempfile::TempDir;

use crate::{
    model::Random,
    published::{Stored, publish, publish_sharded, serialized},
};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn tensors() -> Vec<Stored> {
    let mut random = Random::fresh();
    let mut tensor = |name, dtype, shape: &[usize]| Stored::random(name, dtype, shape, &mut random);
    vec![
        tensor("model.q_proj.weight", DType::BF16, &[12, 7]),
        tensor("model.k_proj.weight", DType::BF16, &[4, 7]),
        tensor("model.v_proj.weight", DType::F32, &[4, 7]),
        tensor("model.norm.weight", DType::F32, &[7]),
    ]
}

fn refused(dir: &Path, said: &[&str]) {
    let error = HfDir::open(dir).unwrap_err().to_string();
    for said in said {
        assert!(error.contains(said), "no `{said}` in `{error}`");
    }
}

#[test]
fn a_missing_folder_or_a_file_in_its_place() {
    let dir = tempfile::tempdir().unwrap();
    refused(
        &dir.path().join("nowhere"),
        &["cannot read the folder", "nowhere", "No such file"],
    );
    fs::write(dir.path().join("file"), "").unwrap();
    refused(
        &dir.path().join("file"),
        &["cannot read the folder", "file", "Not a directory"],
    );
}

#[rstest]
#[case(None, &["cannot read", "config.json", "No such file"])]
#[case(Some("{\"a\": "), &["config.json is damaged", "EOF"])]
#[case(Some("[1]"), &["config.json is damaged", "not a JSON object"])]
fn a_missing_or_invalid_config(#[case] config: Option<&str>, #[case] said: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    publish(dir.path(), &tensors());
    let path = dir.path().join("config.json");
    match config {
        Some(text) => fs::write(path, text).unwrap(),
        None => fs::remove_file(path).unwrap(),
    }
    refused(dir.path(), said);
}

#[test]
fn no_weights() {
    let dir = tempfile::tempdir().unwrap();
    publish(dir.path(), &tensors());
    fs::remove_file(dir.path().join(SINGLE)).unwrap();
    refused(
        dir.path(),
        &["neither `model.safetensors` nor `model.safetensors.index.json`"],
    );
}

#[test]
fn an_index_of_files_that_are_missing_or_lack_the_tensor_or_is_invalid() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    publish_sharded(path, tensors(), 2);
    let index = fs::read_to_string(path.join(INDEX)).unwrap();
    HfDir::open(path).unwrap();

    let other = index.replace("model.k_proj.weight", "model.k_prok.weight");
    fs::write(path.join(INDEX), other).unwrap();
    let found =
        "maps tensor `model.k_prok.weight` to `part-1.safetensors`, which does not contain it";
    refused(
        path,
        &[INDEX, found, "nearest name there is `model.k_proj.weight`"],
    );
    for (bad, said) in [
        (
            index.replace("part-1", "../part-1"),
            "to `../part-1.safetensors`, which is not a file name",
        ),
        (
            index.replace("weight_map", "map"),
            "missing field `weight_map`",
        ),
        (
            index.replace("part-1.safetensors", ""),
            "to ``, which is not a file name",
        ),
    ] {
        fs::write(path.join(INDEX), bad).unwrap();
        refused(path, &[INDEX, "is damaged", said]);
    }
    fs::write(path.join(INDEX), &index).unwrap();
    fs::remove_file(path.join("part-1.safetensors")).unwrap();
    refused(path, &[INDEX, "to `part-1.safetensors`, which is missing"]);
}

#[test]
fn a_file_of_another_length_than_its_header_says() {
    let dir = tempfile::tempdir().unwrap();
    publish(dir.path(), &tensors());
    let path = dir.path().join(SINGLE);
    let whole = serialized(&tensors());
    let mut random = Random::fresh();
    let header = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let data = header + random.below((whole.len() - header) as u64) as usize;
    let numbers = format!(
        "its header describes {} bytes, but it has {data}",
        whole.len()
    );
    fs::write(&path, &whole[..data]).unwrap();
    refused(dir.path(), &[SINGLE, "truncated", &numbers]);
    let cut = 8 + random.below(header as u64 - 8) as usize;
    fs::write(&path, &whole[..cut]).unwrap();
    let numbers = format!(
        "would have {} bytes, but the file has only {cut}",
        header - 8
    );
    refused(dir.path(), &[SINGLE, &numbers, "truncated"]);
    fs::write(&path, &whole[..cut % 8]).unwrap();
    refused(
        dir.path(),
        &[SINGLE, &format!("has {} bytes, too few", cut % 8)],
    );
    fs::write(&path, [&whole[..], b"more"].concat()).unwrap();
    refused(dir.path(), &[SINGLE, "longer than its header says"]);
}

#[rstest]
#[case(b"\x08\0\0\0\0\0\0\0notjson!", "cannot read its header")]
#[case(b"\xff\xff\xff\xff\xff\xff\xff\xff{}", "or not a safetensors file")]
#[case(b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull")]
#[case(
    br#"<html><head><title>404 Not Found</title>"#,
    "or not a safetensors file"
)]
fn a_header_that_is_garbage(#[case] bytes: &[u8], #[case] said: &str) {
    let dir = tempfile::tempdir().unwrap();
    publish(dir.path(), &tensors());
    fs::write(dir.path().join(SINGLE), bytes).unwrap();
    refused(dir.path(), &[SINGLE, "is damaged", said]);
}

#[test]
fn an_element_type_that_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    publish(dir.path(), &tensors());
    let text = br#"{"w":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}      "#;
    let bytes = [&(text.len() as u64).to_le_bytes()[..], text, &[1, 2]].concat();
    fs::write(dir.path().join(SINGLE), bytes).unwrap();
    refused(dir.path(), &[SINGLE, "tensor `w` is F8_E4M3"]);
}

fn opened() -> (TempDir, HfDir) {
    let dir = tempfile::tempdir().unwrap();
    publish(dir.path(), &tensors());
    let hf = HfDir::open(dir.path()).unwrap();
    (dir, hf)
}

#[rstest]
#[case(&["q"], true, &[7, 11], "`model.q_proj.weight` has shape [12, 7], expected [11, 7]")]
#[case(&["q"], false, &[7, 12], "`model.q_proj.weight` has shape [12, 7], expected [7, 12]")]
#[case(&["norm"], true, &[7, 1], "`model.norm.weight` has shape [7], expected [1, 7]")]
#[case(&["norm"], true, &[8], "`model.norm.weight` has shape [7], expected [8]")]
#[case(&["q", "k"], true, &[8, 16], "`model.q_proj.weight` has shape [12, 7], expected [12, 8]")]
#[case(&["q", "k"], true, &[7, 20], "`model.q_proj.weight` [12, 7] and `model.k_proj.weight` [4, 7] has shape [16, 7], expected [20, 7]")]
#[case(&["q", "v"], true, &[7, 16], "`model.q_proj.weight` is BF16, `model.v_proj.weight` is F32")]
#[case(&["kk"], true, &[7, 4], "no tensor `model.kk_proj.weight`; the nearest is `model.k_proj.weight`")]
fn tensors_that_do_not_make_up_the_parameter(
    #[case] parts: &[&str],
    #[case] transposed: bool,
    #[case] shape: &[usize],
    #[case] said: &str,
) {
    let (_dir, hf) = opened();
    let name = |part: &&str| match *part {
        "norm" => "model.norm.weight".to_string(),
        part => format!("model.{part}_proj.weight"),
    };
    let names: Vec<String> = parts.iter().map(name).collect();
    let spec = ShardSpec::whole(shape, Axis::Tp, 0, 1);
    let error = hf
        .read_shard(&names, transposed, &spec, None)
        .unwrap_err()
        .to_string();
    assert!(error.contains(said), "{error}");
    assert!(error.contains(hf.path().to_str().unwrap()), "{error}");
}

/// Files are not memory-mapped: a file that shrinks is an error, where a mapping would kill the
/// process.
#[test]
fn a_file_that_is_cut_while_it_is_open_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    publish(dir.path(), &tensors());
    let hf = HfDir::open(dir.path()).unwrap();
    let path = dir.path().join(SINGLE);
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(64)
        .unwrap();
    let norm = "model.norm.weight".to_string();
    let spec = ShardSpec::whole(&[7], Axis::Tp, 0, 1);
    let errors = [
        hf.read_shard(std::slice::from_ref(&norm), false, &spec, None)
            .unwrap_err(),
        hf.read_rows(&norm, 0..7).unwrap_err(),
        hf.are_equal(&norm, &norm).unwrap_err(),
    ];
    for error in errors {
        let text = error.to_string();
        assert!(
            error.is_damage() && text.contains(SINGLE) && text.contains("shorter"),
            "{text}"
        );
    }
}

/// Headers whose numbers would overflow in a sum or a product.
#[rstest]
#[case(r#"{"w": {"dtype": "F32", "shape": [0, 1099511627776, 1099511627776], "data_offsets": [0, 0]}}"#, &["the shape of tensor `w`"])]
#[case(r#"{"w": {"dtype": "U8", "shape": [18446744073709551615], "data_offsets": [0, 18446744073709551615]}}"#, &["cannot read its header"])]
#[case(r#"{"w": {"dtype": "U8", "shape": [1152921504606846975], "data_offsets": [0, 1152921504606846975]}}"#, &["truncated"])]
#[case(r#"{"w": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 0]}}"#, &["cannot read its header"])]
fn a_header_with_sizes_beyond_counting(#[case] header: &str, #[case] said: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    publish(dir.path(), &tensors());
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    fs::write(dir.path().join(SINGLE), bytes).unwrap();
    let whole: Vec<&str> = said
        .iter()
        .copied()
        .chain(["model.safetensors is damaged"])
        .collect();
    refused(dir.path(), &whole);
}
