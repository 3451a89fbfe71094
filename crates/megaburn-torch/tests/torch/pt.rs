//! Files of torch.save hold the tensors that PyTorch saved.

use std::fs;

use megaburn_torch::pt::{PtFile, StoredTensor};
use serde_json::Value;

use crate::{draw_region, fixture, read, slice, unhex};

/// The files that are read, each of which has its tensors in a `.json` of the same name.
const FILES: [&str; 5] = ["zip", "legacy", "one", "zip64", "optimizer"];

/// The tensors of a file: each name, what the file says, and what PyTorch said.
fn tensors(name: &str) -> (PtFile, Vec<(String, StoredTensor, Value)>) {
    let file = PtFile::open(fixture(&format!("pt/{name}.pt"))).unwrap();
    let about = read(&format!("pt/{name}.json"));
    let mut about: serde_json::Map<String, Value> = serde_json::from_slice(&about).unwrap();
    let found = file.tensors().unwrap().into_iter();
    let found = found.map(|(name, tensor)| {
        let expected = about.remove(&name);
        let expected = expected.unwrap_or_else(|| panic!("there is no {name:?}"));
        (name, tensor, expected)
    });
    let found = found.collect();
    assert!(about.is_empty(), "{name}: not found: {about:?}");
    (file, found)
}

fn sizes(value: &Value) -> Vec<usize> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn every_tensor_is_what_pytorch_saved() {
    for name in FILES {
        let (file, tensors) = tensors(name);
        for (tensor_name, tensor, expected) in tensors {
            let what = format!("{name}: {tensor_name}");
            assert_eq!(
                tensor.dtype().name(),
                expected["dtype"].as_str().unwrap(),
                "{what}"
            );
            assert_eq!(tensor.shape(), sizes(&expected["shape"]), "{what}");
            let offset = expected["offset"].as_u64().unwrap();
            assert_eq!(tensor.storage_offset() as u64, offset, "{what}");
            assert_eq!(tensor.strides(), sizes(&expected["strides"]), "{what}");
            let bytes = unhex(expected["bytes"].as_str().unwrap());
            assert_eq!(file.read(&tensor).unwrap(), bytes, "{what}");
            for _ in 0..20 {
                let (offsets, sizes) = draw_region(tensor.shape());
                let found = file.read_region(&tensor, &offsets, &sizes).unwrap();
                let item = tensor.dtype().num_bytes();
                let expected = slice(&bytes, item, tensor.shape(), &offsets, &sizes);
                assert_eq!(found, expected, "{what}: {offsets:?} {sizes:?}");
            }
        }
    }
}

#[test]
fn views_share_a_storage() {
    let (_, tensors) = tensors("zip");
    let get = |name: &str| &tensors.iter().find(|(of, ..)| of == name).unwrap().1;
    let base = get("layers.0.weight");
    for view in ["layers.1.weight", "rows", "column", "steps"] {
        assert_eq!(get(view).storage_key(), base.storage_key(), "{view}");
    }
    assert_ne!(get("scalar").storage_key(), base.storage_key());
    let contiguous = ["layers.0.weight", "rows", "scalar", "empty"];
    assert!(contiguous.iter().all(|name| get(name).is_contiguous()));
    let others = ["layers.1.weight", "column", "steps", "permuted", "expanded"];
    assert!(!others.iter().any(|name| get(name).is_contiguous()));
}

#[test]
fn other_values_are_there_too() {
    for name in ["zip", "legacy"] {
        let (file, _) = tensors(name);
        let root = file.root();
        assert_eq!(root.get("epoch").unwrap().as_i64(), Some(3));
        assert_eq!(root.get("names").unwrap().to_string(), "(\"a\", None, 0.5)");
        let layer = root
            .get("layers")
            .unwrap()
            .sequence()
            .unwrap()
            .get(0)
            .unwrap();
        let weight = file.tensor(layer.get("weight").unwrap()).unwrap().unwrap();
        assert_eq!(weight.shape(), [7, 5]);
        assert_eq!(file.tensor(root.get("epoch").unwrap()).unwrap(), None);
    }
    let (file, _) = tensors("optimizer");
    let groups = file.root().get("param_groups").unwrap().sequence().unwrap();
    let group = groups.get(0).unwrap();
    assert_eq!(group.get("lr").unwrap().as_f64(), Some(0.001));
}

/// The file is cut after the bytes that are needed, when it was opened.
#[test]
fn only_the_bytes_of_a_region_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.pt");
    fs::copy(fixture("pt/one.pt"), &path).unwrap();
    let file = PtFile::open(&path).unwrap();
    let (_, tensor) = file.tensors().unwrap().remove(0);
    let whole = file.read(&tensor).unwrap();
    let bytes = fs::read(&path).unwrap();
    let row = 5 * 4;
    let start = bytes
        .windows(row)
        .position(|found| found == &whole[..row])
        .unwrap();
    let cut = fs::OpenOptions::new().write(true).open(&path).unwrap();
    cut.set_len((start + 2 * row) as u64).unwrap();
    let rows = file.read_region(&tensor, &[0, 0], &[2, 5]).unwrap();
    assert_eq!(rows, whole[..2 * row]);
    let error = file.read(&tensor).unwrap_err().to_string();
    assert!(error.contains("cannot read `"), "{error}");
}

#[test]
fn a_region_outside_is_refused() {
    let (file, tensors) = tensors("one");
    let tensor = &tensors[0].1;
    assert_eq!(tensor.shape(), [6, 5]);
    for (offsets, sizes) in [
        (vec![0], vec![6]),
        (vec![0, 0], vec![7, 5]),
        (vec![6, 0], vec![1, 5]),
        (vec![usize::MAX, 0], vec![2, 5]),
    ] {
        let error = file
            .read_region(tensor, &offsets, &sizes)
            .unwrap_err()
            .to_string();
        assert!(error.contains("are not inside the shape [6, 5]"), "{error}");
    }
}

/// The range of a contiguous tensor holds its bytes, and keeps the file open.
#[test]
fn contiguous_tensors_are_ranges_of_the_file() {
    for name in FILES {
        let (file, tensors) = tensors(name);
        let ranges = tensors.iter().map(|(of, tensor, _)| {
            let range = file.contiguous(tensor).unwrap();
            assert_eq!(range.is_some(), tensor.is_contiguous(), "{name}: {of}");
            Some((range?, file.read(tensor).unwrap()))
        });
        let ranges: Vec<_> = ranges.collect();
        assert!(ranges.iter().any(|range| range.is_some()), "{name}");
        drop(file);
        for (range, bytes) in ranges.into_iter().flatten() {
            assert_eq!(range.num_bytes(), bytes.len() as u64);
            for _ in 0..10 {
                let start = fastrand::usize(0..=bytes.len());
                let mut found = vec![0; fastrand::usize(0..=bytes.len() - start)];
                range.read_at(&mut found, start as u64).unwrap();
                assert_eq!(found, bytes[start..start + found.len()]);
            }
            let error = range.read_at(&mut [0], bytes.len() as u64);
            assert!(error.unwrap_err().to_string().contains("is damaged"));
        }
    }
}
