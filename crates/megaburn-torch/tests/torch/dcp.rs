//! Folders of torch.distributed.checkpoint hold the tensors that its ranks had.

use std::fs;

use megaburn_torch::dcp::DcpDir;
use serde_json::Value;

use crate::{copy_folder, draw_region, fixture, read, slice, unhex};

/// The folders, each of which has its whole tensors in a `.json` of the same name.
const FOLDERS: [&str; 2] = ["shards", "fsdp"];

fn about(name: &str) -> serde_json::Map<String, Value> {
    serde_json::from_slice(&read(&format!("dcp/{name}.json"))).unwrap()
}

#[test]
fn every_tensor_is_what_its_ranks_had() {
    for folder in FOLDERS {
        let dir = DcpDir::open(fixture(&format!("dcp/{folder}"))).unwrap();
        let about = about(folder);
        let names: Vec<&str> = dir.tensors().map(|(name, _)| name).collect();
        let mut expected: Vec<&str> = about.keys().map(|name| name.as_str()).collect();
        expected.sort_unstable();
        assert_eq!(names, expected);
        for (name, tensor) in dir.tensors() {
            let expected = &about[name];
            assert_eq!(tensor.dtype().name(), expected["dtype"].as_str().unwrap());
            let shape: Vec<usize> = serde_json::from_value(expected["shape"].clone()).unwrap();
            assert_eq!(tensor.shape(), shape, "{name}");
            let bytes = unhex(expected["bytes"].as_str().unwrap());
            assert_eq!(dir.read(name).unwrap(), bytes, "{name}");
            for _ in 0..20 {
                let (offsets, sizes) = draw_region(&shape);
                let found = dir.read_region(name, &offsets, &sizes).unwrap();
                let item = tensor.dtype().num_bytes();
                let expected = slice(&bytes, item, &shape, &offsets, &sizes);
                assert_eq!(found, expected, "{name}: {offsets:?} {sizes:?}");
            }
        }
    }
}

/// The ranks of a mesh of 2 x 2 wrote a box each.
#[test]
fn chunks_are_what_each_rank_wrote() {
    let dir = DcpDir::open(fixture("dcp/shards")).unwrap();
    let chunks = |name: &str| {
        let chunks = dir.tensor(name).unwrap().chunks().iter();
        let mut chunks: Vec<_> = chunks
            .map(|chunk| (chunk.offsets().to_vec(), chunk.sizes().to_vec()))
            .collect();
        chunks.sort();
        chunks
    };
    let grid = [
        ([0, 0], [3, 4]),
        ([0, 4], [3, 3]),
        ([3, 0], [2, 4]),
        ([3, 4], [2, 3]),
    ];
    let grid = grid.map(|(offsets, sizes)| (offsets.to_vec(), sizes.to_vec()));
    assert_eq!(chunks("grid"), grid);
    // Two of the four ranks have no row.
    assert_eq!(chunks("few").len(), 2);
    assert_eq!(chunks("replicated").len(), 1);
    assert_eq!(chunks("nested.plain.empty").len(), 0);
    let files: Vec<&str> = dir
        .tensor("grid")
        .unwrap()
        .chunks()
        .iter()
        .map(|chunk| chunk.file())
        .collect();
    assert!(files.contains(&"__3_0.distcp"), "{files:?}");
}

#[test]
fn objects_are_read() {
    let dir = DcpDir::open(fixture("dcp/shards")).unwrap();
    let names: Vec<&str> = dir.objects().collect();
    let expected = ["args.lr", "args.names", "rng.bytes", "rng.numbers", "step"];
    assert_eq!(names, expected);
    assert_eq!(dir.object("step").unwrap().root().as_i64(), Some(7));
    assert_eq!(dir.object("args.lr").unwrap().root().as_f64(), Some(0.5));
    let names = dir.object("args.names").unwrap();
    assert_eq!(names.root().to_string(), "[\"a\", \"b\"]");
    let bytes = dir.object("rng.bytes").unwrap();
    assert_eq!(&*bytes.root().as_bytes().unwrap(), b"\x00\xff");
    let dir = DcpDir::open(fixture("dcp/fsdp")).unwrap();
    let tokens = dir.object("train_state.ntokens_seen").unwrap();
    assert_eq!(tokens.root().as_i64(), Some(4096));
}

/// Files of other chunks may be missing.
#[test]
fn only_the_chunks_of_a_region_are_read() {
    let folder = tempfile::tempdir().unwrap();
    copy_folder(&fixture("dcp/shards"), folder.path());
    let dir = DcpDir::open(folder.path()).unwrap();
    let rows = dir.tensor("rows").unwrap();
    let first = rows
        .chunks()
        .iter()
        .find(|chunk| chunk.offsets() == [0, 0])
        .unwrap();
    let (offsets, sizes) = (first.offsets().to_vec(), first.sizes().to_vec());
    for rank in 0..4 {
        let file = format!("__{rank}_0.distcp");
        if file != first.file() {
            fs::remove_file(folder.path().join(file)).unwrap();
        }
    }
    let whole = unhex(about("shards")["rows"]["bytes"].as_str().unwrap());
    let found = dir.read_region("rows", &offsets, &sizes).unwrap();
    assert_eq!(found, whole[..found.len()]);
    let error = dir.read("rows").unwrap_err().to_string();
    assert!(
        error.contains("cannot open") && error.contains("distcp"),
        "{error}"
    );
}
