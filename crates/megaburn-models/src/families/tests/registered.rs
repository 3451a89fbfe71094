//! Families that another crate registers.

use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    decoder::DecoderConfig,
    families::{
        Family, HfJson, KeyDefault, LLAMA_DEFAULTS, LLAMA_KEYS, ModelFamily, llama,
        write_llama_sizes,
    },
    hf::Key,
};

/// A Llama under another name, and with the mistakes of a test.
struct Named {
    model_type: &'static str,
    architecture: &'static str,
    keys: &'static [&'static [Key]],
    layer: &'static str,
    template: fn() -> DecoderConfig,
    write: fn(&DecoderConfig) -> Value,
}

const PLAIN: Named = Named {
    model_type: "plain",
    architecture: "PlainForCausalLM",
    keys: &[LLAMA_KEYS],
    layer: "model.layers.*.",
    template: llama::template,
    write: write_llama_sizes,
};

impl ModelFamily for Named {
    fn model_type(&self) -> &'static str {
        self.model_type
    }

    fn architecture(&self) -> &'static str {
        self.architecture
    }

    fn template(&self) -> DecoderConfig {
        (self.template)()
    }

    fn keys(&self) -> &'static [&'static [Key]] {
        self.keys
    }

    fn layer(&self) -> &'static str {
        self.layer
    }

    fn defaults(&self) -> &'static [&'static [KeyDefault]] {
        &[LLAMA_DEFAULTS]
    }

    fn read(&self, json: &HfJson<'_>) -> Result<DecoderConfig, String> {
        llama::read_sizes(json, llama::template())
    }

    fn write(&self, config: &DecoderConfig) -> Value {
        (self.write)(config)
    }
}

const SAME_TENSOR: &[&[Key]] = &[
    &[Key::plain(
        "norm.gamma",
        "model.layers.0.input_layernorm.weight",
    )],
    LLAMA_KEYS,
];

const TWO_PARTS: &[&[Key]] = &[
    &[Key::linear(
        "blocks.*.attention.qkv.weight",
        &["q.*", "k.*"],
    )],
    LLAMA_KEYS,
];

const JOINED_HEAD: &[&[Key]] = &[
    &[Key::joined("head.weight", &["lm_head.weight"])],
    LLAMA_KEYS,
];

fn with_bias() -> DecoderConfig {
    DecoderConfig {
        mlp_bias: true,
        ..llama::template()
    }
}

fn without_heads() -> DecoderConfig {
    DecoderConfig {
        heads: 0,
        ..llama::template()
    }
}

fn without_epsilon(config: &DecoderConfig) -> Value {
    let mut json = write_llama_sizes(config);
    json["rms_norm_eps"] = Value::Null;
    json
}

#[rstest]
#[case(
    &Named { model_type: "llama", ..PLAIN },
    "the family `llama` cannot be registered: this program has a family with the model_type `llama`"
)]
#[case(
    &Named { model_type: "b", architecture: "LlamaForCausalLM", ..PLAIN },
    "the architecture `LlamaForCausalLM` belongs to the family `llama`; choose another name"
)]
#[case(
    &Named { model_type: "my llama", architecture: "C", ..PLAIN },
    "its model_type is `my llama`; use letters, digits"
)]
#[case(
    &Named { model_type: "c", architecture: "", ..PLAIN },
    "its architecture is ``; use letters, digits"
)]
#[case(
    &Named { model_type: "d", architecture: "D", template: without_heads, ..PLAIN },
    "`heads` is 0, but must be at least 1"
)]
#[case(
    &Named { model_type: "e", architecture: "E", keys: &[], ..PLAIN },
    "e models on Hugging Face have no `blocks.0.attention.output.weight`"
)]
#[case(
    &Named { model_type: "f", architecture: "F", layer: "layers.", ..PLAIN },
    "its layer prefix has no `*` for the number of the layer"
)]
#[case(
    &Named {
        model_type: "g",
        architecture: "G",
        keys: SAME_TENSOR,
        ..PLAIN
    },
    "its keys give the tensor `model.layers.0.input_layernorm.weight` to both \
    `blocks.0.attention_norm.gamma` and `norm.gamma`"
)]
#[case(
    &Named {
        model_type: "h",
        architecture: "H",
        keys: TWO_PARTS,
        ..PLAIN
    },
    "the keys of h name 2 tensors for `blocks.0.attention.qkv.weight`, which has 3 parts"
)]
#[case(
    &Named {
        model_type: "i",
        architecture: "I",
        keys: JOINED_HEAD,
        ..PLAIN
    },
    "its keys do not read `head.weight` with Key::plain"
)]
#[case(
    &Named { model_type: "j", architecture: "J", write: without_epsilon, ..PLAIN },
    "which the config.json of j cannot express"
)]
#[case(
    &Named { model_type: "k", architecture: "K", template: with_bias, ..PLAIN },
    "`mlp_bias` is true, which the config.json of k cannot express"
)]
fn a_definition_with_a_mistake_is_refused(
    #[case] definition: &'static Named,
    #[case] message: &str,
) {
    let error = Family::register(definition).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
    let is_this = |family: &Family| {
        let known = family.definition();
        (known.model_type(), known.architecture())
            == (definition.model_type, definition.architecture)
    };
    assert!(
        !Family::all().iter().any(is_this),
        "a refused family remains"
    );
}

#[test]
fn a_registered_family_is_known_by_its_name_everywhere() {
    let unknown = |error: &str| {
        assert!(error.contains("unknown family `plain`, expected one of `gpt2`"));
        assert!(
            error.contains("needs the program that registers it"),
            "{error}"
        );
    };
    // A checkpoint of a program that has the family, in one that does not.
    let mut config = json!(llama::template());
    config["family"] = "plain".into();
    let read = || serde_json::from_value::<DecoderConfig>(config.clone());
    unknown(&read().unwrap_err().to_string());

    let family = Family::register(&PLAIN).unwrap();
    assert_eq!("plain".parse::<Family>().unwrap(), family);
    assert!(Family::all().contains(&family) && !Family::BUILT_IN.contains(&family));
    let read = read().unwrap();
    assert_eq!(read, family.template());
    assert_eq!(json!(read), config);
    let from_hf = DecoderConfig::from_hf(&read.to_hf(), "config.json".as_ref());
    assert_eq!(from_hf.unwrap(), family.template());
    let other = "plane".parse::<Family>().unwrap_err().to_string();
    assert!(other.contains("`plain`"), "{other}");
    // It is registered once.
    let again = Family::register(&PLAIN).unwrap_err().to_string();
    assert!(
        again.contains("has a family with the model_type `plain`"),
        "{again}"
    );
}

#[test]
fn the_descriptions_of_the_families_differ() {
    let descriptions = Family::BUILT_IN.map(|family| family.definition().description());
    for (index, description) in descriptions.iter().enumerate() {
        assert!(!description.is_empty() && !descriptions[..index].contains(description));
    }
}
