//! `[moe]`: how experts are trained.

use megaburn_models::DecoderConfig;
use megaburn_parallel::{BalanceChoice, Capacity, LoadBalance, MoeOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    TrainConfig,
    rules::{positive, require},
};
use crate::TrainError;

/// `[moe]`: how experts are trained. It has an effect only in families with experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct MoeTrainingConfig {
    /// Coefficient of the load-balancing loss over each micro-batch; 0 is off (Megatron-LM's
    /// `--moe-aux-loss-coeff`).
    pub aux_loss: f64,
    /// Coefficient of the load-balancing loss over each sequence; 0 is off.
    pub seq_aux_loss: f64,
    /// Coefficient of the load-balancing loss over the global batch, with the token counts of the
    /// previous step; 0 is off.
    pub global_aux_loss: f64,
    /// Coefficient of the router's z-loss, the mean square of the log-sum-exp of its logits; 0 is
    /// off.
    pub z_loss: f64,
    /// How a step moves the expert biases, in families that have them: `sign` moves each bias by
    /// `bias_update_rate`, `quantile` moves it to the value at which the step's tokens would have
    /// been balanced.
    pub bias_update: BiasUpdate,
    /// The amount by which a step moves an expert bias with `bias_update = "sign"`.
    pub bias_update_rate: f64,
    /// Whether training routes by the Sinkhorn-normalised scores of a micro-batch. It cannot be
    /// used with a load-balancing loss, `force_balance`, expert biases or
    /// `parallel.max_tokens_per_rank`.
    pub sinkhorn: bool,
    /// Expert capacity: an expert takes at most `ceil(capacity_factor * tokens * top_k / num)`
    /// tokens (`top_k` and `num` of `[model.experts]`), i.e. this factor times its share under
    /// balanced routing; see `drop_policy` and `capacity_scope`. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
    /// Which tokens an expert over capacity keeps: `probs`, the tokens with the highest weight, or
    /// `position`, the first tokens. Used with `capacity_factor`.
    pub drop_policy: DropPolicyName,
    /// The tokens over which capacity is counted: those of each `sequence`, which makes drops
    /// independent of the layout, or those of each `rank`, as in Megatron-LM. Used with
    /// `capacity_factor`.
    pub capacity_scope: CapacityScopeName,
    /// Whether every expert gets exactly as many rows as its capacity, padded with zeros, so that
    /// sizes do not depend on the routing. Used with `capacity_factor`.
    pub pad_to_capacity: bool,
    /// How tokens are dispatched: `alltoall` sends them to the ranks of their experts only,
    /// `allgather` sends them to all ranks.
    pub dispatcher: DispatcherName,
    /// Whether experts are chosen round robin regardless of their scores, for benchmarks.
    pub force_balance: bool,
}

/// How a step moves the expert biases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum BiasUpdate {
    /// Each bias moves by a fixed rate: up if its expert got fewer tokens than the mean, down if it
    /// got more.
    #[default]
    Sign,
    /// Each bias moves to the value at which the step's tokens would have been balanced.
    Quantile,
}

/// How tokens are dispatched to the ranks of their experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum DispatcherName {
    /// To the ranks of their experts only.
    #[default]
    AllToAll,
    /// To all ranks.
    AllGather,
}

/// Which tokens an expert over capacity keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum DropPolicyName {
    /// The tokens with the highest weight.
    #[default]
    Probs,
    /// The first tokens.
    Position,
}

/// The tokens over which expert capacity is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum CapacityScopeName {
    /// The tokens of each sequence, whichever ranks hold them.
    #[default]
    Sequence,
    /// The tokens of each rank.
    Rank,
}

impl Default for MoeTrainingConfig {
    fn default() -> Self {
        Self {
            aux_loss: 0.0,
            seq_aux_loss: 0.0,
            global_aux_loss: 0.0,
            z_loss: 0.0,
            bias_update: BiasUpdate::Sign,
            bias_update_rate: 1e-3,
            sinkhorn: false,
            capacity_factor: None,
            drop_policy: DropPolicyName::Probs,
            capacity_scope: CapacityScopeName::Sequence,
            pad_to_capacity: false,
            dispatcher: DispatcherName::AllToAll,
            force_balance: false,
        }
    }
}

impl MoeTrainingConfig {
    /// The options of the model's MoE layers.
    pub(crate) fn options(&self) -> MoeOptions {
        MoeOptions {
            balance: self.balance(),
            capacity: self.capacity(),
            dispatcher: match self.dispatcher {
                DispatcherName::AllToAll => megaburn_parallel::Dispatcher::AllToAll,
                DispatcherName::AllGather => megaburn_parallel::Dispatcher::AllGather,
            },
        }
    }

    /// Load balancing: the coefficients of the losses, and how experts are chosen.
    fn balance(&self) -> LoadBalance {
        LoadBalance {
            aux_loss: self.aux_loss,
            seq_aux_loss: self.seq_aux_loss,
            global_aux_loss: self.global_aux_loss,
            z_loss: self.z_loss,
            choice: match (self.force_balance, self.sinkhorn) {
                (true, _) => BalanceChoice::RoundRobin,
                (false, true) => BalanceChoice::Sinkhorn,
                (false, false) => BalanceChoice::Scores,
            },
            quantile_counts: self.bias_update == BiasUpdate::Quantile,
        }
    }

    /// The expert capacity; `None` if it is unlimited.
    fn capacity(&self) -> Option<Capacity> {
        Some(Capacity {
            factor: self.capacity_factor?,
            policy: match self.drop_policy {
                DropPolicyName::Probs => megaburn_parallel::DropPolicy::Probs,
                DropPolicyName::Position => megaburn_parallel::DropPolicy::Position,
            },
            scope: match self.capacity_scope {
                CapacityScopeName::Sequence => megaburn_parallel::CapacityScope::Sequence,
                CapacityScopeName::Rank => megaburn_parallel::CapacityScope::Rank,
            },
            pad: self.pad_to_capacity,
        })
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        if let Some(factor) = self.capacity_factor {
            positive("moe.capacity_factor", factor)?;
        }
        let numbers = [
            ("moe.aux_loss", self.aux_loss),
            ("moe.seq_aux_loss", self.seq_aux_loss),
            ("moe.global_aux_loss", self.global_aux_loss),
            ("moe.z_loss", self.z_loss),
            ("moe.bias_update_rate", self.bias_update_rate),
        ];
        let is_number = |value: f64| value >= 0.0 && value.is_finite();
        let bad = numbers.into_iter().find(|(_, value)| !is_number(*value));
        bad.map_or(Ok(()), |(key, value)| {
            require(false, key, value, "at least 0 and finite")
        })
    }
}

impl TrainConfig {
    /// Checks that the experts of `model` can be trained as the keys say.
    pub(crate) fn check_experts(&self, model: &DecoderConfig) -> Result<(), TrainError> {
        let Some(experts) = &model.experts else {
            return Ok(());
        };
        let by_quantile = self.moe.bias_update == BiasUpdate::Quantile;
        let has_quantile = experts.bias && experts.groups.is_none() && experts.top_k < experts.num;
        if by_quantile && !has_quantile {
            let rule = "sign if experts have no biases, routing is group-limited, or every token \
                       goes to every expert";
            return require(false, "moe.bias_update", "quantile", rule);
        }
        let balances = self.moe.aux_loss + self.moe.seq_aux_loss + self.moe.global_aux_loss > 0.0;
        if self.moe.sinkhorn && (balances || self.moe.force_balance || experts.bias) {
            let rule = "false with a balancing loss, moe.force_balance or expert biases";
            return require(false, "moe.sinkhorn", true, rule);
        }
        let is_dynamic = self.parallel.max_tokens_per_rank.is_some();
        let by_sequence = self.moe.capacity_factor.is_some()
            && self.moe.capacity_scope == CapacityScopeName::Sequence;
        if is_dynamic && by_sequence {
            let rule = "rank if documents are distributed over ranks \
                       (parallel.max_tokens_per_rank)";
            return require(false, "moe.capacity_scope", "sequence", rule);
        }
        if is_dynamic && self.moe.pad_to_capacity {
            let rule = "false if documents are distributed over ranks \
                       (parallel.max_tokens_per_rank), because ranks have different numbers of \
                       tokens";
            return require(false, "moe.pad_to_capacity", true, rule);
        }
        if is_dynamic && self.moe.sinkhorn {
            let rule = "false if documents are distributed over ranks \
                       (parallel.max_tokens_per_rank), because ranks have no common \
                       micro-batches";
            return require(false, "moe.sinkhorn", true, rule);
        }
        let of_passes = [
            ("moe.aux_loss", self.moe.aux_loss),
            ("moe.seq_aux_loss", self.moe.seq_aux_loss),
        ];
        let used = of_passes
            .into_iter()
            .find(|(_, loss)| is_dynamic && *loss != 0.0);
        let rule = "0 if documents are distributed over ranks (parallel.max_tokens_per_rank), \
                   because ranks have no common micro-batches; use moe.global_aux_loss";
        used.map_or(Ok(()), |(key, loss)| require(false, key, loss, rule))
    }
}
