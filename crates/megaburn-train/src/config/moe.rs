//! `[moe]`: how experts are trained.

use megaburn_models::DecoderConfig;
use megaburn_parallel::{
    BalanceChoice, Capacity, CapacityScope, Dispatcher, DropPolicy, LoadBalance, MoeOptions,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{TrainConfig, ineffective_keys::Condition, require::require};
use crate::error::TrainError;

/// `[moe]`: how experts are trained. It has an effect only in families with experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct MoeTrainingConfig {
    /// Coefficient of the load-balancing loss over each micro-batch; 0 is off (Megatron-LM's
    /// `--moe-aux-loss-coeff`).
    #[schemars(extend("minimum" = 0, "x-rule" = "at least 0 and finite"))]
    pub aux_loss: f64,
    /// Coefficient of the load-balancing loss over each sequence; 0 is off.
    #[schemars(extend("minimum" = 0, "x-rule" = "at least 0 and finite"))]
    pub seq_aux_loss: f64,
    /// Coefficient of the load-balancing loss over the global batch, with the token counts of the
    /// previous step; 0 is off.
    #[schemars(extend("minimum" = 0, "x-rule" = "at least 0 and finite"))]
    pub global_aux_loss: f64,
    /// Coefficient of the router's z-loss, the mean square of the log-sum-exp of its logits; 0 is
    /// off.
    #[schemars(extend("minimum" = 0, "x-rule" = "at least 0 and finite"))]
    pub z_loss: f64,
    /// How a step moves the expert biases, in families that have them: `sign` moves each bias by
    /// `bias_update_rate`, `quantile` moves it to the value at which the step's tokens would have
    /// been balanced.
    pub bias_update: BiasUpdate,
    /// The amount by which a step moves an expert bias with `bias_update = "sign"`.
    #[schemars(extend("minimum" = 0, "x-rule" = "at least 0 and finite"))]
    pub bias_update_rate: f64,
    /// Whether training routes by the Sinkhorn-normalised scores of a micro-batch. It cannot be
    /// used with a load-balancing loss, `force_balance`, expert biases or
    /// `parallel.max_tokens_per_rank`.
    pub sinkhorn: bool,
    /// Expert capacity: an expert takes at most `ceil(capacity_factor * tokens * top_k / num)`
    /// tokens (`top_k` and `num` of `[model.experts]`), i.e. this factor times its share under
    /// balanced routing; see `drop_policy` and `capacity_scope`. Default: no limit.
    #[schemars(extend("exclusiveMinimum" = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
    /// Which tokens an expert over capacity keeps: `probs`, the tokens with the highest weight, or
    /// `position`, the first tokens. Used with `capacity_factor`.
    pub drop_policy: DropPolicy,
    /// The tokens over which capacity is counted: those of each `sequence`, which makes drops
    /// independent of the layout, or those of each `rank`, as in Megatron-LM. Used with
    /// `capacity_factor`.
    pub capacity_scope: CapacityScope,
    /// Whether every expert gets exactly as many rows as its capacity, padded with zeros, so that
    /// sizes do not depend on the routing. Used with `capacity_factor`.
    pub pad_to_capacity: bool,
    /// How tokens are dispatched: `alltoall` sends them to the ranks of their experts only,
    /// `allgather` sends them to all ranks.
    pub dispatcher: Dispatcher,
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
            drop_policy: DropPolicy::Probs,
            capacity_scope: CapacityScope::Sequence,
            pad_to_capacity: false,
            dispatcher: Dispatcher::AllToAll,
            force_balance: false,
        }
    }
}

impl MoeTrainingConfig {
    /// When keys of the section have an effect.
    pub(super) fn conditions(&self) -> Vec<Condition> {
        let keys = "drop_policy capacity_scope pad_to_capacity";
        let has_capacity = self.capacity_factor.is_some();
        vec![(keys, has_capacity, "with moe.capacity_factor")]
    }

    /// The options of the model's MoE layers.
    pub(crate) fn options(&self) -> MoeOptions {
        MoeOptions {
            balance: self.balance(),
            capacity: self.capacity(),
            dispatcher: self.dispatcher,
            ..MoeOptions::default()
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

    /// The capacity of each expert; `None` if it is unlimited.
    fn capacity(&self) -> Option<Capacity> {
        Some(Capacity {
            factor: self.capacity_factor?,
            policy: self.drop_policy,
            scope: self.capacity_scope,
            pad: self.pad_to_capacity,
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
            && self.moe.capacity_scope == CapacityScope::Sequence;
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
