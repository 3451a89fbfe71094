//! FP8 weights of published models are read as floats: each code times its scale.

use std::{collections::HashMap, fs, ops::Range, path::Path};

use burn::tensor::{DType, TensorData, bf16};
use megaburn_checkpoint::{HfDir, TensorSource};
use megaburn_mesh::{Axis, ShardSpec};
use rstest::rstest;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::model::Random;

/// A tensor of a file: its name, type, shape and bytes.
type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

fn codes(name: &str, shape: &[usize], random: &mut Random) -> Tensor {
    // No code of these stands for NaN.
    let code = |_| (random.next() % 0x7f) as u8 | (random.next() as u8 & 0x80);
    let bytes = (0..shape.iter().product()).map(code).collect();
    (name.into(), Dtype::F8_E4M3, shape.to_vec(), bytes)
}

fn scales(name: &str, shape: &[usize], dtype: Dtype, random: &mut Random) -> Tensor {
    let scale = |random: &mut Random| 2f32.powi(-7) * (1.0 + random.below(1 << 20) as f32 / 1e6);
    let mut bytes = Vec::new();
    for _ in 0..shape.iter().product() {
        match dtype {
            Dtype::F32 => bytes.extend(scale(random).to_le_bytes()),
            Dtype::BF16 => bytes.extend(bf16::from_f32(scale(random)).to_le_bytes()),
            _ => bytes.push(110 + random.below(30) as u8),
        }
    }
    (name.into(), dtype, shape.to_vec(), bytes)
}

fn write_file(path: &Path, tensors: &[Tensor]) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let bytes = safetensors::serialize(views, Some(metadata)).unwrap();
    fs::write(path, bytes).unwrap();
}

fn folder(quantization: Value, tensors: &[Tensor]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({ "dtype": "bfloat16", "quantization_config": quantization });
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    write_file(&dir.path().join("model.safetensors"), tensors);
    dir
}

fn blocks(size: [usize; 2]) -> Value {
    json!({ "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": size })
}

fn compressed(weights: Value) -> Value {
    let mut weights = weights;
    weights["num_bits"] = json!(8);
    weights["type"] = json!("float");
    json!({
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights } },
    })
}

/// The number of a code in E4M3, by its definition.
fn number(code: u8) -> f64 {
    let [sign, exponent, mantissa] = [code >> 7, code >> 3 & 0xf, code & 7].map(f64::from);
    let size = if exponent == 0.0 {
        mantissa / 8.0 * 2f64.powi(-6)
    } else {
        (1.0 + mantissa / 8.0) * 2f64.powf(exponent - 7.0)
    };
    if sign == 1.0 { -size } else { size }
}

/// What a weight stands for, in f32, with scales of blocks of `tall` by `wide` elements.
fn dequantized(weight: &Tensor, scales: &Tensor, [tall, wide]: [usize; 2]) -> Vec<f32> {
    let (_, _, shape, codes) = weight;
    let [rows, cols] = *shape.last_chunk().unwrap();
    let scale = |at: usize| match scales.1 {
        Dtype::F32 => f32::from_le_bytes(*scales.3[4 * at..].first_chunk().unwrap()),
        Dtype::BF16 => bf16::from_le_bytes(*scales.3[2 * at..].first_chunk().unwrap()).to_f32(),
        _ => 2f32.powi(i32::from(scales.3[at]) - 127),
    };
    let width = cols.div_ceil(wide);
    let of = |(i, code): (usize, &u8)| {
        let [matrix, row, col] = [i / (rows * cols), i / cols % rows, i % cols];
        let at = (matrix * rows.div_ceil(tall) + row / tall) * width + col / wide;
        (number(*code) * f64::from(scale(at))) as f32
    };
    codes.iter().enumerate().map(of).collect()
}

fn f32s(data: &TensorData) -> Vec<f32> {
    data.as_slice::<f32>().unwrap().to_vec()
}

/// The rectangle of a matrix of `cols` columns.
fn cut(all: &[f32], cols: usize, rows: Range<usize>, columns: Range<usize>) -> Vec<f32> {
    rows.flat_map(|row| all[row * cols..][columns.clone()].to_vec())
        .collect()
}

#[rstest]
#[case::blocks(blocks([128, 128]), "w.weight_scale_inv", [2, 3], [128, 128], Dtype::F32)]
#[case::powers(blocks([128, 128]), "w.weight_scale_inv", [2, 3], [128, 128], Dtype::F8_E8M0)]
#[case::small(blocks([7, 5]), "w.weight_scale_inv", [19, 52], [7, 5], Dtype::BF16)]
#[case::tensor(compressed(json!({"strategy": "tensor"})), "w.weight_scale", [1, 1], [131, 259], Dtype::BF16)]
#[case::channel(compressed(json!({"strategy": "channel"})), "w.weight_scale", [131, 1], [1, 259], Dtype::F32)]
#[case::group(compressed(json!({"strategy": "group", "group_size": 37})), "w.weight_scale", [131, 7], [1, 37], Dtype::F32)]
#[case::block(
    compressed(json!({"strategy": "block", "block_structure": "64x128"})),
    "w.weight_scale", [3, 3], [64, 128], Dtype::F32
)]
#[case::facebook(json!({"quant_method": "fbgemm_fp8"}), "w.weight_scale", [131, 1], [1, 259], Dtype::F32)]
#[case::nvidia(json!({"quant_method": "modelopt", "quant_algo": "FP8"}), "w.weight_scale", [1, 1], [131, 259], Dtype::F32)]
fn an_element_is_its_code_times_its_scale(
    #[case] quantization: Value,
    #[case] name: &str,
    #[case] grid: [usize; 2],
    #[case] block: [usize; 2],
    #[case] dtype: Dtype,
) {
    let mut random = Random::fresh();
    let weight = codes("w.weight", &[131, 259], &mut random);
    let scales = scales(name, &grid, dtype, &mut random);
    let expected = dequantized(&weight, &scales, block);
    let dir = folder(quantization, &[weight, scales]);
    let dir = HfDir::open(dir.path()).unwrap();
    let names: Vec<_> = dir.tensors().map(|tensor| tensor.name).collect();
    assert_eq!(names, ["w.weight"], "scales are no tensors of the folder");

    let narrow: Vec<f32> = expected
        .iter()
        .map(|x| bf16::from_f32(*x).to_f32())
        .collect();
    let rows = dir.read_rows("w.weight", 3..130).unwrap();
    assert_eq!(rows.dtype(), DType::BF16, "the type of config.json");
    let rows: Vec<f32> = rows.iter::<f32>().collect();
    assert_eq!(rows, cut(&narrow, 259, 3..130, 0..259));

    // Three ranks share the rows or the columns; their borders cut blocks.
    for (dim, transposed) in [(0, false), (1, false), (0, true), (1, true)] {
        let shape: [usize; 2] = if transposed { [259, 131] } else { [131, 259] };
        for rank in 0..3 {
            let padded = shape[dim].next_multiple_of(3);
            let spec = ShardSpec::split_padded(&shape, dim, padded, Axis::Tp, rank, 3).unwrap();
            let own = |at: usize, len: usize| {
                if at == dim {
                    spec.pieces[0].global.clone()
                } else {
                    0..len
                }
            };
            let [rows, cols] = [own(0, shape[0]), own(1, shape[1])];
            let names = ["w.weight".to_string()];
            let found = dir
                .read_shard(&names, transposed, &spec, Some(DType::F32))
                .unwrap();
            let mut local = f32s(&found);
            let held = if transposed {
                let lines = cut(&expected, 259, cols.clone(), rows.clone());
                let [len, width] = [rows.len(), cols.len()];
                (0..len * width)
                    .map(|i| lines[i % width * len + i / width])
                    .collect()
            } else {
                cut(&expected, 259, rows.clone(), cols.clone())
            };
            if spec.local_len > spec.pieces[0].global.len() {
                // The last rank has padding at the end of the dimension.
                let width = spec.local_shape()[1];
                local = cut(&local, width, 0..rows.len(), 0..cols.len());
            }
            assert_eq!(
                local, held,
                "dim {dim}, transposed {transposed}, rank {rank}"
            );
        }
    }
}

#[test]
fn fused_and_stacked_weights_of_several_files_have_their_own_scales() {
    let mut random = Random::fresh();
    let mut weight = |name: &str, shape: &[usize], grid: &[usize]| {
        let codes = codes(&format!("{name}.weight"), shape, &mut random);
        let scales = scales(
            &format!("{name}.weight_scale_inv"),
            grid,
            Dtype::F32,
            &mut random,
        );
        (codes, scales)
    };
    let gate = weight("gate", &[9, 20], &[3, 3]);
    let up = weight("up", &[6, 20], &[2, 3]);
    let experts = weight("experts", &[3, 5, 11], &[3, 2, 2]);
    let dir = folder(blocks([4, 8]), &[]);
    let path = dir.path();
    fs::remove_file(path.join("model.safetensors")).unwrap();
    // Scales are in another file than their codes.
    let files = [
        [&gate.0, &up.1, &experts.0].map(Clone::clone),
        [&gate.1, &up.0, &experts.1].map(Clone::clone),
    ];
    let mut map = HashMap::new();
    for (number, tensors) in files.iter().enumerate() {
        let file = format!("{number}.safetensors");
        write_file(&path.join(&file), tensors);
        map.extend(
            tensors
                .iter()
                .map(|tensor| (tensor.0.clone(), file.clone())),
        );
    }
    let index = json!({ "weight_map": map }).to_string();
    fs::write(path.join("model.safetensors.index.json"), index).unwrap();

    let dir = HfDir::open(path).unwrap();
    let lines = [
        dequantized(&gate.0, &gate.1, [4, 8]),
        dequantized(&up.0, &up.1, [4, 8]),
    ]
    .concat();
    let whole = ShardSpec::whole(&[20, 15], Axis::Tp, 0, 1);
    let names = ["gate.weight", "up.weight"].map(String::from);
    let found = dir
        .read_shard(&names, true, &whole, Some(DType::F32))
        .unwrap();
    let turned: Vec<f32> = (0..300).map(|i| lines[i % 15 * 20 + i / 15]).collect();
    assert_eq!(f32s(&found), turned);

    let all = dequantized(&experts.0, &experts.1, [4, 8]);
    let whole = ShardSpec::whole(&[5, 11], Axis::Tp, 0, 1);
    for expert in 0..3 {
        let names = [format!("experts.weight[{expert}]")];
        let found = dir
            .read_shard(&names, false, &whole, Some(DType::F32))
            .unwrap();
        assert_eq!(f32s(&found), all[expert * 55..][..55], "expert {expert}");
    }
}

#[test]
fn scales_of_activations_are_left_out() {
    let mut random = Random::fresh();
    let dir = folder(
        compressed(json!({"strategy": "tensor"})),
        &[
            codes("w.weight", &[4, 6], &mut random),
            scales("w.weight_scale", &[1], Dtype::F32, &mut random),
            scales("w.input_scale", &[1], Dtype::F32, &mut random),
            scales("attn.k_scale", &[1], Dtype::F32, &mut random),
            ("norm.weight".into(), Dtype::BF16, vec![3], vec![0; 6]),
        ],
    );
    let dir = HfDir::open(dir.path()).unwrap();
    let names: Vec<_> = dir.tensors().map(|tensor| tensor.name).collect();
    assert_eq!(names, ["norm.weight", "w.weight"]);
}

/// Weights are plain if only activations or caches are quantised, whose scales are left out.
#[rstest]
#[case::groups_without_weights(json!({
    "quant_method": "compressed-tensors",
    "config_groups": { "group_0": { "targets": ["LlamaAttention"], "weights": null } },
}))]
#[case::caches_only(json!({
    "quant_method": "compressed-tensors", "config_groups": {},
    "kv_cache_scheme": { "num_bits": 8, "type": "float", "strategy": "tensor" },
}))]
fn weights_may_be_plain_where_caches_are_quantised(#[case] quantization: Value) {
    let mut random = Random::fresh();
    let plain = ("w.weight".into(), Dtype::BF16, vec![3], vec![0; 6]);
    let scale = scales("attn.k_scale", &[1], Dtype::F32, &mut random);
    let dir = folder(quantization.clone(), &[plain, scale]);
    let dir = HfDir::open(dir.path()).unwrap();
    let names: Vec<_> = dir.tensors().map(|tensor| tensor.name).collect();
    assert_eq!(names, ["w.weight"]);

    let dir = folder(quantization, &[codes("w.weight", &[4, 6], &mut random)]);
    let error = HfDir::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("no weights are quantised"), "{error}");
}

/// MXFP8 of compressed-tensors stores exponents as unsigned bytes.
#[test]
fn scales_may_be_exponents_in_bytes() {
    let mut random = Random::fresh();
    let weight = codes("w.weight", &[3, 64], &mut random);
    let mut scales = scales("w.weight_scale", &[3, 2], Dtype::F8_E8M0, &mut random);
    let expected = dequantized(&weight, &scales, [1, 32]);
    scales.1 = Dtype::U8;
    let group = |scale_dtype: &str| {
        compressed(json!({"strategy": "group", "group_size": 32, "scale_dtype": scale_dtype}))
    };
    let dir = folder(group("torch.uint8"), &[weight.clone(), scales.clone()]);
    let whole = ShardSpec::whole(&[3, 64], Axis::Tp, 0, 1);
    let names = ["w.weight".to_string()];
    let dir = HfDir::open(dir.path()).unwrap();
    let found = dir.read_shard(&names, false, &whole, Some(DType::F32));
    assert_eq!(f32s(&found.unwrap()), expected);

    let dir = folder(group("torch.bfloat16"), &[weight, scales]);
    let error = HfDir::open(dir.path()).unwrap_err().to_string();
    assert!(
        error.contains("are U8, not floats; use the bf16"),
        "{error}"
    );
}

#[test]
fn floats_that_have_scales_are_refused() {
    let mut random = Random::fresh();
    let plain = ("w.weight".into(), Dtype::BF16, vec![3], vec![0; 6]);
    let scale = scales("w.weight_scale_inv", &[1, 1], Dtype::F32, &mut random);
    let dir = folder(blocks([4, 4]), &[plain, scale]);
    let error = HfDir::open(dir.path()).unwrap_err().to_string();
    let said = "tensor `w.weight` is BF16, but has scales `w.weight_scale_inv`: if it was";
    assert!(error.contains(said), "{error}");
}

#[rstest]
#[case::empty(json!({"config_groups": {}}), Value::Null, Value::Null)]
#[case::another(
    json!({"config_groups": {"g": {"weights": null}}}), blocks([2, 2]), json!("fp8")
)]
fn the_early_key_replaces_no_other(
    #[case] early: Value,
    #[case] today: Value,
    #[case] method: Value,
) {
    let plain = ("w.weight".into(), Dtype::BF16, vec![3], vec![0; 6]);
    let dir = folder(Value::Null, &[plain]);
    let config = json!({ "compression_config": early, "quantization_config": today });
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let dir = HfDir::open(dir.path()).unwrap();
    assert_eq!(dir.config()["quantization_config"]["quant_method"], method);
}

#[test]
fn compressed_tensors_may_have_its_early_key() {
    let mut random = Random::fresh();
    let tensors = [
        codes("w.weight", &[4, 6], &mut random),
        scales("w.weight_scale", &[4, 1], Dtype::BF16, &mut random),
    ];
    let dir = folder(Value::Null, &tensors);
    let mut config = json!({ "compression_config": compressed(json!({"strategy": "channel"})) });
    config["compression_config"]["quant_method"] = Value::Null;
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let dir = HfDir::open(dir.path()).unwrap();
    assert_eq!(dir.tensors().count(), 1);
    assert_eq!(
        dir.config()["quantization_config"]["quant_method"],
        "compressed-tensors"
    );
}

#[test]
fn model_optimizer_may_say_its_method_in_a_file_of_its_own() {
    let mut random = Random::fresh();
    let tensors = [
        codes("w.weight", &[4, 6], &mut random),
        scales("w.weight_scale", &[], Dtype::F32, &mut random),
    ];
    let dir = folder(Value::Null, &tensors);
    let write = |algorithm: &str| {
        let said =
            json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}});
        fs::write(dir.path().join("hf_quant_config.json"), said.to_string()).unwrap();
    };
    write("FP8");
    assert_eq!(HfDir::open(dir.path()).unwrap().tensors().count(), 1);
    write("NVFP4");
    let error = HfDir::open(dir.path()).unwrap_err().to_string();
    assert!(
        error.contains("is set to `modelopt`: `quant_algo` is \"NVFP4\""),
        "{error}"
    );
}

#[rstest]
#[case::none(Value::Null, &[1], Dtype::F32, "is F8_E4M3: config.json has no `quantization_config`")]
#[case::awq(json!({"quant_method": "awq"}), &[1], Dtype::F32, "is set to `awq`: this method is not supported")]
#[case::int8(
    json!({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}}),
    &[1], Dtype::F32, "the weights of `g` have `num_bits` 8 and `type` \"int\""
)]
#[case::sparse(
    json!({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}),
    &[1], Dtype::F32, "its weights are sparse (`sparse-24-bitmask`)"
)]
#[case::rotated(
    json!({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}}),
    &[1], Dtype::F32, "its weights are rotated"
)]
#[case::strategy(
    compressed(json!({"strategy": "attn_head"})), &[1], Dtype::F32, "have the strategy \"attn_head\"; known are"
)]
#[case::size(
    json!({"quant_method": "fp8", "weight_block_size": [128]}), &[1], Dtype::F32, "its block size is [128]"
)]
#[case::shape(
    blocks([2, 4]), &[2, 3], Dtype::F32,
    "its shape is [4, 6] and that of its scales `w.weight_scale_inv` is [2, 3], but by config.json they have [2, 2]"
)]
#[case::dtype(blocks([2, 4]), &[2, 2], Dtype::F8_E4M3, "its scales `w.weight_scale_inv` are F8_E4M3, not")]
#[case::number(blocks([2, 4]), &[2, 2], Dtype::I8, "its scales `w.weight_scale_inv` are I8, not floats")]
fn what_cannot_be_read_is_refused_by_name(
    #[case] quantization: Value,
    #[case] grid: &[usize],
    #[case] dtype: Dtype,
    #[case] message: &str,
) {
    let mut random = Random::fresh();
    let mut scales = scales("w.weight_scale_inv", grid, dtype, &mut random);
    scales
        .3
        .resize(grid.iter().product::<usize>() * dtype.bitsize() / 8, 1);
    let dir = folder(
        quantization,
        &[codes("w.weight", &[4, 6], &mut random), scales],
    );
    let error = HfDir::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

#[test]
fn a_weight_without_scales_is_refused_by_name() {
    let mut random = Random::fresh();
    let dir = folder(blocks([2, 4]), &[codes("w.weight", &[4, 6], &mut random)]);
    let error = HfDir::open(dir.path()).unwrap_err().to_string();
    let said = "tensor `w.weight` is F8_E4M3: it has no scales: there is neither \
        `w.weight_scale_inv` nor `w.weight_scale`";
    assert!(error.contains(said), "{error}");
}
