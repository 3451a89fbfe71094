//! Damaged folders of torch.distributed.checkpoint are refused with the reason.

use std::fs;
use std::path::Path;

use megaburn_torch::TorchError;
use megaburn_torch::dcp::DcpDir;
use megaburn_torch::pickle::{Tree, write_pickle};
use proptest::prelude::*;

use crate::{copy_folder, dcp_object, fixture, torch_size};

fn read_all(folder: &Path) -> Result<usize, TorchError> {
    let dir = DcpDir::open(folder)?;
    let mut len = 0;
    for (name, _) in dir.tensors() {
        len += dir.read(name)?.len();
    }
    for name in dir.objects() {
        len += dir.object(name)?.root().to_string().len();
    }
    Ok(len)
}

/// Metadata of one tensor of [4, 2] with some chunks, all in one file.
fn metadata(dtype: &str, chunks: &[([i64; 2], [i64; 2])], file: &str, len: i64) -> Vec<u8> {
    let chunk = |(offsets, sizes): &([i64; 2], [i64; 2])| {
        let attributes = vec![
            ("offsets", torch_size(offsets)),
            ("sizes", torch_size(sizes)),
        ];
        dcp_object("metadata", "ChunkStorageMetadata", attributes)
    };
    let properties = vec![("dtype", Tree::global("torch", dtype))];
    let tensor = vec![
        (
            "properties",
            dcp_object("metadata", "TensorProperties", properties),
        ),
        ("size", torch_size(&[4, 2])),
        ("chunks", Tree::List(chunks.iter().map(chunk).collect())),
    ];
    let tensor = dcp_object("metadata", "TensorStorageMetadata", tensor);
    let stored = chunks.iter().map(|(offsets, _)| {
        let index = vec![("fqn", "w".into()), ("offset", torch_size(offsets))];
        let info = vec![
            ("relative_path", file.into()),
            ("offset", 0.into()),
            ("length", len.into()),
        ];
        let index = dcp_object("metadata", "MetadataIndex", index);
        (index, dcp_object("filesystem", "_StorageInfo", info))
    });
    let whole = vec![
        (
            "state_dict_metadata",
            Tree::Dict(vec![("w".into(), tensor)]),
        ),
        ("storage_data", Tree::Dict(stored.collect())),
    ];
    write_pickle(&dcp_object("metadata", "Metadata", whole)).unwrap()
}

#[test]
fn each_reason_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = |metadata: &[u8]| {
        fs::write(folder.path().join(".metadata"), metadata).unwrap();
        fs::write(folder.path().join("a.distcp"), [0; 100]).unwrap();
        read_all(folder.path()).unwrap_err().to_string()
    };
    let halves = [([0, 0], [2, 2]), ([2, 0], [2, 2])];
    let file = "a.distcp";
    for (metadata, expected) in [
        (
            metadata("float32", &halves[..1], file, 50),
            "4 are in no chunk",
        ),
        (
            metadata("float32", &[halves[0], ([1, 0], [3, 2])], file, 50),
            "overlap",
        ),
        (
            metadata("float32", &[([3, 0], [2, 2])], file, 50),
            "are not inside the shape [4, 2]",
        ),
        (
            metadata("float32", &[([-1, 0], [2, 2])], file, 50),
            "are no sizes",
        ),
        (
            metadata("float32", &halves, file, 9),
            "is larger than its 9 bytes",
        ),
        (
            metadata("float32", &halves, file, -9),
            "the length of `w` is -9",
        ),
        (
            metadata("float32", &halves, file, 101),
            "is bytes 0 to 101, and the file has 100",
        ),
        (
            metadata("float32", &halves, file, 100),
            "it begins with neither",
        ),
        (metadata("float32", &halves, "b.distcp", 50), "cannot open"),
        (
            metadata("float32", &halves, "../a.distcp", 50),
            "of `w` is not inside the folder",
        ),
        (
            metadata("float32", &halves, "/etc/passwd", 50),
            "of `w` is not inside the folder",
        ),
        (
            metadata("qint8", &halves, file, 50),
            "its type is torch.qint8",
        ),
        (
            b"N.".to_vec(),
            "it is no metadata of torch.distributed.checkpoint",
        ),
        (b"N".to_vec(), "the pickle is cut off"),
    ] {
        let error = error(&metadata);
        assert!(error.contains(expected), "{error}");
        let names_it = error.contains("`w`") || error.contains("\"w\"");
        assert!(names_it || metadata.len() < 10, "{error}");
    }
}

#[test]
fn metadata_of_each_rank_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = || DcpDir::open(folder.path()).unwrap_err().to_string();
    assert!(error().contains("cannot open"), "{}", error());
    fs::write(folder.path().join("__0.metadata"), "").unwrap();
    assert!(error().contains("use_collectives=True"), "{}", error());
}

/// The places of two tensors are exchanged.
#[test]
fn another_tensor_at_the_place_is_found() {
    let folder = tempfile::tempdir().unwrap();
    copy_folder(&fixture("dcp/shards"), folder.path());
    let path = folder.path().join(".metadata");
    let bytes = fs::read(&path).unwrap();
    // `rows` is then said to be of f64.
    let name = bytes
        .windows(7)
        .position(|text| text == b"float32")
        .unwrap();
    let changed = [&bytes[..name], b"float64", &bytes[name + 7..]].concat();
    fs::write(&path, changed).unwrap();
    let error = read_all(folder.path()).unwrap_err().to_string();
    assert!(
        error.contains("is larger than its") || error.contains("at its place is"),
        "{error}"
    );
}

#[test]
fn unknown_names_are_named() {
    let dir = DcpDir::open(fixture("dcp/shards")).unwrap();
    let error = dir.read("weights").unwrap_err().to_string();
    assert!(error.contains("no tensor `weights`"), "{error}");
    let error = dir.object("rows").unwrap_err().to_string();
    assert!(error.contains("no object `rows`"), "{error}");
    let error = dir.read_region("rows", &[0], &[1]).unwrap_err().to_string();
    assert!(error.contains("the tensor `rows` of"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Changed bytes are read or refused.
    #[test]
    fn no_damage_is_a_panic(
        file in prop::sample::select(&[".metadata", ".metadata", "__1_0.distcp"][..]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let folder = tempfile::tempdir().unwrap();
        copy_folder(&fixture("dcp/shards"), folder.path());
        let path = folder.path().join(file);
        let mut bytes = fs::read(&path).unwrap();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        fs::write(&path, bytes).unwrap();
        let _ = read_all(folder.path());
    }
}
