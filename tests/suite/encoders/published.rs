//! BERT as it was published.

use serde_json::json;

use crate::models::{
    published::{changed, read},
    round_trip::{succeed, text},
    transformers::fixture,
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
