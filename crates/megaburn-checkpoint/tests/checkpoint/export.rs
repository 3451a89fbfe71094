//! A published model survives the conversion to a checkpoint of any layout and back unchanged.

use std::{fs, path::Path};

use burn::tensor::{BoolStore, DType};
use megaburn_checkpoint::{
    Checkpoint, CheckpointError, HfDir, HfEntry, HfView, HfWriteOptions, NamedTensor, Retention,
    Snapshot, TensorSource, compare, save, save_single, write_hf,
};
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
use megaburn_mesh::{Axis, FusedPart, Layout, ShardSpec};
use rstest::rstest;

use crate::{
    model::{Random, names},
    published::{Stored, publish, serialized},
};

const CONFIG: &[u8] = br#"{"model_type": "test"}"#;

/// A parameter and the names and widths of the published tensors that make it up.
struct Param {
    name: &'static str,
    parts: Vec<(&'static str, usize)>,
    outer: Vec<usize>,
    transposed: bool,
    units: Vec<FusedPart>,
    dim: usize,
    dtype: DType,
}

fn params(random: &mut Random) -> Vec<Param> {
    let mut size = |max: u64| 1 + random.below(max) as usize;
    let hidden = size(90);
    let head = size(9);
    let ffn = 12 * size(9);
    let vocab = 12 * size(20);
    let heads = vec![
        FusedPart::units(12, head),
        FusedPart::units(2, head),
        FusedPart::units(2, head),
    ];
    let qkv = vec![("q", 12 * head), ("k", 2 * head), ("v", 2 * head)];
    let biases = vec![
        ("q.bias", 12 * head),
        ("k.bias", 2 * head),
        ("v.bias", 2 * head),
    ];
    let row = |name, parts, outer, transposed, units, dim, dtype| Param {
        name,
        parts,
        outer,
        transposed,
        units,
        dim,
        dtype,
    };
    let all = |n| vec![FusedPart::new(n)];
    let two = |n| vec![FusedPart::new(n); 2];
    vec![
        row(
            "qkv",
            qkv,
            vec![hidden],
            true,
            heads.clone(),
            1,
            DType::BF16,
        ),
        row("qkv.bias", biases, vec![], true, heads, 0, DType::F32),
        row(
            "mlp",
            vec![("gate", ffn), ("up", ffn)],
            vec![hidden],
            true,
            two(ffn),
            1,
            DType::F16,
        ),
        row(
            "down",
            vec![("down", hidden)],
            vec![ffn],
            true,
            all(ffn),
            0,
            DType::F32,
        ),
        row(
            "emb",
            vec![("emb", hidden)],
            vec![vocab],
            false,
            all(vocab),
            0,
            DType::BF16,
        ),
        row(
            "c",
            vec![("c.a", ffn), ("c.b", ffn)],
            vec![hidden],
            false,
            two(ffn),
            1,
            DType::F64,
        ),
        row(
            "e",
            vec![("e.a", ffn), ("e.b", ffn)],
            vec![3, head],
            true,
            two(ffn),
            2,
            DType::BF16,
        ),
        row(
            "ids",
            vec![("ids", 12)],
            vec![2],
            false,
            all(12),
            1,
            DType::I64,
        ),
    ]
}

impl Param {
    fn names(&self) -> Vec<String> {
        self.parts
            .iter()
            .map(|(name, _)| name.to_string())
            .collect()
    }

    fn shape(&self) -> Vec<usize> {
        let width = self.parts.iter().map(|(_, width)| width).sum();
        self.outer.iter().copied().chain([width]).collect()
    }

    fn spec(&self, rank: usize, ranks: usize) -> ShardSpec {
        ShardSpec::split(&self.shape(), self.dim, &self.units, Axis::Tp, rank, ranks).unwrap()
    }

    fn stored(&self, random: &mut Random) -> Vec<Stored> {
        let stored = |(name, width): &(&str, usize)| {
            let mut shape: Vec<usize> = self.outer.iter().copied().chain([*width]).collect();
            if let (true, [.., a, b]) = (self.transposed, shape.as_mut_slice()) {
                std::mem::swap(a, b);
            }
            Stored::random(name, self.dtype, &shape, random)
        };
        self.parts.iter().map(stored).collect()
    }

    fn entries(&self) -> Vec<HfEntry> {
        let mut end = 0;
        let entry = |(name, width): &(&str, usize)| {
            let range = end..end + width;
            end = range.end;
            let columns = vec![range];
            let (name, tensor) = (name.to_string(), self.name.to_string());
            HfEntry {
                name,
                tensor,
                columns,
                transposed: self.transposed,
            }
        };
        self.parts.iter().map(entry).collect()
    }

    fn named<'a>(&'a self, hf: &'a HfDir, spec: &'a ShardSpec) -> NamedTensor<'a> {
        let read = move || hf.read_shard(&self.names(), self.transposed, spec, None);
        NamedTensor::lazy(self.name, spec, self.dtype, read)
    }
}

/// Saves the published model like all ranks of a layout, or like a single process at an exact path.
fn import(hf: &HfDir, params: &[Param], dir: &Path, layout: &str) -> Checkpoint {
    if layout == "single" {
        let specs: Vec<_> = params.iter().map(|param| param.spec(0, 1)).collect();
        let tensors = params
            .iter()
            .zip(&specs)
            .map(|(param, spec)| param.named(hf, spec));
        let path = dir.join("imported");
        save_single(&path, false, &Snapshot::default(), "dp1", tensors, &[]).unwrap();
        return Checkpoint::open(&path).unwrap();
    }
    let layout: Layout = layout.parse().unwrap();
    let ranks = run_threads(layout.world_size(), GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let rank = groups.tp.rank();
        let size = groups.tp.size();
        let specs: Vec<_> = params.iter().map(|param| param.spec(rank, size)).collect();
        let tensors = params
            .iter()
            .zip(&specs)
            .map(|(param, spec)| param.named(hf, spec));
        save(
            dir,
            &Retention::default(),
            None,
            &groups,
            &Snapshot::default(),
            tensors,
        )
    });
    Checkpoint::open(&ranks.into_iter().next().unwrap().unwrap()).unwrap()
}

fn config() -> Vec<(String, Vec<u8>)> {
    vec![("config.json".to_string(), CONFIG.to_vec())]
}

#[rstest]
fn through_a_checkpoint_of_any_layout_every_tensor_comes_back_byte_for_byte(
    #[values("single", "dp1", "tp2", "tp3-dp2", "tp4")] layout: &str,
    #[values(u64::MAX, 20_000, 1)] max_shard_bytes: u64,
) {
    let mut random = Random::fresh();
    let mut params = params(&mut random);
    if layout.starts_with("tp3") {
        // Two key/value heads cannot be split over three ranks.
        params.retain(|param| !param.name.starts_with("qkv"));
    }
    let dir = tempfile::tempdir().unwrap();
    let published = dir.path().join("published");
    let tensors: Vec<_> = params
        .iter()
        .flat_map(|param| param.stored(&mut random))
        .collect();
    publish(&published, &tensors);
    let hf = HfDir::open(&published).unwrap();
    let checkpoint = import(&hf, &params, &dir.path().join("run"), layout);
    let entries: Vec<_> = params.iter().flat_map(Param::entries).collect();
    let view = HfView::new(&checkpoint, entries).unwrap();
    assert_eq!(view.headers(), hf.headers());
    for tensor in &tensors {
        for _ in 0..4 {
            let from = random.below(tensor.shape[0] as u64 + 1) as usize;
            let to = from + random.below((tensor.shape[0] - from) as u64 + 1) as usize;
            let of_view = view.read_rows(&tensor.name, from..to);
            let of_hf = hf.read_rows(&tensor.name, from..to);
            assert_eq!(
                of_view.unwrap(),
                of_hf.unwrap(),
                "{} {from}..{to}",
                tensor.name
            );
        }
    }

    let target = dir.path().join("exported");
    let options = HfWriteOptions {
        max_shard_bytes,
        ..Default::default()
    };
    let written = write_hf(&target, &view, &options, &config()).unwrap();
    let back = HfDir::open(&target).unwrap();
    assert_eq!(fs::read(target.join("config.json")).unwrap(), CONFIG);
    for tensor in &tensors {
        assert_eq!(back.header(&tensor.name), hf.header(&tensor.name));
        let rows = 0..back.require(&tensor.name).unwrap().num_rows();
        let read = back.read_rows(&tensor.name, rows).unwrap();
        assert!(read.as_bytes() == tensor.bytes, "{}", tensor.name);
    }
    assert!(compare(&hf, &back, |_| {}).unwrap().is_identical());
    assert_eq!(written.num_tensors, tensors.len());
    assert_eq!(
        written.num_bytes,
        tensors.iter().map(|t| t.bytes.len() as u64).sum::<u64>()
    );
    match max_shard_bytes {
        u64::MAX => {
            // The file itself is byte-identical to that of the safetensors library.
            let file = fs::read(target.join("model.safetensors")).unwrap();
            assert!(file == serialized(&tensors));
            assert_eq!(names(&target), ["config.json", "model.safetensors"]);
        }
        1 => assert_eq!(written.files.len(), tensors.len()),
        _ => assert!(written.files.len() < tensors.len()),
    }
}

#[test]
fn the_index_is_as_transformers_writes_it() {
    let mut random = Random::fresh();
    let dir = tempfile::tempdir().unwrap();
    let stored = |name: &str, len: usize, random: &mut Random| {
        Stored::random(name, DType::F32, &[len], random)
    };
    // 40, 60, 200, 20 and 100 bytes in name order.
    let tensors = [("e", 25), ("b", 15), ("c", 50), ("a", 10), ("d", 5)]
        .map(|(name, len)| stored(name, len, &mut random));
    publish(&dir.path().join("hf"), &tensors);
    let hf = HfDir::open(&dir.path().join("hf")).unwrap();
    let options = HfWriteOptions {
        max_shard_bytes: 120,
        ..Default::default()
    };
    let target = dir.path().join("out");
    let written = write_hf(&target, &hf, &options, &config()).unwrap();
    let file = |number| format!("model-{number:05}-of-00003.safetensors");
    assert_eq!(written.files, [file(1), file(2), file(3)]);
    let index = fs::read_to_string(target.join("model.safetensors.index.json")).unwrap();
    let expected = r#"{
  "metadata": {
    "total_size": 420
  },
  "weight_map": {
    "a": "model-00001-of-00003.safetensors",
    "b": "model-00001-of-00003.safetensors",
    "c": "model-00002-of-00003.safetensors",
    "d": "model-00003-of-00003.safetensors",
    "e": "model-00003-of-00003.safetensors"
  }
}
"#;
    assert_eq!(index, expected);
    let bytes = fs::read(target.join(file(3))).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
    assert_eq!(header.offset_keys(), ["d", "e"]);
}

#[test]
fn floats_are_cast_on_the_way_out_and_other_types_are_not() {
    let mut random = Random::fresh();
    let dir = tempfile::tempdir().unwrap();
    let bool = DType::Bool(BoolStore::Native);
    let tensors = [
        ("f", DType::F32),
        ("g", DType::F16),
        ("i", DType::I64),
        ("m", bool),
    ]
    .map(|(name, dtype)| Stored::random(name, dtype, &[3, 5], &mut random));
    publish(&dir.path().join("hf"), &tensors);
    let hf = HfDir::open(&dir.path().join("hf")).unwrap();
    let options = |dtype| HfWriteOptions {
        dtype: Some(dtype),
        ..Default::default()
    };
    let target = dir.path().join("out");
    write_hf(&target, &hf, &options(DType::BF16), &config()).unwrap();
    let back = HfDir::open(&target).unwrap();
    let dtypes: Vec<_> = back.tensors().map(|header| header.dtype).collect();
    assert_eq!(dtypes, [DType::BF16, DType::BF16, DType::I64, bool]);
    for tensor in &tensors {
        let rows = hf.read_rows(&tensor.name, 0..3).unwrap();
        let is_float = matches!(tensor.dtype, DType::F32 | DType::F16);
        let expected = if is_float {
            rows.convert_dtype(DType::BF16)
        } else {
            rows
        };
        assert_eq!(back.read_rows(&tensor.name, 0..3).unwrap(), expected);
    }
    let wide = HfWriteOptions {
        f32_tensors: ["g", "i"].map(String::from).into(),
        force: true,
        ..options(DType::BF16)
    };
    write_hf(&target, &hf, &wide, &config()).unwrap();
    let back = HfDir::open(&target).unwrap();
    let dtypes: Vec<_> = back
        .tensors()
        .map(|header| (header.name, header.dtype))
        .collect();
    let expected = [
        ("f", DType::BF16),
        ("g", DType::F32),
        ("i", DType::I64),
        ("m", bool),
    ];
    assert_eq!(
        dtypes,
        expected.map(|(name, dtype)| (name.to_string(), dtype))
    );
    let error = write_hf(&target, &hf, &options(DType::I64), &[])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("cannot convert to element type I64"),
        "{error}"
    );
}

#[test]
fn an_existing_target_is_replaced_only_with_force_and_only_a_published_model() {
    let mut random = Random::fresh();
    let dir = tempfile::tempdir().unwrap();
    let hf = dir.path().join("hf");
    let target = dir.path().join("out");
    publish(&hf, &[Stored::random("w", DType::F32, &[4], &mut random)]);
    let hf = HfDir::open(&hf).unwrap();
    let write = |force| {
        let options = HfWriteOptions {
            force,
            ..Default::default()
        };
        write_hf(&target, &hf, &options, &config())
    };
    write(false).unwrap();
    assert!(matches!(
        write(false).unwrap_err(),
        CheckpointError::Exists { .. }
    ));
    fs::write(target.join("mine"), "").unwrap();
    let error = write(true).unwrap_err().to_string();
    assert!(error.contains("`mine` does not belong to one"), "{error}");
    fs::rename(target.join("mine"), target.join("merges.txt")).unwrap();
    write(true).unwrap();
    assert_eq!(names(&target), ["config.json", "model.safetensors"]);
    fs::remove_file(target.join("config.json")).unwrap();
    let error = write(true).unwrap_err().to_string();
    assert!(
        error.contains("is not just a published model (it has no `config.json`)"),
        "{error}"
    );
    assert_eq!(names(dir.path()), ["hf", "out"]);
}
