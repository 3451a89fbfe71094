use std::fmt;

use burn::tensor::FloatDType;
use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The element type of parameters and activations, or of optimizer state.
///
/// Norms, softmax, rotary embeddings and the loss are always computed in f32. Gradients are
/// accumulated and parameters updated in f32 unless the optimizer's types say otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
#[schemars(transform = add_aliases)]
pub enum Dtype {
    /// Single precision.
    #[default]
    #[serde(alias = "float32")]
    F32,
    /// 8 bits of mantissa, half the memory. Each parameter is the rounded copy of an f32 master,
    /// which the optimizer updates and checkpoints hold, unless `optimizer.main_params_dtype` is
    /// bf16.
    #[serde(alias = "bfloat16")]
    Bf16,
    /// 11 bits of mantissa and a small range: the loss is scaled (`optimizer.loss_scale`), and a
    /// step whose gradient overflows is skipped. Parameters have f32 masters.
    #[serde(alias = "float16")]
    F16,
}

/// Adds the aliases of the names, which schemars leaves out.
fn add_aliases(schema: &mut Schema) {
    let names = schema.get_mut("oneOf").and_then(Value::as_array_mut);
    let aliases = [("float32", "f32"), ("bfloat16", "bf16"), ("float16", "f16")];
    let names = names.expect("a choice with descriptions");
    names.extend(name_aliases(aliases));
}

/// The choices of a schema that are other names of others.
pub(crate) fn name_aliases<const N: usize>(aliases: [(&str, &str); N]) -> [Value; N] {
    aliases.map(|(alias, name)| {
        let description = format!("Another name of `{name}`.");
        json!({ "type": "string", "const": alias, "description": description })
    })
}

impl From<Dtype> for FloatDType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::BF16,
            Dtype::F16 => Self::F16,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}
