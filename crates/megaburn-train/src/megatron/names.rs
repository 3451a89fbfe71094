//! Where the parameters of a model are in a checkpoint of Megatron-Core.
//!
//! `docs/megatron-checkpoints.md` has the names, shapes and orders. Every family has the same paths
//! of parameters, so one list maps them all.

use megaburn_models::DecoderConfig;

/// Where the values of a parameter are in a checkpoint of Megatron-Core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The name of the tensor, without the number of the layer.
    pub(super) name: Name,
    /// The expert, whose number is an index of the tensor.
    pub(super) expert: Option<usize>,
    /// How the values are arranged.
    pub(super) form: Form,
}

/// The name of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Name {
    /// A tensor of the whole model.
    Whole(String),
    /// A tensor that layers have: the number of the layer and the name behind `decoder.layers.`.
    OfLayer(usize, String),
}

/// How the values of a parameter are arranged in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// As in the parameter.
    Plain,
    /// As in the parameter, with more rows at the end: the padding of the vocabulary.
    Vocab,
    /// With rows for the outputs, which are the columns of the parameter.
    Transposed,
    /// Queries, keys and values of each group together. The parameter has the queries of all groups,
    /// then the keys, then the values. A matrix is transposed too.
    Groups,
}

const LAYERS: &str = "decoder.layers.";

/// The name of the norm before the MLP or the experts, in Megatron-Core's local layers and in
/// Transformer Engine's dense ones.
pub(super) const MLP_NORM: &str = "mlp.linear_fc1.layer_norm_weight";
/// The name of the norm before the experts in Transformer Engine's layers.
pub(super) const EXPERTS_NORM: &str = "pre_mlp_layernorm.weight";

impl Place {
    /// Where the parameter at `path` is; `None` if Megatron-Core has no such parameter.
    pub(super) fn of(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.split('.').collect();
        let ending = |kind: &str| match kind {
            "gamma" => Some("weight"),
            "beta" => Some("bias"),
            _ => None,
        };
        let whole = |name: &str, form| Self {
            name: Name::Whole(name.into()),
            expert: None,
            form,
        };
        let (layer, rest) = match parts.as_slice() {
            ["embedding", "weight"] => {
                return Some(whole("embedding.word_embeddings.weight", Form::Vocab));
            }
            ["positions", "weight"] => {
                return Some(whole("embedding.position_embeddings.weight", Form::Plain));
            }
            ["head", "weight"] => return Some(whole("output_layer.weight", Form::Vocab)),
            ["norm", kind] => {
                let name = format!("decoder.final_layernorm.{}", ending(kind)?);
                return Some(whole(&name, Form::Plain));
            }
            ["blocks", layer, rest @ ..] => (layer.parse().ok()?, rest),
            _ => return None,
        };
        let of_linear = |form, kind: &str| match kind {
            "weight" => Some(form),
            "bias" if form == Form::Transposed => Some(Form::Plain),
            "bias" => Some(form),
            _ => None,
        };
        let mut expert = None;
        let (name, form) = match rest {
            ["attention_norm", kind] => {
                let name = format!("self_attention.linear_qkv.layer_norm_{}", ending(kind)?);
                (name, Form::Plain)
            }
            ["mlp_norm", kind] => {
                let name = format!("mlp.linear_fc1.layer_norm_{}", ending(kind)?);
                (name, Form::Plain)
            }
            ["attention", "qkv", kind] => {
                let name = format!("self_attention.linear_qkv.{kind}");
                (name, of_linear(Form::Groups, kind)?)
            }
            ["attention", "output", kind] => {
                let name = format!("self_attention.linear_proj.{kind}");
                (name, of_linear(Form::Transposed, kind)?)
            }
            ["attention", norm @ ("q_norm" | "k_norm"), "gamma"] => {
                let name = format!("self_attention.{}_layernorm.weight", &norm[..1]);
                (name, Form::Plain)
            }
            ["mlp", matrix, kind] => {
                let name = format!("mlp.{}.{kind}", of_mlp(matrix)?);
                (name, of_linear(Form::Transposed, kind)?)
            }
            ["moe", "router", "weight"] => ("mlp.router.weight".into(), Form::Transposed),
            ["moe", "experts", number, matrix, "weight"] => {
                expert = Some(number.parse().ok()?);
                let name = format!("mlp.experts.experts.{}.weight", of_mlp(matrix)?);
                (name, Form::Transposed)
            }
            _ => return None,
        };
        Some(Self {
            name: Name::OfLayer(layer, name),
            expert,
            form,
        })
    }

    /// The name of the tensor, in a checkpoint in which the layers of a model are stacked, or in one
    /// in which each has a name of its own.
    pub(super) fn tensor(&self, is_stacked: bool) -> String {
        match &self.name {
            Name::Whole(name) => name.clone(),
            Name::OfLayer(_, name) if is_stacked => format!("{LAYERS}{name}"),
            Name::OfLayer(layer, name) => format!("{LAYERS}{layer}.{name}"),
        }
    }

    /// The same place in a layer with experts of Transformer Engine, where it is another one.
    pub(super) fn in_transformer_engine(&self) -> Option<Self> {
        match &self.name {
            Name::OfLayer(layer, name) if name == MLP_NORM => Some(Self {
                name: Name::OfLayer(*layer, EXPERTS_NORM.into()),
                ..self.clone()
            }),
            _ => None,
        }
    }

    /// The shape of the tensor that has the parameter of shape `shape`, and the box in it that the
    /// parameter is: its offsets and sizes. `vocab` is the number of rows of the vocabulary.
    pub(super) fn region(
        &self,
        shape: &[usize],
        model: &DecoderConfig,
        vocab: usize,
        is_stacked: bool,
    ) -> Region {
        let mut inner = shape.to_vec();
        match self.form {
            Form::Plain => {}
            Form::Vocab => inner[0] = vocab,
            Form::Transposed | Form::Groups => inner.reverse(),
        }
        let mut dims = Vec::new();
        if let (Name::OfLayer(layer, _), true) = (&self.name, is_stacked) {
            dims.push((model.layers, *layer));
        }
        if let (Some(expert), Some(experts)) = (self.expert, &model.experts) {
            dims.push((experts.num, expert));
        }
        let (counts, indices): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
        let zeros = vec![0; inner.len()];
        Region {
            offsets: [indices, zeros].concat(),
            sizes: [vec![1; counts.len()], inner.clone()].concat(),
            shape: [counts, inner].concat(),
        }
    }
}

/// A box of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Region {
    /// The shape of the tensor.
    pub(super) shape: Vec<usize>,
    pub(super) offsets: Vec<usize>,
    pub(super) sizes: Vec<usize>,
}

fn of_mlp(matrix: &str) -> Option<&'static str> {
    match matrix {
        "up" => Some("linear_fc1"),
        "down" => Some("linear_fc2"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use megaburn_models::Family;

    use super::*;

    #[test]
    fn every_parameter_of_a_family_without_latent_attention_has_a_place_of_its_own() {
        for family in Family::BUILT_IN {
            let model = family.template();
            let experts = model.experts.as_ref();
            let has_shared = experts.is_some_and(|experts| experts.shared_ffn.is_some());
            let has_other_parts = has_shared
                || model.attention_sinks
                || model.bidirectional
                || model.is_encoder_decoder()
                || model.norm_placement.has_output_norms();
            if model.latent.is_some() || has_other_parts {
                continue;
            }
            let plan = model.whole_plan().unwrap();
            let mut places = Vec::new();
            for (path, spec) in plan.iter() {
                let place = Place::of(path).unwrap_or_else(|| panic!("{family}: {path}"));
                let shape = &spec.shard.global_shape;
                let region = place.region(shape, &model, model.vocab, true);
                let count = |sizes: &[usize]| sizes.iter().product::<usize>();
                assert_eq!(count(&region.sizes), count(shape), "{family}: {path}");
                let bounds = region.offsets.iter().zip(&region.sizes);
                for ((offset, size), len) in bounds.zip(&region.shape) {
                    assert!(offset + size <= *len, "{family}: {path}");
                }
                places.push((place.tensor(true), region.offsets));
            }
            let count = places.len();
            places.sort();
            places.dedup();
            assert_eq!(places.len(), count, "{family}");
        }
        for path in ["blocks.0.mtp.enorm.gamma", "blocks.x.mlp.up.weight", "norm"] {
            assert_eq!(Place::of(path), None, "{path}");
        }
    }

    #[test]
    fn the_norm_before_experts_has_two_names() {
        let place = Place::of("blocks.3.mlp_norm.gamma").unwrap();
        assert_eq!(
            place.tensor(true),
            "decoder.layers.mlp.linear_fc1.layer_norm_weight"
        );
        let other = place.in_transformer_engine().unwrap();
        assert_eq!(
            other.tensor(false),
            "decoder.layers.3.pre_mlp_layernorm.weight"
        );
        let attention = Place::of("blocks.3.attention_norm.gamma").unwrap();
        assert_eq!(attention.in_transformer_engine(), None);
    }
}
