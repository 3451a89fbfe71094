//! Checkpoints as they were published, with other names, constants, keys of older versions and
//! element types.

use std::{collections::BTreeMap, fs, path::Path};

use rstest::rstest;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

use crate::{
    models::round_trip::{megaburn, succeed, text},
    models::transformers::fixture,
};

/// The data type, shape and bytes of each tensor, by name.
pub(crate) type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

pub(crate) fn read(path: &Path) -> Tensors {
    let file = fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let owned = |(name, view): (String, TensorView<'_>)| {
        (
            name,
            (view.dtype(), view.shape().to_vec(), view.data().to_vec()),
        )
    };
    tensors.tensors().into_iter().map(owned).collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| {
            (
                name.clone(),
                TensorView::new(*dtype, shape.clone(), bytes).unwrap(),
            )
        })
        .collect();
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// A fixture with other tensors and another configuration, which must compute the same.
pub(crate) fn changed(
    name: &str,
    tensors: impl FnOnce(&mut Tensors),
    config: impl FnOnce(&mut Value),
) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let hf = dir.path().join("hf");
    fs::create_dir(&hf).unwrap();
    for file in ["reference.json", "reference.safetensors"] {
        fs::copy(fixture(name).join(file), hf.join(file)).unwrap();
    }
    let mut all = read(&fixture(name).join("model.safetensors"));
    tensors(&mut all);
    write(&hf.join("model.safetensors"), &all);
    let mut json =
        serde_json::from_slice(&fs::read(fixture(name).join("config.json")).unwrap()).unwrap();
    config(&mut json);
    fs::write(hf.join("config.json"), json.to_string()).unwrap();
    dir
}

/// Checks that the model verifies, and that a round trip returns it byte for byte, except for
/// tensors that are not parameters.
fn assert_round_trip(dir: &tempfile::TempDir, no_parameters: &[&str]) {
    assert_round_trip_in(dir, no_parameters, "tp2");
}

fn assert_round_trip_in(dir: &tempfile::TempDir, no_parameters: &[&str], layout: &str) {
    let [hf, checkpoint, back] = ["hf", "checkpoint", "back"].map(|name| dir.path().join(name));
    succeed(&["verify", text(&hf), "--layout", "tp1", "--layout", layout]);
    succeed(&["convert", "import", text(&hf), text(&checkpoint)]);
    succeed(&["convert", "export", text(&checkpoint), text(&back)]);
    let mut expected = read(&hf.join("model.safetensors"));
    expected.retain(|name, _| !no_parameters.iter().any(|end| name.ends_with(end)));
    assert!(
        read(&back.join("model.safetensors")) == expected,
        "other tensors"
    );
    assert_eq!(
        fs::read(back.join("config.json")).unwrap(),
        fs::read(hf.join("config.json")).unwrap()
    );
}

#[test]
fn gpt2_as_published_was_saved_without_its_head() {
    let dir = changed(
        "gpt2",
        |tensors| {
            let named = std::mem::take(tensors).into_iter();
            let bare = |name: String| name.strip_prefix("transformer.").unwrap().to_string();
            tensors.extend(named.map(|(name, tensor)| (bare(name), tensor)));
            for layer in 0..4 {
                let mask = (Dtype::F32, vec![1, 1, 8, 8], vec![0; 256]);
                tensors.insert(format!("h.{layer}.attn.bias"), mask);
                let mask = (Dtype::F32, vec![], vec![0; 4]);
                tensors.insert(format!("h.{layer}.attn.masked_bias"), mask);
            }
        },
        |config| {
            config
                .as_object_mut()
                .unwrap()
                .shift_remove("tie_word_embeddings");
        },
    );
    assert_round_trip(&dir, &[".attn.bias", ".attn.masked_bias"]);
}

#[test]
fn llama_as_published_says_rope_theta_and_rope_scaling() {
    let dir = changed(
        "llama3-scaled",
        |tensors| {
            let embedding = tensors["model.embed_tokens.weight"].clone();
            tensors.insert("lm_head.weight".into(), embedding);
            let frequencies = (Dtype::F32, vec![4], vec![0; 16]);
            tensors.insert(
                "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
                frequencies,
            );
        },
        |config| {
            let keys = config.as_object_mut().unwrap();
            let mut rope = keys.shift_remove("rope_parameters").unwrap();
            let theta = rope
                .as_object_mut()
                .unwrap()
                .shift_remove("rope_theta")
                .unwrap();
            keys.insert("rope_theta".into(), theta);
            keys.insert("rope_scaling".into(), rope);
            keys.shift_remove("head_dim");
            let dtype = keys.shift_remove("dtype").unwrap();
            keys.insert("torch_dtype".into(), dtype);
        },
    );
    assert_round_trip(&dir, &["lm_head.weight", "inv_freq"]);
}

/// The reference has Mixtral's default RoPE base and epsilon, which differ from Llama's.
#[test]
fn mixtral_without_a_base_and_an_epsilon_has_its_familys() {
    let dir = changed(
        "mixtral",
        |_| {},
        |config| {
            let keys = config.as_object_mut().unwrap();
            keys.shift_remove("rope_parameters").unwrap();
            keys.shift_remove("rms_norm_eps").unwrap();
            keys.insert("partial_rotary_factor".into(), 1.into());
        },
    );
    assert_round_trip_in(&dir, &[], "tp2-sp");
}

/// The tensors of a multi-token prediction layer after the layers that config.json counts; they are
/// ignored.
const PREDICTION: [&str; 4] = [
    "model.layers.2.eh_proj.weight",
    "model.layers.2.enorm.weight",
    "model.layers.2.embed_tokens.weight",
    "model.layers.2.input_layernorm.weight",
];

#[test]
fn deepseek_v3_as_published_has_a_layer_too_many_that_predicts_further_tokens() {
    let dir = changed(
        "deepseek-v3",
        |tensors| {
            let tensor = |name: &str| (name.to_string(), (Dtype::F32, vec![32], vec![0; 128]));
            tensors.extend(PREDICTION.map(tensor));
        },
        |config| {
            let keys = config.as_object_mut().unwrap();
            keys.shift_remove("rope_parameters");
            for key in ["head_dim", "qk_head_dim", "rope_interleave"] {
                keys.shift_remove(key);
            }
            config["rope_theta"] = json!(10000);
            config["rope_scaling"] = Value::Null;
            config["scoring_func"] = json!("sigmoid");
            config["topk_method"] = json!("noaux_tc");
            config["moe_layer_freq"] = json!(1);
            config["num_nextn_predict_layers"] = json!(0);
        },
    );
    assert_round_trip_in(&dir, &PREDICTION, "tp2-ep2-sp");
    let dir = changed(
        "deepseek-v3",
        |tensors| {
            tensors.insert(PREDICTION[3].into(), (Dtype::F32, vec![32], vec![0; 128]));
        },
        |_| {},
    );
    let ended = megaburn(&["verify", text(&dir.path().join("hf"))]);
    assert_eq!(
        ended.code,
        Some(2),
        "a layer too many is a mistake: {ended:#?}"
    );
    assert!(
        ended
            .stderr
            .contains("`model.layers.2.input_layernorm.weight`: its shape is [32], but")
    );
}

#[test]
fn biases_of_experts_stay_wide_in_a_narrow_model() {
    let is_bias = |name: &str| name.ends_with("e_score_correction_bias");
    let halved = |narrow: bool| {
        move |tensors: &mut Tensors| {
            for (_, (to, _, bytes)) in tensors.iter_mut().filter(|(name, _)| !is_bias(name)) {
                for value in bytes.chunks_mut(4) {
                    value[..2].fill(0);
                }
                if narrow {
                    let upper = bytes.chunks(4).flat_map(|value| value[2..].to_vec());
                    *to = Dtype::BF16;
                    *bytes = upper.collect();
                }
            }
        }
    };
    let bf16 = |config: &mut Value| config["dtype"] = json!("bfloat16");
    let narrow = changed("deepseek-v3", halved(true), bf16);
    let wide = changed("deepseek-v3", halved(false), |_| {});
    let tensors = |folder: &Path| read(&folder.join("model.safetensors"));
    let expected = tensors(&narrow.path().join("hf"));
    let kept = expected.iter().find(|(name, _)| is_bias(name)).unwrap();
    assert_eq!(kept.1.0, Dtype::F32);
    let cases: [(_, &[&str], &[&str]); 3] = [
        (&narrow, &[], &[]),
        (&wide, &["--dtype", "bf16"], &[]),
        (&wide, &[], &["--dtype", "bf16"]),
    ];
    for (dir, import, export) in cases {
        let [hf, checkpoint, back] = ["hf", "checkpoint", "back"].map(|name| dir.path().join(name));
        succeed(
            &[
                &["convert", "import", text(&hf), text(&checkpoint), "--force"],
                import,
            ]
            .concat(),
        );
        succeed(
            &[
                &[
                    "convert",
                    "export",
                    text(&checkpoint),
                    text(&back),
                    "--force",
                ],
                export,
            ]
            .concat(),
        );
        assert!(tensors(&back) == expected, "{import:?} {export:?}");
    }
}

#[test]
fn a_head_of_its_own_is_not_tied_whatever_the_config_says() {
    let dir = changed(
        "gpt2-untied",
        |_| {},
        |config| {
            config
                .as_object_mut()
                .unwrap()
                .shift_remove("tie_word_embeddings");
        },
    );
    let [hf, checkpoint, back] = ["hf", "checkpoint", "back"].map(|name| dir.path().join(name));
    succeed(&["verify", text(&hf), "--layout", "tp2"]);
    succeed(&["convert", "import", text(&hf), text(&checkpoint)]);
    succeed(&["convert", "export", text(&checkpoint), text(&back)]);
    assert!(read(&back.join("model.safetensors")) == read(&hf.join("model.safetensors")));
    let config: Value =
        serde_json::from_slice(&fs::read(back.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["tie_word_embeddings"], false);
}

#[rstest]
#[case("mistral", Dtype::BF16)]
#[case("qwen2", Dtype::F16)]
fn half_precision_comes_back_as_it_was(#[case] name: &str, #[case] dtype: Dtype) {
    let dir = changed(
        name,
        |tensors| {
            for (to, _, bytes) in tensors.values_mut() {
                let values = bytes
                    .chunks(4)
                    .map(|x| f32::from_le_bytes(x.try_into().unwrap()));
                // The upper half of an f32 is a bf16; as an f16 those bits are other small numbers.
                let halves = values.map(|x| ((x.to_bits() >> 16) as u16 & 0xBFFF).to_le_bytes());
                *to = dtype;
                *bytes = halves.flatten().collect();
            }
        },
        |config| {
            config["dtype"] = json!(if dtype == Dtype::BF16 {
                "bfloat16"
            } else {
                "float16"
            })
        },
    );
    let [hf, checkpoint, back] = ["hf", "checkpoint", "back"].map(|name| dir.path().join(name));
    succeed(&["convert", "import", text(&hf), text(&checkpoint)]);
    succeed(&["convert", "export", text(&checkpoint), text(&back)]);
    assert!(read(&back.join("model.safetensors")) == read(&hf.join("model.safetensors")));
    let wide = dir.path().join("wide");
    succeed(&[
        "convert",
        "export",
        text(&checkpoint),
        text(&wide),
        "--dtype",
        "float32",
    ]);
    let ended = megaburn(&["verify", text(&hf), text(&wide), "--json"]);
    for line in ended.stdout.lines() {
        let tensor: Value = serde_json::from_str(line).unwrap();
        assert_eq!(
            (&tensor["b"]["dtype"], &tensor["max_abs"]),
            (&json!("f32"), &json!(0.0))
        );
    }
    let config: Value =
        serde_json::from_slice(&fs::read(wide.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["dtype"], "float32");
}

#[test]
fn what_is_no_number_is_out_of_every_tolerance() {
    let poison = |(_, _, bytes): &mut (Dtype, Vec<usize>, Vec<u8>)| {
        bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    };
    let weights = changed(
        "qwen3",
        |tensors| {
            poison(
                tensors
                    .get_mut("model.layers.1.self_attn.k_norm.weight")
                    .unwrap(),
            )
        },
        |_| {},
    );
    let reference = changed("qwen3", |_| {}, |_| {});
    let path = reference.path().join("hf/reference.safetensors");
    let mut tensors = read(&path);
    poison(tensors.get_mut("grad.model.norm.weight").unwrap());
    write(&path, &tensors);
    for dir in [weights, reference] {
        let hf = dir.path().join("hf");
        let ended = megaburn(&["verify", text(&hf), "--layout", "tp2-sp", "--json"]);
        assert_eq!(ended.code, Some(1), "{ended:#?}");
        let report: Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(
            (&report["ok"], &report["grad_rel_max"]),
            (&json!(false), &Value::Null)
        );
        assert!(report["grad_worst"].is_string(), "{report}");
    }
}
