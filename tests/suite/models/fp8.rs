//! Models that are published with FP8 weights, read and written.

use std::{fs, path::Path};

use burn::tensor::DType;
use megaburn::{
    checkpoint::{HfDir, TensorHeader},
    mesh::{Axis, ShardSpec},
    train::{config::Dtype, device::Devices},
    verify::{Reference, Tolerances, verify},
};
use megaburn_test_support::run::Run;
use rstest::rstest;
use safetensors::SafeTensors;
use serde_json::Value;

use crate::{
    models::{
        round_trip::{megaburn, succeed, text},
        transformers::fixture,
    },
    runs::child::Ranks,
};

/// Transformers dequantises the same weights. The borders of ranks cut blocks of 8 by 16, and of
/// DeepSeek's projections the ranks hold parts of several blocks.
#[rstest]
#[case("fp8-deepseek-v3", &["tp1", "tp2-sp", "tp4-sp", "ep2-dp2", "tp2-pp2-sp"])]
#[case("fp8-llama", &["tp1", "tp2", "tp4-sp", "pp2"])]
fn an_fp8_model_has_the_logits_of_transformers(#[case] name: &str, #[case] layouts: &[&str]) {
    let reference = Reference::open(&fixture(name)).unwrap();
    for layout in layouts {
        let tolerances = Tolerances::of(Dtype::F32);
        let layout = layout.parse().unwrap();
        let report = verify(
            &reference,
            &layout,
            Dtype::F32,
            &tolerances,
            Devices::Cpu,
            None,
        );
        assert!(
            report.ok && report.skipped.is_empty(),
            "{name}: {report:#?}"
        );
    }
}

/// An import is the dequantised model in the type of `config.json`, and an export of it says nothing
/// of the quantisation that it does not have any more.
#[test]
fn an_fp8_model_is_imported_and_exported_in_fp8_again() {
    let dir = tempfile::tempdir().unwrap();
    let hf = fixture("fp8-llama");
    let [checkpoint, plain, wide, again] =
        ["checkpoint", "plain", "wide", "again"].map(|name| dir.path().join(name));
    succeed(&["convert", "import", text(&hf), text(&checkpoint)]);
    succeed(&["verify", text(&hf), text(&checkpoint)]);
    succeed(&["convert", "export", text(&checkpoint), text(&plain)]);
    succeed(&["verify", text(&hf), text(&plain)]);
    let config = |folder: &Path| -> Value {
        let file = fs::read_to_string(folder.join("config.json")).unwrap();
        serde_json::from_str(&file).unwrap()
    };
    assert!(config(&plain)["quantization_config"].is_null());
    assert_eq!(config(&plain)["dtype"], "bfloat16");

    // The same codes come back, because no rounding to bf16 is in between.
    let to_f32 = [
        "convert",
        "import",
        text(&hf),
        text(&wide),
        "--dtype",
        "f32",
    ];
    succeed(&to_f32);
    let export = [
        "convert",
        "export",
        text(&wide),
        text(&again),
        "--dtype",
        "f32",
    ];
    succeed(&[&export[..], &["--quantize", "fp8-channel"]].concat());
    let [found, expected] = [&again, &hf].map(|folder| HfDir::open(folder).unwrap());
    for TensorHeader { name, shape, .. } in expected.tensors() {
        let whole = ShardSpec::whole(&shape, Axis::Tp, 0, 1);
        let [a, b] = [&found, &expected].map(|dir| {
            let names = std::slice::from_ref(&name);
            let data = dir.read_shard(names, false, &whole, Some(DType::F32));
            data.unwrap().iter::<f32>().collect::<Vec<_>>()
        });
        let far = a
            .iter()
            .zip(&b)
            .find(|(a, b)| (**a - **b).abs() > 1e-6 * b.abs());
        assert_eq!(far, None, "{name}");
    }
    assert_eq!(
        config(&again)["quantization_config"]["quant_method"],
        "compressed-tensors"
    );
    assert_eq!(
        config(&again)["quantization_config"]["ignore"][0],
        "lm_head"
    );

    // Ranks and one rank continue a text alike.
    let generate = [
        "generate",
        text(&again),
        "--prompt-ids",
        "5,7",
        "--max-tokens",
        "4",
    ];
    let split = [&generate[..], &["--layout", "tp2"]].concat();
    assert_eq!(succeed(&split), succeed(&generate));
}

/// Of a mixture of experts, the weights of experts are quantised, and routers are not.
#[test]
fn an_export_quantises_linear_layers_only() {
    let [end, kept] = ["_scale", "ignore"];
    let dir = tempfile::tempdir().unwrap();
    let [checkpoint, out] = ["checkpoint", "out"].map(|name| dir.path().join(name));
    succeed(&[
        "convert",
        "import",
        text(&fixture("deepseek-v3-mtp")),
        text(&checkpoint),
    ]);
    let export = ["convert", "export", text(&checkpoint), text(&out)];
    succeed(
        &[
            &export[..],
            &["--quantize", "fp8-channel", "--max-shard-gb", "1e-5"],
        ]
        .concat(),
    );

    let index = fs::read_to_string(out.join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_str(&index).unwrap();
    let names = index["weight_map"].as_object().unwrap();
    let config = fs::read_to_string(out.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["dtype"], "bfloat16");
    let kept: Vec<_> = config["quantization_config"][kept]
        .as_array()
        .unwrap()
        .iter()
        .collect();
    let linear = [
        "q_a_proj",
        "kv_b_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ];
    for name in names.keys().filter(|name| name.ends_with(".weight")) {
        let is_linear = linear
            .iter()
            .any(|layer| name.ends_with(&format!("{layer}.weight")));
        let module = name.strip_suffix(".weight").unwrap();
        let has_scales = names.contains_key(&format!("{name}{end}"));
        if is_linear {
            assert!(
                has_scales && !kept.contains(&&Value::from(module)),
                "{name}"
            );
        }
        let is_kept = ["mlp.gate", "lm_head", "eh_proj", "shared_head.head"];
        if is_kept.iter().any(|layer| module.ends_with(layer)) {
            assert!(
                !has_scales && kept.contains(&&Value::from(module)),
                "{name}"
            );
        }
        assert!(
            !has_scales || !name.contains("norm") && !name.contains("embed"),
            "{name}"
        );
    }
    let experts = names
        .keys()
        .filter(|name| name.contains(".experts.") && name.ends_with(end));
    assert!(experts.count() >= 3 * 8, "each expert has its own scales");
    // What was written is a model again.
    let read = HfDir::open(&out).unwrap().tensors().count();
    let source = HfDir::open(&fixture("deepseek-v3-mtp")).unwrap();
    assert_eq!(read, source.tensors().count());
    succeed(&[
        "generate",
        text(&out),
        "--prompt-ids",
        "5,7",
        "--max-tokens",
        "2",
        "--layout",
        "dp2-ep2",
    ]);
}

/// Linear layers outside the blocks are named too, because engines would look for their scales.
#[test]
fn all_linear_layers_that_are_not_quantised_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let [checkpoint, out] = ["checkpoint", "out"].map(|name| dir.path().join(name));
    succeed(&[
        "convert",
        "import",
        text(&fixture("bert")),
        text(&checkpoint),
    ]);
    let export = ["convert", "export", text(&checkpoint), text(&out)];
    succeed(&[&export[..], &["--quantize", "fp8-channel"]].concat());
    let config = fs::read_to_string(out.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let named = [
        "bert.pooler.dense",
        "cls.predictions.decoder",
        "cls.predictions.transform.dense",
        "cls.seq_relationship",
    ];
    assert_eq!(
        config["quantization_config"]["ignore"],
        serde_json::json!(named)
    );
}

/// The layers that a run kept in its own type are not quantised, and blocks have the scales that
/// the run had.
#[test]
fn an_export_follows_the_precision_of_its_run() {
    let run = Run::new();
    let sets = [
        "model.hidden=128",
        "model.ffn=128",
        "model.heads=2",
        "model.kv_heads=2",
        "precision.recipe=blockwise",
        "precision.num_layers_at_start_in_bf16=1",
    ];
    Ranks::threads(&run.args("tp1", 1, &sets)).finish();
    let [from, out] = ["run", "out"].map(|name| run.path(name));
    let export = ["convert", "export", text(&from), text(&out)];
    let ended = megaburn(&[&export[..], &["--quantize", "fp8-block"]].concat());
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let said = "4 weights of linear layers are not quantised, because the run kept them";
    assert!(ended.stderr.contains(said), "{ended:#?}");

    let config = fs::read_to_string(out.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let kept = &config["quantization_config"]["modules_to_not_convert"];
    let layer = |name: &str| Value::from(format!("model.layers.0.{name}"));
    for part in ["self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj"] {
        assert!(kept.as_array().unwrap().contains(&layer(part)), "{kept}");
    }
    assert_eq!(kept.as_array().unwrap().len(), 8, "{kept}");
    let bytes = fs::read(out.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let is_scale = |name: &&str| name.ends_with("_scale_inv");
    let names = file.names();
    let scales: Vec<_> = names.into_iter().filter(is_scale).collect();
    assert_eq!(scales.len(), 7);
    for name in scales {
        assert!(name.starts_with("model.layers.1."), "{name}");
        for scale in file.tensor(name).unwrap().data().chunks(4) {
            let scale = f32::from_le_bytes(scale.try_into().unwrap());
            assert_eq!(scale.log2().fract(), 0.0, "{name}: {scale}");
        }
    }
}

#[rstest]
#[case("gpt2", &["fp8-block"], "gpt2 models publish weights as [in, out]")]
#[case("gpt-oss", &["fp8-block"], "gpt_oss models publish experts in stacks")]
#[case("qwen3", &["fp8-block"], "tensor `model.layers.0.self_attn.q_proj.weight`: vLLM does not start")]
#[case("deepseek-v3-mtp", &["fp8-tensor"], "tensor `model.layers.1.mlp.experts.0.down_proj.weight`: vLLM starts no experts")]
#[case("qwen3", &["fp8-channel", "--power-of-two-scales"], "used with --quantize fp8-block only")]
fn what_engines_do_not_read_in_fp8_is_refused(
    #[case] name: &str,
    #[case] form: &[&str],
    #[case] message: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let [checkpoint, out] = ["checkpoint", "out"].map(|name| dir.path().join(name));
    succeed(&["convert", "import", text(&fixture(name)), text(&checkpoint)]);
    let export = [
        "convert",
        "export",
        text(&checkpoint),
        text(&out),
        "--quantize",
    ];
    let ended = megaburn(&[&export[..], form].concat());
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.stderr.contains(message), "{ended:#?}");
    assert!(!out.exists());
}
