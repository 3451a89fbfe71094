use megaburn_models::DecoderConfig;

use crate::megatron::{
    args::Args,
    error::MegatronError,
    names::{EXPERTS_NORM, MLP_NORM, Name, Place},
};

/// The parameters of a local layer of Megatron-Core, in the order of its modules.
///
/// Source: Megatron-Core, `TransformerLayer`, `Attention`, `SelfAttention`, `MoELayer` and `MLP`.
const LOCAL: &[&str] = &[
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.layer_norm_bias",
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    MLP_NORM,
    "mlp.linear_fc1.layer_norm_bias",
    EXPERTS_NORM,
    "mlp.router.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
];

/// The parameters of a layer of Transformer Engine: the first norm is a part of `linear_qkv`, which
/// comes after `linear_proj`.
///
/// Source: as above; Transformer Engine, `LayerNormLinear`.
const TRANSFORMER_ENGINE: &[&str] = &[
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.layer_norm_bias",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    MLP_NORM,
    "mlp.linear_fc1.layer_norm_bias",
    EXPERTS_NORM,
    "mlp.router.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
];

/// The matrices of an expert.
const EXPERT: &[&str] = &[
    "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.experts.linear_fc2.weight",
];

/// The parameters before and after the layers.
const BEFORE: &[&str] = &[
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
];
const AFTER: &[&str] = &[
    "decoder.final_layernorm.weight",
    "decoder.final_layernorm.bias",
    "output_layer.weight",
];

/// The order of the parameters in a model of Megatron-Core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Order {
    /// Whether the layers are those of Transformer Engine.
    is_transformer_engine: bool,
    /// Whether the first matrices of all experts of a rank come before the second ones
    /// (`TEGroupedMLP`), instead of both matrices of each expert together (`SequentialMLP`).
    is_grouped: bool,
}

/// A part of a model whose parameters have one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// The embeddings.
    Before,
    /// A layer.
    Layer(usize),
    /// The last norm and the output matrix.
    After,
}

impl Order {
    /// All orders that a model can have, that of the arguments first.
    ///
    /// # Errors
    /// An argument has another type.
    pub(super) fn all(args: Args, model: &DecoderConfig) -> Result<Vec<Self>, MegatronError> {
        let is_transformer_engine = args
            .optional_text("transformer_impl")?
            .is_none_or(|layers| layers != "local");
        let is_grouped = is_transformer_engine && args.flag("moe_grouped_gemm")?;
        let expert_orders = match &model.experts {
            Some(_) => vec![is_grouped, !is_grouped],
            None => vec![false],
        };
        let orders = [is_transformer_engine, !is_transformer_engine].map(|is_transformer_engine| {
            let of_experts = expert_orders.iter();
            of_experts.map(move |is_grouped| Self {
                is_transformer_engine,
                is_grouped: *is_grouped,
            })
        });
        Ok(orders.into_iter().flatten().collect())
    }

    /// Where a parameter is among those of its part of a model, as a key to sort by; `None` if the
    /// order does not have it.
    pub(super) fn key(&self, place: &Place) -> Option<(Part, [usize; 3])> {
        let at = |names: &[&str], name: &str| names.iter().position(|known| *known == name);
        let (layer, name) = match &place.name {
            Name::Whole(name) => {
                let before = at(BEFORE, name).map(|at| (Part::Before, [at, 0, 0]));
                return before.or_else(|| Some((Part::After, [at(AFTER, name)?, 0, 0])));
            }
            Name::OfLayer(layer, name) => (Part::Layer(*layer), name),
        };
        let names = match self.is_transformer_engine {
            true => TRANSFORMER_ENGINE,
            false => LOCAL,
        };
        let key = match place.expert {
            None => [at(names, name)?, 0, 0],
            Some(expert) => {
                let matrix = at(EXPERT, name)?;
                match self.is_grouped {
                    true => [names.len(), matrix, expert],
                    false => [names.len(), expert, matrix],
                }
            }
        };
        Some((layer, key))
    }
}
