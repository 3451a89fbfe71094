use megaburn_parallel::{ExpertGroups, MoeConfig};
use serde::{Deserialize, Serialize};

use super::{
    limits::{LARGEST, MOST_EXPERTS},
    parts::is_default,
};
use crate::error::ModelError;

/// The experts of a model's layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// Number of experts per layer, without the shared one.
    pub num: usize,
    /// Number of experts per token.
    pub top_k: usize,
    /// Features inside an expert.
    pub ffn: usize,
    /// Features inside the shared expert, which every token uses; `None` if there is no shared
    /// expert.
    pub shared_ffn: Option<usize>,
    /// Whether the shared expert's output is multiplied by a gate, the sigmoid of one logit per
    /// token (Qwen2-MoE; Megatron's `--moe-shared-expert-gate`).
    #[serde(default, skip_serializing_if = "is_default")]
    pub shared_gate: bool,
    /// Whether the router's scores are a sigmoid of the logits in place of a softmax.
    pub sigmoid: bool,
    /// Whether the weights of a token's experts are normalised to sum to one.
    pub normalise: bool,
    /// Factor on the weights, applied after the normalisation.
    pub scale: f64,
    /// Group-limited routing `[n_group, topk_group, scores_per_group]`, as in DeepSeek: a token
    /// uses experts of its `topk_group` best groups, and the score of a group is the sum of its
    /// `scores_per_group` best scores.
    pub groups: Option<[usize; 3]>,
    /// Whether experts have a bias that takes part in their selection and has no gradient.
    pub bias: bool,
    /// Whether the router adds a bias with a gradient to each logit (gpt-oss).
    #[serde(default, skip_serializing_if = "is_default")]
    pub router_bias: bool,
    /// Layers that have an MLP in place of experts.
    pub dense_layers: Vec<usize>,
}

impl Experts {
    /// `num` experts, `top_k` of them per token, with Mixtral's routing.
    pub fn new(num: usize, top_k: usize, ffn: usize) -> Self {
        Self {
            num,
            top_k,
            ffn,
            shared_ffn: None,
            shared_gate: false,
            sigmoid: false,
            normalise: true,
            scale: 1.0,
            groups: None,
            bias: false,
            router_bias: false,
            dense_layers: Vec::new(),
        }
    }

    /// Features inside all the experts of a token.
    pub fn active_ffn(&self) -> usize {
        self.top_k * self.ffn + self.shared_ffn.unwrap_or(0)
    }

    pub(super) fn validate(&self, layers: usize) -> Result<(), ModelError> {
        let refuse = |why: String| Err(ModelError::Config(why));
        let Self {
            num, top_k, ffn, ..
        } = *self;
        let sizes = [
            ("num_experts", num),
            ("top_k", top_k),
            ("the experts' ffn", ffn),
            ("the shared expert's ffn", self.shared_ffn.unwrap_or(1)),
        ];
        if let Some((name, size)) = sizes
            .into_iter()
            .find(|(_, size)| !(1..=LARGEST).contains(size))
        {
            return refuse(format!("{name} is {size}, which is out of range"));
        }
        if self.shared_gate && self.shared_ffn.is_none() {
            return refuse(
                "`shared_gate` is true, but there is no shared expert: set `shared_ffn`".into(),
            );
        }
        if num.saturating_mul(layers) > MOST_EXPERTS {
            return refuse(format!(
                "{num} experts in each of {layers} layers are too many"
            ));
        }
        if top_k > num {
            return refuse(format!(
                "top_k {top_k} is more than the number of experts, {num}"
            ));
        }
        if !(self.scale.is_finite() && self.scale > 0.0) {
            return refuse(format!(
                "the scale of expert weights is {}, but must be positive and finite",
                self.scale
            ));
        }
        if let Some([groups, kept, best]) = self.groups
            && (groups == 0
                || !num.is_multiple_of(groups)
                || !(1..=groups).contains(&kept)
                || !(1..=num / groups).contains(&best)
                || top_k > kept * (num / groups))
        {
            return refuse(format!(
                "group-limited routing with top_k {top_k}, {kept} of {groups} groups, {num} \
                experts and group scores from the best {best} is not possible"
            ));
        }
        match self.dense_layers.iter().find(|&&layer| layer >= layers) {
            Some(layer) => refuse(format!(
                "layer {layer} is listed as dense, but the model has \
                {layers} layers"
            )),
            None => Ok(()),
        }
    }

    /// The configuration of the MoE layer of a block.
    pub(super) fn layer(&self, d_model: usize) -> MoeConfig {
        MoeConfig::new(d_model, self.ffn, self.num, self.top_k)
            .with_shared_ffn(self.shared_ffn)
            .with_shared_gate(self.shared_gate)
            .with_sigmoid(self.sigmoid)
            .with_normalise(self.normalise)
            .with_scale(self.scale)
            .with_groups(self.groups)
            .with_expert_bias(self.bias)
            .with_router_bias(self.router_bias)
    }

    /// Checks whether the experts can be distributed over the ranks.
    ///
    /// # Errors
    /// The number of experts is not divisible by `ep`; the message has both numbers.
    pub(super) fn check_grid(&self, groups: &ExpertGroups) -> Result<(), ModelError> {
        let ep = groups.ep.size();
        let num = self.num;
        if num.is_multiple_of(ep) {
            Ok(())
        } else {
            Err(ModelError::Config(format!(
                "{num} experts are not divisible by ep {ep}"
            )))
        }
    }
}
