//! BERT as it was published.

use serde_json::json;

use crate::{
    models::{
        published::{Tensors, changed, read},
        round_trip::{succeed, text},
        transformers::fixture,
    },
    runs::child::Ranks,
};

/// `bert-base-uncased` has both heads, the names of TensorFlow's norms, copies of tied parameters, and
/// an architecture without the next-sentence head.
#[test]
fn bert_with_the_names_of_its_time_is_the_same_model() {
    let dir = changed(
        "bert",
        |tensors| {
            let renamed = std::mem::take(tensors).into_iter().map(|(name, tensor)| {
                let name = name.replace("LayerNorm.weight", "LayerNorm.gamma");
                (name.replace("LayerNorm.bias", "LayerNorm.beta"), tensor)
            });
            tensors.extend(renamed);
            let copies = [
                (
                    "cls.predictions.decoder.weight",
                    "bert.embeddings.word_embeddings.weight",
                ),
                ("cls.predictions.decoder.bias", "cls.predictions.bias"),
            ];
            for (copy, of) in copies {
                tensors.insert(copy.into(), tensors[of].clone());
            }
        },
        |config| {
            config["architectures"] = json!(["BertForMaskedLM"]);
            config["position_embedding_type"] = json!("absolute");
            config["gradient_checkpointing"] = json!(false);
        },
    );
    let [hf, checkpoint, back] = ["hf", "checkpoint", "back"].map(|name| dir.path().join(name));
    succeed(&["verify", text(&hf), "--layout", "tp1", "--layout", "tp2-sp"]);
    succeed(&["convert", "import", text(&hf), text(&checkpoint)]);
    succeed(&["convert", "export", text(&checkpoint), text(&back)]);
    let [found, expected] =
        [&back, &fixture("bert")].map(|folder| read(&folder.join("model.safetensors")));
    assert!(found == expected, "other tensors");
    let config = std::fs::read_to_string(back.join("config.json")).unwrap();
    assert!(config.contains("BertForPreTraining"), "{config}");
}

/// Transformers leaves out a pooler without the next-sentence head, of older files of masked models.
#[test]
fn a_pooler_without_a_head_is_left_out() {
    let with_pooler = |tensors: &mut Tensors| {
        let (dtype, bias, values) = tensors["cls.predictions.transform.LayerNorm.bias"].clone();
        let matrix = (
            dtype,
            [&bias[..], &bias[..]].concat(),
            values.repeat(bias[0]),
        );
        tensors.insert("bert.pooler.dense.weight".into(), matrix);
        tensors.insert("bert.pooler.dense.bias".into(), (dtype, bias, values));
    };
    let dir = changed("bert-masked", with_pooler, |_| ());
    let hf = dir.path().join("hf");
    let ended = Ranks::command(&["verify", text(&hf), "--layout", "tp2"])
        .finish()
        .remove(0);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let warning = "`bert.pooler.dense.bias`, `bert.pooler.dense.weight` are left out";
    assert!(ended.stderr.contains(warning), "{ended:?}");
}
