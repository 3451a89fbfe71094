//! Files that cannot be read are refused with the reason, whatever is in them.

use std::fs;

use megaburn_torch::TorchError;
use megaburn_torch::pt::PtFile;
use proptest::prelude::*;

use crate::{fixture, read};

/// Opens a file and reads all of its tensors.
fn read_all(path: &std::path::Path) -> Result<usize, TorchError> {
    let file = PtFile::open(path)?;
    let mut len = 0;
    for (_, tensor) in file.tensors()? {
        len += file.read(&tensor)?.len();
    }
    Ok(len)
}

#[test]
fn each_reason_is_named() {
    for (name, expected) in [
        ("big-endian", "was saved on a big-endian machine"),
        ("compressed", "is compressed"),
        ("storage-cut", "it needs 140 bytes of a storage that has 4"),
        ("conjugate", "the tensor `w` of `"),
        ("conjugate", "it is a lazy conjugate or negative"),
        (
            "sparse",
            "it is made by `torch._utils._rebuild_sparse_tensor`",
        ),
        ("quantized", "it is made by `torch._utils._rebuild_qtensor`"),
        ("script", "it is a TorchScript program"),
        (
            "model",
            "it holds an object of torch.nn.modules.linear.Linear; save the `state_dict()`",
        ),
    ] {
        let error = read_all(&fixture(&format!("pt/{name}.pt"))).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(expected), "{name}: {error}");
        assert!(error.contains(&format!("pt/{name}.pt")), "{error}");
    }
}

/// An object of a class that is not known stays what it is: an object that was not made.
#[test]
fn unknown_classes_are_left_alone() {
    for name in ["module", "legacy-module"] {
        let file = PtFile::open(fixture(&format!("pt/{name}.pt"))).unwrap();
        assert_eq!(file.tensors().unwrap(), []);
        let whole = file.root().get("whole").unwrap();
        // The older format has the source of the class too.
        let class = whole.as_object().unwrap().callable.to_string();
        assert!(class.contains("torch.nn.modules.linear.Linear"), "{class}");
        let parameters = whole.attribute("_parameters").unwrap();
        let weight = file
            .tensor(parameters.get("weight").unwrap())
            .unwrap()
            .unwrap();
        assert_eq!(file.read(&weight).unwrap().len(), 2 * 4 * 4);
    }
}

#[test]
fn what_is_no_file_of_torch_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file.pt");
    let refused = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        PtFile::open(&path).unwrap_err().to_string()
    };
    let zip = read("pt/zip.pt");
    let legacy = read("pt/legacy.pt");
    for (bytes, expected) in [
        (&b""[..], "it begins with neither"),
        (b"version https://git-lfs", "a pointer of Git LFS"),
        (&b"\x80\x02K\x01."[..], "it begins with neither"),
        (&zip[..zip.len() - 30], "is damaged: as a zip archive"),
        (&zip[..2000], "is damaged: as a zip archive"),
        (&legacy[..500], "the pickle is cut off"),
        (&legacy[..legacy.len() - 1], "is cut off"),
    ] {
        let error = refused(bytes);
        assert!(error.contains(expected), "{error}");
    }
    let error = PtFile::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("cannot open"), "{error}");
}

/// A dict that contains itself, and one dict twice.
#[test]
fn cycles_end_and_names_are_unique() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file.pt");
    let tensor =
        b"ctorch._utils\n_rebuild_tensor_v2\nq\x01((X\x07\x00\x00\x00storagectorch\nFloatStorage\n\
        X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00))tRq\x02";
    let file = |object: &[u8]| {
        let magic = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
        let keys = b"](X\x01\x00\x00\x000e.";
        let parts: [&[u8]; 7] = [magic, b"K\x00.", b"}.", tensor, object, b".", keys];
        let bytes = [parts.concat(), vec![1, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4]].concat();
        fs::write(&path, bytes).unwrap();
        PtFile::open(&path).unwrap()
    };
    // {"a": tensor, "b": itself}
    let found = file(b"0}q\x03(X\x01\x00\x00\x00ah\x02X\x01\x00\x00\x00bh\x03u");
    let tensors = found.tensors().unwrap();
    assert_eq!(tensors.len(), 1);
    assert_eq!(found.read(&tensors[0].1).unwrap(), [1, 2, 3, 4]);
    // {"a.b": tensor, "a": {"b": tensor}}
    let found = file(b"0}(X\x03\x00\x00\x00a.bh\x02X\x01\x00\x00\x00a}(X\x01\x00\x00\x00bh\x02uu");
    let error = found.tensors().unwrap_err().to_string();
    assert!(
        error.contains("the tensor `a.b` of") && error.contains("this name too"),
        "{error}"
    );
    // [[[..tensor..]]]
    let deep = [&b"0"[..], &[b']'; 70], b"h\x02", &[b'a'; 70]].concat();
    let error = file(&deep).tensors().unwrap_err().to_string();
    assert!(error.contains("nested too deeply"), "{error}");
    // 2^60 lists in 60, without a tensor and with one.
    let shared = |first: &[u8]| {
        let mut object = [&b"0"[..], first, b"q\x03"].concat();
        for index in 3..63 {
            object.extend([b'h', index, b'h', index, 0x86, b'q', index + 1]);
        }
        file(&object).tensors()
    };
    assert_eq!(shared(b"]").unwrap(), []);
    let error = shared(b"h\x02").unwrap_err().to_string();
    assert!(error.contains("too many tensors"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Changed bytes are read or refused, without a panic and without a tensor that is larger than
    /// what the file can hold.
    #[test]
    fn no_damage_is_a_panic(
        name in prop::sample::select(&["zip", "legacy", "zip64", "optimizer"][..]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        is_cut in prop::bool::weighted(0.1),
    ) {
        let mut bytes = read(&format!("pt/{name}.pt"));
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if is_cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file.pt");
        fs::write(&path, bytes).unwrap();
        let _ = read_all(&path);
    }
}
