//! Folders that are written here are read back; `tests/tools/torch_formats.py` reads them with
//! PyTorch.

use std::fs;
use std::path::Path;

use megaburn_torch::dcp::{DcpDir, DcpRecord, DcpWriter, write_metadata};
use megaburn_torch::pickle::Tree;
use megaburn_torch::pt::tensor_tree;
use megaburn_torch::{DType, TorchError};

use crate::{check_folder, slice};

const NUM_RANKS: usize = 4;

/// A tensor that ranks hold boxes of.
struct Whole {
    name: &'static str,
    dtype: DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
    /// The offsets and sizes that each rank has.
    boxes: Vec<Option<(Vec<usize>, Vec<usize>)>>,
}

fn whole(name: &'static str, dtype: DType, shape: &[usize]) -> Whole {
    let len = shape.iter().product::<usize>() * dtype.num_bytes();
    let first = shape.first().copied().unwrap_or(1);
    let rows = first.div_ceil(NUM_RANKS);
    let boxes = (0..NUM_RANKS).map(|rank| match (name, shape) {
        // A grid of 2 x 2.
        ("grid", [rows, columns]) => {
            let split = |len: usize, part: usize| match part {
                0 => (0, len.div_ceil(2)),
                _ => (len.div_ceil(2), len / 2),
            };
            let (rows, columns) = (split(*rows, rank / 2), split(*columns, rank % 2));
            Some((vec![rows.0, columns.0], vec![rows.1, columns.1]))
        }
        (_, []) => (rank == 2).then(|| (vec![], vec![])),
        _ => {
            let start = (rank * rows).min(first);
            let offsets = [&[start], &vec![0; shape.len() - 1][..]].concat();
            let sizes = [&[rows.min(first - start)], &shape[1..]].concat();
            Some((offsets, sizes))
        }
    });
    Whole {
        name,
        dtype,
        shape: shape.to_vec(),
        bytes: (0..len).map(|_| fastrand::u8(..)).collect(),
        boxes: boxes.collect(),
    }
}

fn write_rank(folder: &Path, rank: usize, tensors: &[Whole]) -> Result<DcpRecord, TorchError> {
    let mut writer = DcpWriter::create(folder, rank)?;
    for tensor in tensors {
        let Some((offsets, sizes)) = &tensor.boxes[rank] else {
            continue;
        };
        let item = tensor.dtype.num_bytes();
        let bytes = slice(&tensor.bytes, item, &tensor.shape, offsets, sizes);
        writer.tensor(
            tensor.name,
            tensor.dtype,
            &tensor.shape,
            offsets,
            sizes,
            |out| bytes.chunks(7).try_for_each(|part| out.write_all(part)),
        )?;
    }
    // An object with a tensor in it.
    let numbers = tensor_tree(DType::I64, &[3], "numbers").unwrap();
    let state = Tree::Dict(vec![
        ("rank".into(), (rank as i64).into()),
        ("numbers".into(), numbers),
    ]);
    let numbers: Vec<u8> = [rank as i64; 3]
        .iter()
        .flat_map(|n| n.to_le_bytes())
        .collect();
    writer.object(&format!("rng.{rank}"), &state, &[("numbers", &numbers)])?;
    if rank == 1 {
        writer.object("step", &7.into(), &[])?;
    }
    writer.finish()
}

#[test]
fn what_the_ranks_write_is_read_back() {
    let folder = check_folder("dcp");
    let folder = folder.path();
    let tensors = [
        whole("rows", DType::F32, &[7, 5]),
        whole("grid", DType::BF16, &[5, 7]),
        whole("few", DType::F8E4M3, &[2, 3]),
        whole("deep", DType::I64, &[4, 1, 3]),
        whole("scalar", DType::F32, &[]),
        whole("empty", DType::F16, &[0, 3]),
    ];
    let records: Vec<DcpRecord> = (0..NUM_RANKS)
        .map(|rank| {
            let record = write_rank(folder, rank, &tensors).unwrap();
            let file = folder.join(format!("__{rank}_0.distcp"));
            assert_eq!(record.num_bytes(), fs::metadata(file).unwrap().len());
            // Records travel between ranks.
            let text = serde_json::to_string(&record).unwrap();
            serde_json::from_str(&text).unwrap()
        })
        .collect();
    write_metadata(folder, &records).unwrap();

    let dir = DcpDir::open(folder).unwrap();
    assert_eq!(dir.tensors().len(), tensors.len());
    for tensor in &tensors {
        let found = dir.tensor(tensor.name).unwrap();
        assert_eq!(
            (found.dtype(), found.shape()),
            (tensor.dtype, &tensor.shape[..])
        );
        assert_eq!(
            dir.read(tensor.name).unwrap(),
            tensor.bytes,
            "{}",
            tensor.name
        );
    }
    let objects: Vec<&str> = dir.objects().collect();
    assert_eq!(objects, ["rng.0", "rng.1", "rng.2", "rng.3", "step"]);
    let object = dir.object("rng.2").unwrap();
    assert_eq!(object.root().get("rank").unwrap().as_i64(), Some(2));
    let (name, numbers) = object.tensors().unwrap().remove(0);
    assert_eq!(name, "numbers");
    let expected: Vec<u8> = [2i64; 3].iter().flat_map(|n| n.to_le_bytes()).collect();
    assert_eq!(object.read(&numbers).unwrap(), expected);

    // The whole tensors, for PyTorch to compare.
    let about: serde_json::Map<String, serde_json::Value> = tensors
        .iter()
        .map(|tensor| {
            let hex: String = tensor
                .bytes
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect();
            let about = serde_json::json!({
                "dtype": tensor.dtype.name(), "shape": tensor.shape, "bytes": hex
            });
            (tensor.name.into(), about)
        })
        .collect();
    let text = serde_json::to_string(&about).unwrap();
    fs::write(folder.with_extension("json"), text).unwrap();

    // Nothing is replaced.
    let error = write_metadata(folder, &records).unwrap_err().to_string();
    assert!(
        error.contains(".metadata` exists and is not replaced"),
        "{error}"
    );
    let error = DcpWriter::create(folder, 3).unwrap_err().to_string();
    assert!(
        error.contains("__3_0.distcp` exists and is not replaced"),
        "{error}"
    );
}

/// A rank that writes one box of `w`.
fn record(
    folder: &Path,
    rank: usize,
    dtype: DType,
    shape: &[usize],
    rows: [usize; 2],
) -> DcpRecord {
    let mut writer = DcpWriter::create(folder, rank).unwrap();
    let bytes = vec![0; rows[1] * 2 * dtype.num_bytes()];
    let written = writer.tensor("w", dtype, shape, &[rows[0], 0], &[rows[1], 2], |out| {
        out.write_all(&bytes)
    });
    written.unwrap();
    writer.finish().unwrap()
}

#[test]
fn what_the_ranks_wrote_has_to_be_everything_once() {
    for (one, other, expected) in [
        (
            (DType::F32, [4, 2], [0, 2]),
            (DType::F32, [4, 2], [2, 1]),
            "wrote 6 elements of a tensor of the shape [4, 2]",
        ),
        (
            (DType::F32, [4, 2], [0, 2]),
            (DType::F32, [4, 2], [1, 3]),
            "have boxes at [0, 0] and [1, 0] that overlap",
        ),
        (
            (DType::F32, [4, 2], [0, 2]),
            (DType::F16, [4, 2], [2, 2]),
            "and another rank in float32 with [4, 2]",
        ),
        (
            (DType::F32, [4, 2], [0, 2]),
            (DType::F32, [5, 2], [2, 2]),
            "with the shape [5, 2]",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let records = [(0, one), (1, other)]
            .map(|(rank, (dtype, shape, rows))| record(folder.path(), rank, dtype, &shape, rows));
        let error = write_metadata(folder.path(), &records)
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected) && error.contains("`w`"), "{error}");
        assert!(!folder.path().join(".metadata").exists());
    }
}

#[test]
fn wrong_boxes_and_bytes_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = DcpWriter::create(folder.path(), 0).unwrap();
    let mut error = |offsets: &[usize], len: usize| {
        let written = writer.tensor("w", DType::F32, &[4], offsets, &[2], |out| {
            out.write_all(&vec![0; len])
        });
        written.unwrap_err().to_string()
    };
    for (offsets, len, expected) in [
        (&[3][..], 8, "are not inside the shape [4]"),
        (&[0, 0], 8, "are not inside the shape [4]"),
        (&[0], 7, "7 bytes were given for the 8"),
        (&[0], 9, "9 bytes were given for the 8"),
    ] {
        let error = error(offsets, len);
        assert!(error.contains(expected) && error.contains("`w`"), "{error}");
    }
    let name = Tree::global("a\nb", "c");
    let error = writer.object("o", &name, &[]).unwrap_err().to_string();
    assert!(error.contains("has a line break"), "{error}");
}
