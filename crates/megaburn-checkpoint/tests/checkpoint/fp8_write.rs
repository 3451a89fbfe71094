//! Weights that are written in FP8 stand for the numbers that were there, within half a step.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use burn::tensor::{DType, TensorData, bf16};
use megaburn_checkpoint::{
    HfDir, HfWriteOptions, TensorSource,
    hf::{HfQuantization, QUANTIZATION},
    write_hf,
};
use rstest::rstest;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::{
    model::Random,
    published::{Stored, publish},
};

const FORMS: [HfQuantization; 4] = [
    HfQuantization::Block {
        powers_of_two: true,
    },
    HfQuantization::Block {
        powers_of_two: false,
    },
    HfQuantization::Channel,
    HfQuantization::Tensor,
];

fn f32s(data: &TensorData) -> Vec<f32> {
    data.iter::<f32>().collect()
}

/// Writes the weights of `source` whose names end with `proj` in FP8.
fn export(source: &HfDir, to: &Path, form: HfQuantization, max_shard_bytes: u64) -> Vec<String> {
    let quantized = source.tensors().map(|tensor| tensor.name);
    let quantized: BTreeSet<_> = quantized
        .filter(|name| name.ends_with("proj.weight"))
        .collect();
    let options = HfWriteOptions {
        dtype: Some(DType::BF16),
        quantization: Some(form),
        quantized_tensors: quantized,
        max_shard_bytes,
        ..Default::default()
    };
    let config = json!({ "dtype": "bfloat16", QUANTIZATION: form.config(&["lm_head".into()]) });
    let files = [("config.json".to_string(), config.to_string().into_bytes())];
    write_hf(to, source, &options, &files).unwrap().files
}

/// The stored codes of the only file of a folder, by name.
fn codes(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.iter();
    let codes = tensors.filter(|(_, tensor)| tensor.dtype() == Dtype::F8_E4M3);
    codes
        .map(|(name, tensor)| (name.to_string(), tensor.data().to_vec()))
        .collect()
}

#[rstest]
fn what_is_read_back_is_within_half_a_step_and_is_written_as_it_is(
    #[values(0, 1, 2, 3)] form: usize,
    #[values(u64::MAX, 9_000)] max_shard_bytes: u64,
) {
    let form = FORMS[form];
    let mut random = Random::fresh();
    let dir = tempfile::tempdir().unwrap();
    let [from, to, again] = ["from", "to", "again"].map(|name| dir.path().join(name));
    let mut zeros = Stored::random("zero_proj.weight", DType::F32, &[3, 200], &mut random);
    zeros.bytes.fill(0);
    publish(
        &from,
        &[
            Stored::random("embedding.weight", DType::F32, &[8, 5], &mut random),
            Stored::random("down_proj.weight", DType::F32, &[131, 260], &mut random),
            Stored::random("up_proj.weight", DType::BF16, &[7, 3], &mut random),
            zeros,
        ],
    );
    let source = HfDir::open(&from).unwrap();
    let files = export(&source, &to, form, max_shard_bytes);
    assert_eq!(files.len() > 1, max_shard_bytes == 9_000, "{files:?}");
    let written = HfDir::open(&to).unwrap();
    let names = |dir: &HfDir| dir.tensors().map(|tensor| tensor.name).collect::<Vec<_>>();
    assert_eq!(
        names(&written),
        names(&source),
        "scales are no tensors of the model"
    );

    for name in names(&source) {
        let header = source.require(&name).unwrap();
        let [rows, cols] = [header.shape[0], header.shape[1]];
        let read = |dir: &HfDir| f32s(&dir.read_rows(&name, 0..rows).unwrap());
        let rounded = |x: f32| bf16::from_f32(x).to_f32();
        let before: Vec<_> = read(&source).into_iter().map(rounded).collect();
        let after = read(&written);
        if name == "embedding.weight" {
            assert_eq!(after, before);
            continue;
        }
        let largest = |i: usize| {
            let [row, col] = [i / cols, i % cols];
            let is_with = |j: usize| match form {
                HfQuantization::Tensor => true,
                HfQuantization::Channel => j / cols == row,
                _ => j / cols / 128 == row / 128 && j % cols / 128 == col / 128,
            };
            let with = (0..before.len()).filter(|j| is_with(*j));
            with.fold(0f32, |most, j| most.max(before[j].abs()))
        };
        // A few elements are enough: each looks at all that share its scale.
        for _ in 0..40 {
            let i = random.below(before.len() as u64) as usize;
            let scale = match (form, largest(i) / 448.0) {
                (HfQuantization::Block { powers_of_two }, scale) if powers_of_two => {
                    scale.log2().ceil().exp2()
                }
                (_, scale) => scale,
            };
            // Half the distance of numbers in E4M3, and the rounding of the result to bf16.
            let size = before[i].abs();
            let step = (size / 16.0).max(scale * 2f32.powi(-10)) + size / 250.0;
            let error = (after[i] - before[i]).abs();
            assert!(
                error <= step,
                "{name}[{i}]: {} became {}",
                before[i],
                after[i]
            );
        }
    }
    // The numbers were rounded to bf16 as they were read, and still they come back.
    export(&written, &again, form, u64::MAX);
    let is_power = matches!(
        form,
        HfQuantization::Block {
            powers_of_two: true
        }
    );
    if is_power {
        // A block whose largest code was rounded to 224 gets half its scale, and other codes.
        let again = HfDir::open(&again).unwrap();
        for name in names(&source) {
            let rows = source.require(&name).unwrap().num_rows();
            let [a, b] = [&written, &again].map(|dir| dir.read_rows(&name, 0..rows).unwrap());
            assert_eq!(a.as_bytes(), b.as_bytes(), "{name}");
        }
    } else if max_shard_bytes == u64::MAX {
        let [first, second] = [&to, &again].map(|folder| codes(folder));
        assert_eq!(first.len(), 3);
        assert_eq!(first, second);
    }
}

#[test]
fn a_weight_that_is_not_finite_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let mut random = Random::fresh();
    let mut weight = Stored::random("q_proj.weight", DType::F32, &[3, 4], &mut random);
    weight.bytes[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    publish(&dir.path().join("from"), &[weight]);
    let source = HfDir::open(&dir.path().join("from")).unwrap();
    let options = HfWriteOptions {
        quantization: Some(HfQuantization::Channel),
        quantized_tensors: BTreeSet::from(["q_proj.weight".to_string()]),
        ..Default::default()
    };
    let to = dir.path().join("to");
    let error = write_hf(&to, &source, &options, &[])
        .unwrap_err()
        .to_string();
    let said =
        "`q_proj.weight` has values that are not finite, which FP8 cannot hold: export an earlier";
    assert!(error.starts_with(said), "{error}");
    assert!(!to.exists());
}

/// Scales have the type of the model, and codes are by the scales as they are stored.
#[rstest]
// 0.40039 / 448 becomes 0.00089264, by which 0.27148 is 304.14 and not 303.77, which is below the
// middle of 288 and 320.
#[case::bf16(DType::BF16, [0.4, 0.271_484_38], [0x6a, 0x3a], [0x7e, 0x7a])]
// 2^-14, because smaller scales would have fewer digits.
#[case::f16(DType::F16, [1e-5, 0.0], [0x00, 0x04], [0x22, 0x00])]
fn scales_of_channels_are_rounded_before_codes_are_computed(
    #[case] dtype: DType,
    #[case] values: [f32; 2],
    #[case] scale: [u8; 2],
    #[case] codes: [u8; 2],
) {
    let dir = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| dir.path().join(name));
    let mut weight = Stored::random("q_proj.weight", DType::F32, &[1, 2], &mut Random::fresh());
    weight.bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
    publish(&from, &[weight]);
    let options = HfWriteOptions {
        dtype: Some(dtype),
        quantization: Some(HfQuantization::Channel),
        quantized_tensors: BTreeSet::from(["q_proj.weight".to_string()]),
        ..Default::default()
    };
    write_hf(&to, &HfDir::open(&from).unwrap(), &options, &[]).unwrap();
    let bytes = fs::read(to.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let stored = file.tensor("q_proj.weight_scale").unwrap();
    assert_eq!(stored.data(), scale);
    assert_eq!(file.tensor("q_proj.weight").unwrap().data(), codes);
}

#[test]
fn config_json_has_the_keys_that_engines_read() {
    let kept = ["lm_head".to_string(), "model.layers.0.mlp.gate".to_string()];
    let [block, same, channel, tensor] = FORMS.map(|form| form.config(&kept));
    assert_eq!(block, same);
    assert_eq!(block["quant_method"], "fp8");
    assert_eq!(block["weight_block_size"], json!([128, 128]));
    assert_eq!(block["modules_to_not_convert"], json!(kept));
    for (config, strategy) in [(channel, "channel"), (tensor, "tensor")] {
        assert_eq!(config["quant_method"], "compressed-tensors");
        assert_eq!(config["ignore"], json!(kept));
        let group: &Value = &config["config_groups"]["group_0"];
        assert_eq!(group["weights"]["strategy"], strategy);
        assert_eq!(group["input_activations"]["dynamic"], true);
    }
}
