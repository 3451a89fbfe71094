//! Parts that differ from the family's, and published forms of the families that have them.

use megaburn_kernels::{LongRopeScaling, RopeScaling};
use megaburn_parallel::{Activation, NormKind, QkNormKind};
use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::decoder::{BlockOrder, DecoderConfig, NormPlacement, Positions, Rotary};

/// Changes of a part, each to a value that some family has.
const CHANGES: [fn(&mut DecoderConfig); 20] = [
    |model| model.norm = NormKind::Rms,
    |model| model.norm = NormKind::Layer,
    |model| model.norm_placement = NormPlacement::Pre,
    |model| model.norm_placement = NormPlacement::Output,
    |model| model.norm_placement = NormPlacement::Sandwich,
    |model| model.zero_centered_gamma = false,
    |model| model.zero_centered_gamma = true,
    |model| model.block_order = BlockOrder::Parallel,
    |model| model.activation = Activation::SwiGlu,
    |model| model.activation = Activation::GeGlu,
    |model| model.qk_norm = None,
    |model| model.qk_norm = Some(QkNormKind::Head),
    |model| model.attention_soft_cap = None,
    |model| model.attention_soft_cap = Some(20.0),
    |model| model.attention_scale = Some(0.3),
    |model| model.logits_soft_cap = Some(20.0),
    |model| model.multipliers.embedding = 1.0,
    |model| model.multipliers.logits_scaling = 3.0,
    |model| {
        model.positions = Positions::Rotary(Rotary {
            percent: 0.25,
            ..Rotary::new(1e4)
        });
    },
    |model| {
        model.positions =
            Positions::Rotary(Rotary::new(1e4).with_scaling(RopeScaling::Linear { factor: 2.0 }));
    },
];

/// A model is expressed by its family's file, or refused: the file never means another model.
#[test]
fn a_model_that_is_said_to_be_expressed_reads_back_as_itself() {
    let mut refused = 0;
    for family in Family::BUILT_IN {
        for (number, change) in CHANGES.iter().enumerate() {
            let mut model = family.template();
            family.definition().follow(&mut model);
            if model.window.is_none() {
                model.full_layers.clear();
            }
            change(&mut model);
            if model.validate().is_err() {
                continue;
            }
            match model.check_sayable() {
                Ok(()) => assert_eq!(read(&model.to_hf()).unwrap(), model, "{family}, {number}"),
                Err(_) => refused += 1,
            }
        }
    }
    assert!(refused > 100, "{refused} refused");
}

fn gemma3(change: impl FnOnce(&mut Value)) -> Result<DecoderConfig, String> {
    let mut json = json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 100,
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "sliding_window": 16, "query_pre_attn_scalar": 8,
    });
    change(&mut json);
    read(&json)
}

#[test]
fn the_published_form_of_gemma_3_is_read() {
    let published = gemma3(|json| {
        json["sliding_window_pattern"] = 3.into();
        json["rope_theta"] = 1e6.into();
        json["rope_local_base_freq"] = 5e3.into();
        json["rope_scaling"] = json!({"rope_type": "linear", "factor": 8.0});
        json["attn_logit_softcapping"] = 50.0.into();
    })
    .unwrap();
    assert_eq!(
        (&published.full_layers[..], published.window),
        (&[2, 5][..], Some(16))
    );
    // Transformers' model ignores the cap.
    assert_eq!(published.attention_soft_cap, None);
    let rotary = published.positions.rotary().unwrap();
    assert_eq!((rotary.theta, rotary.window_theta), (1e6, Some(5e3)));
    assert_eq!(rotary.scaling, RopeScaling::Linear { factor: 8.0 });
    let today = gemma3(|json| {
        let kinds = (0..7).map(|layer| match layer {
            2 | 5 => "full_attention",
            _ => "sliding_attention",
        });
        json["layer_types"] = kinds.collect::<Vec<_>>().into();
        json["rope_parameters"] = json!({
            "full_attention": {"rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        });
    });
    assert_eq!(today.unwrap(), published);
    // Without the pattern, every sixth layer has no window.
    assert_eq!(gemma3(|_| {}).unwrap().full_layers, [5]);
}

#[rstest]
#[case(|json: &mut Value| json["rope_parameters"] = json!({"rope_type": "linear", "factor": 2.0}), "an object for each of")]
#[case(|json: &mut Value| {
    json["rope_parameters"] = json!({"full_attention": {"rope_type": "default"}});
    json["rope_scaling"] = json!({"rope_type": "linear", "factor": 2.0});
}, "in addition to `rope_parameters`")]
#[case(|json: &mut Value| json["use_bidirectional_attention"] = true.into(), "only false is supported")]
#[case(|json: &mut Value| json["hidden_activation"] = "silu".into(), "only \"gelu_pytorch_tanh\" is supported")]
fn what_gemma_3_cannot_mean_is_refused(#[case] change: fn(&mut Value), #[case] message: &str) {
    let error = gemma3(change).unwrap_err();
    assert!(error.contains(message), "{error}");
}

/// Transformers reads `yarn` and `su` of Phi-3 as longrope.
#[rstest]
#[case("yarn")]
#[case("su")]
#[case("longrope")]
fn longrope_of_phi_3_has_several_names(#[case] kind: &str) {
    let mut json = Family::PHI3.template().to_hf();
    let pairs = Family::PHI3.template().head_dim / 2;
    json["original_max_position_embeddings"] = 32.into();
    json["max_position_embeddings"] = 128.into();
    json["rope_parameters"]["rope_type"] = kind.into();
    let error = read(&json).unwrap_err();
    // YaRN itself has no factors of Phi-3.
    let expected = match kind {
        "yarn" => "can only be `default` or `longrope`",
        _ => "needs a list of numbers `short_factor`",
    };
    assert!(error.contains(expected), "{error}");
    json["rope_parameters"]["short_factor"] = vec![1.5; pairs].into();
    json["rope_parameters"]["long_factor"] = vec![3.0; pairs].into();
    let config = read(&json).unwrap();
    let long = LongRopeScaling::new(vec![1.5; pairs], vec![3.0; pairs], 32, 4.0);
    assert_eq!(
        config.positions.rotary().unwrap().scaling,
        RopeScaling::Long(long)
    );
    assert_eq!(read(&config.to_hf()).unwrap(), config);
    json["rope_parameters"]["long_factor"] = vec![3.0; pairs - 1].into();
    assert!(read(&json).unwrap_err().contains("long_factor has"));
}

#[test]
fn other_scalings_of_phi_3_are_refused() {
    let mut json = Family::PHI3.template().to_hf();
    json["rope_parameters"]["rope_type"] = "linear".into();
    json["rope_parameters"]["factor"] = 4.0.into();
    assert!(
        read(&json)
            .unwrap_err()
            .contains("can only be `default` or `longrope`")
    );
}

/// The file of a model with dynamic scaling has the original length.
#[test]
fn dynamic_scaling_makes_sequences_longer() {
    let mut json = Family::LLAMA.template().to_hf();
    json["max_position_embeddings"] = 100.into();
    json["rope_parameters"]["rope_type"] = "dynamic".into();
    json["rope_parameters"]["factor"] = 2.5.into();
    let config = read(&json).unwrap();
    assert_eq!(config.max_seq_len, 250);
    assert_eq!(read(&config.to_hf()).unwrap(), config);
    assert_eq!(config.to_hf()["max_position_embeddings"], 100);
    let trained = DecoderConfig {
        max_seq_len: 130,
        ..config
    };
    trained.check_sayable().unwrap();
}
