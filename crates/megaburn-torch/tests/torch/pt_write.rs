//! Files that are written here are read back; `tests/tools/torch_formats.py` reads them with
//! PyTorch.

use std::fs::{self, File};
use std::io::BufWriter;

use megaburn_torch::DType;
use megaburn_torch::pickle::Tree;
use megaburn_torch::pt::{PtFile, PtWriter, tensor_tree};

use crate::check_folder;

const DTYPES: [&str; 21] = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
    "complex32",
    "complex64",
    "complex128",
];

#[test]
fn what_is_written_is_read_back() {
    let folder = check_folder("pt");
    let path = folder.path().join("written.pt");
    let tensors: Vec<(DType, Vec<usize>, Vec<u8>)> = DTYPES
        .iter()
        .enumerate()
        .map(|(number, name)| {
            let dtype = DType::from_name(name).unwrap();
            let shape = [vec![], vec![5], vec![3, 2], vec![0, 7]][number % 4].clone();
            let len = shape.iter().product::<usize>() * dtype.num_bytes();
            let limit = if *name == "bool" { 1 } else { 255 };
            let bytes = (0..len).map(|_| fastrand::u8(..=limit)).collect();
            (dtype, shape, bytes)
        })
        .collect();
    let mut entries = vec![("epoch".into(), Tree::Int(3))];
    for (key, (dtype, shape, _)) in tensors.iter().enumerate() {
        let tree = tensor_tree(*dtype, shape, &key.to_string()).unwrap();
        entries.push((dtype.name().into(), tree));
    }
    let out = BufWriter::new(File::create(&path).unwrap());
    let mut writer = PtWriter::new(out, &Tree::Dict(entries)).unwrap();
    for (key, (.., bytes)) in tensors.iter().enumerate() {
        let written = writer.storage(&key.to_string(), |out| out.write_all(bytes));
        written.unwrap();
    }
    writer.finish().unwrap().into_inner().unwrap();

    let file = PtFile::open(&path).unwrap();
    assert_eq!(file.root().get("epoch").unwrap().as_i64(), Some(3));
    let found = file.tensors().unwrap();
    assert_eq!(found.len(), tensors.len());
    let whole = fs::read(&path).unwrap();
    for ((name, found), (dtype, shape, bytes)) in found.iter().zip(&tensors) {
        assert_eq!(name, dtype.name());
        assert_eq!((found.dtype(), found.shape()), (*dtype, &shape[..]));
        assert_eq!(&file.read(found).unwrap(), bytes);
        if bytes.len() > 20 {
            let at = whole.windows(bytes.len()).position(|part| part == bytes);
            assert_eq!(at.unwrap() % 64, 0, "{name}");
        }
    }
}

#[test]
fn a_shape_that_is_too_large_is_refused() {
    for shape in [
        vec![usize::MAX],
        vec![1 << 32, 1 << 32],
        vec![0, usize::MAX, 2],
    ] {
        let error = tensor_tree(DType::F32, &shape, "0")
            .unwrap_err()
            .to_string();
        assert!(error.contains("is too large"), "{error}");
    }
}
