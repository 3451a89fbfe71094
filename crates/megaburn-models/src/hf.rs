//! Maps the parameters of a model to the tensors of a Hugging Face checkpoint.

use std::ops::Range;

use megaburn_mesh::{ShardPlan, ShardSpec};

use crate::{
    decoder::{BlockOrder, DecoderConfig},
    error::ModelError,
    families::Family,
};

/// One line of a family's key map: the tensors from which a parameter is assembled. `*` is the
/// number of the layer, a second `*` the number of the expert. A name that ends with `[*]` is the
/// matrix or vector of one expert in a tensor that stacks all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    ours: &'static str,
    theirs: Theirs,
    transposed: bool,
    is_buffer: bool,
    /// The only order of attention and MLP for which the line holds.
    order: Option<BlockOrder>,
    /// Whether the line holds for gated MLPs only, or for others only.
    gated: Option<bool>,
    blocks: Blocks,
}

/// The blocks for which a line holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blocks {
    All,
    /// Those of the encoder of an encoder-decoder model.
    Encoder,
    /// Those of its decoder, whose numbers start at 0.
    Decoder,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Theirs {
    One(&'static str),
    Many(&'static [&'static str]),
    /// Queries, keys and values in one tensor, by groups of heads.
    Grouped(&'static str),
    /// Two halves of a parameter in one tensor, with their columns in turn.
    Interleaved(&'static str),
}

impl Key {
    /// A single tensor, stored as in the model.
    pub const fn plain(ours: &'static str, theirs: &'static str) -> Self {
        Self {
            ours,
            theirs: Theirs::One(theirs),
            transposed: false,
            is_buffer: false,
            order: None,
            gated: None,
            blocks: Blocks::All,
        }
    }

    /// A single tensor without a gradient, which stays f32 if the model has a narrower type.
    pub const fn buffer(ours: &'static str, theirs: &'static str) -> Self {
        Self {
            is_buffer: true,
            ..Self::plain(ours, theirs)
        }
    }

    /// Several tensors, stored as in the model and concatenated along the last dimension.
    pub const fn joined(ours: &'static str, theirs: &'static [&'static str]) -> Self {
        Self {
            theirs: Theirs::Many(theirs),
            ..Self::plain(ours, "")
        }
    }

    /// Weights of PyTorch's `Linear`, stored as `[out, in]`, transposed and concatenated:
    /// `[in, out_1 | out_2 | ..]`.
    pub const fn linear(ours: &'static str, theirs: &'static [&'static str]) -> Self {
        Self {
            transposed: true,
            ..Self::joined(ours, theirs)
        }
    }

    /// Queries, keys and values in one tensor of PyTorch's `Linear` (weights or biases), stored by
    /// groups: the query heads that share a key/value head, then their key, then their value. With
    /// as many key/value heads as query heads, these are the query, the key and the value of each
    /// head.
    pub const fn grouped_qkv(ours: &'static str, theirs: &'static str) -> Self {
        Self {
            theirs: Theirs::Grouped(theirs),
            transposed: true,
            ..Self::plain(ours, "")
        }
    }

    /// Two halves, such as gate and up, in one tensor that is stored as in the model, except that
    /// their columns are in turn (gpt-oss).
    pub const fn interleaved(ours: &'static str, theirs: &'static str) -> Self {
        Self {
            theirs: Theirs::Interleaved(theirs),
            ..Self::plain(ours, "")
        }
    }

    /// The same line for models of one order of attention and MLP only.
    pub const fn of_order(self, order: BlockOrder) -> Self {
        Self {
            order: Some(order),
            ..self
        }
    }

    /// The same line for models with or without a gated MLP only.
    pub const fn if_gated(self, gated: bool) -> Self {
        Self {
            gated: Some(gated),
            ..self
        }
    }

    /// The same line for blocks of the encoder of an encoder-decoder model only.
    pub const fn of_encoder(self) -> Self {
        Self {
            blocks: Blocks::Encoder,
            ..self
        }
    }

    /// The same line for blocks of the decoder of an encoder-decoder model only. Their numbers start
    /// at 0 in the names of tensors.
    pub const fn of_decoder(self) -> Self {
        Self {
            blocks: Blocks::Decoder,
            ..self
        }
    }

    /// Whether the line holds for a model.
    fn is_of(&self, model: &DecoderConfig) -> bool {
        self.order.is_none_or(|order| order == model.block_order)
            && self
                .gated
                .is_none_or(|gated| gated == model.activation.is_gated())
    }

    /// The number of a block in the names of tensors, if the line holds for the block.
    fn number(&self, index: usize, encoder_layers: usize) -> Option<usize> {
        match self.blocks {
            Blocks::All => Some(index),
            Blocks::Encoder => (index < encoder_layers).then_some(index),
            Blocks::Decoder => index.checked_sub(encoder_layers),
        }
    }

    /// The names of the tensors, if this line matches the parameter at `path`.
    fn names(&self, path: &str, encoder_layers: usize) -> Option<Vec<String>> {
        let ours = self.ours.split('.');
        let parts = path.split('.');
        if ours.clone().count() != parts.clone().count() {
            return None;
        }
        let mut numbers: Vec<usize> = Vec::new();
        for (own, part) in ours.zip(parts) {
            match own {
                "*" if numbers.is_empty() => {
                    numbers.push(self.number(part.parse().ok()?, encoder_layers)?);
                }
                "*" => numbers.push(part.parse().ok()?),
                own if own == part => {}
                _ => return None,
            }
        }
        let names = match &self.theirs {
            Theirs::One(name) | Theirs::Grouped(name) | Theirs::Interleaved(name) => {
                std::slice::from_ref(name)
            }
            Theirs::Many(names) => names,
        };
        let put = |name: String, number: &usize| name.replacen('*', &number.to_string(), 1);
        Some(
            names
                .iter()
                .map(|name| numbers.iter().fold(name.to_string(), put))
                .collect(),
        )
    }
}

impl Family {
    /// The name of the output projection, which the folder of a tied model may contain in addition
    /// to the embedding.
    pub(crate) fn head_name(self) -> &'static str {
        let name = self.find_head_name();
        name.expect("every family of a program names its output projection")
    }

    /// The name of the output projection, if the key map reads it from one tensor.
    pub(crate) fn find_head_name(self) -> Option<&'static str> {
        let mut keys = self.definition().keys().iter().copied().flatten();
        // The first key of a parameter applies.
        match keys.find(|key| key.ours == "head.weight")?.theirs {
            Theirs::One(name) => Some(name),
            _ => None,
        }
    }
}

/// A parameter and the tensors of a Hugging Face checkpoint that hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfParam {
    /// The parameter's path in the model.
    pub path: String,
    /// The shape of the parameter.
    pub shape: Vec<usize>,
    /// The tensors that form the parameter, concatenated along its last dimension.
    pub parts: Vec<HfPart>,
    /// Whether the tensors are stored transposed.
    pub transposed: bool,
    /// Whether the parameter has no gradient. It then stays f32 if the model has a narrower type,
    /// because small updates would be lost.
    pub is_buffer: bool,
}

/// One tensor of a [`HfParam`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfPart {
    /// The name of the tensor.
    pub name: String,
    /// Its ranges in the last dimension of the parameter, in the order of the tensor.
    pub columns: Vec<Range<usize>>,
}

impl HfPart {
    /// The number of the parameter's columns that the tensor holds.
    pub fn num_columns(&self) -> usize {
        self.columns.iter().map(Range::len).sum()
    }
}

impl HfParam {
    /// The names of the tensors, in order.
    pub fn names(&self) -> Vec<String> {
        self.parts.iter().map(|part| part.name.clone()).collect()
    }
}

impl DecoderConfig {
    /// Every parameter of the model, with the names of its tensors on Hugging Face.
    ///
    /// # Errors
    /// Sizes that no model can have, or a parameter for which the family has no name.
    pub fn hf_params(&self) -> Result<Vec<HfParam>, ModelError> {
        let plan: ShardPlan = self.whole_plan()?;
        plan.iter()
            .map(|(path, spec)| self.hf_param(path, &spec.shard))
            .collect()
    }

    /// The copies of embedding and output projection that each layer of multi-token prediction
    /// holds: the name of the copy, and the path of the original parameter.
    pub fn hf_copies(&self) -> Vec<(String, &'static str)> {
        let head = if self.tied {
            "embedding.weight"
        } else {
            "head.weight"
        };
        let copies = [
            ("embed_tokens", "embedding.weight"),
            ("shared_head.head", head),
        ];
        let layer = self.family.definition().layer();
        let layers = (self.layers..self.num_blocks())
            .map(|index| layer.replacen('*', &index.to_string(), 1));
        let of_layer =
            |layer: String| copies.map(|(of, path)| (format!("{layer}{of}.weight"), path));
        layers.flat_map(of_layer).collect()
    }

    fn hf_param(&self, path: &str, whole: &ShardSpec) -> Result<HfParam, ModelError> {
        let keys = self.family.definition().keys().iter().copied().flatten();
        let mut keys = keys.filter(|key| key.is_of(self));
        let found = keys.find_map(|key| Some((key.names(path, self.encoder_layers)?, key)));
        let (
            names,
            &Key {
                theirs,
                transposed,
                is_buffer,
                ..
            },
        ) = found.ok_or_else(|| {
            let family = self.family;
            ModelError::Config(format!("{family} models on Hugging Face have no `{path}`"))
        })?;
        let shape = whole.global_shape.clone();
        let last = shape.len() - 1;
        // In a group of one rank, the pieces along the last dimension are the fused parts.
        let stretches: Vec<Vec<Range<usize>>> = match theirs {
            Theirs::Grouped(_) => vec![self.grouped_qkv()],
            Theirs::Interleaved(_) => vec![interleaved(shape[last])],
            _ if names.len() == 1 => vec![std::iter::once(0..shape[last]).collect()],
            _ => whole
                .pieces
                .iter()
                .map(|piece| vec![piece.global.clone()])
                .collect(),
        };
        if names.len() != stretches.len() {
            return Err(ModelError::Config(format!(
                "the keys of {} name {} tensors for `{path}`, which has {} parts",
                self.family,
                names.len(),
                stretches.len()
            )));
        }
        let parts = names.into_iter().zip(stretches);
        let parts = parts
            .map(|(name, columns)| HfPart { name, columns })
            .collect();
        Ok(HfParam {
            path: path.to_string(),
            shape,
            parts,
            transposed,
            is_buffer,
        })
    }

    /// The columns of all queries, keys and values in the order of [`Key::grouped_qkv`].
    fn grouped_qkv(&self) -> Vec<Range<usize>> {
        let queries = self.heads / self.kv_heads * self.head_dim;
        let keys = self.heads * self.head_dim;
        let values = keys + self.kv_heads * self.head_dim;
        let group = |group: usize| {
            [(0, queries), (keys, self.head_dim), (values, self.head_dim)]
                .map(|(start, len)| start + group * len..start + (group + 1) * len)
        };
        (0..self.kv_heads).flat_map(group).collect()
    }
}

/// The columns of two halves of `width` columns, in turn.
fn interleaved(width: usize) -> Vec<Range<usize>> {
    let half = width / 2;
    let both = |column| [column..column + 1, half + column..half + column + 1];
    (0..half).flat_map(both).collect()
}
