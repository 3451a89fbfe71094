//! `[moe]`: how experts are trained.

use megaburn_models::DecoderConfig;
use megaburn_parallel::{BalanceChoice, Capacity, LoadBalance, MoeOptions};
use serde::{Deserialize, Serialize};

use super::{
    TrainConfig,
    rules::{positive, require},
};
use crate::TrainError;

/// `[moe]`: how experts are trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MoeTrainingConfig {
    /// What the balancing loss of each micro-batch is multiplied with.
    pub aux_loss: f64,
    /// The same of each sequence's.
    pub seq_aux_loss: f64,
    /// The same of the global batch's.
    pub global_aux_loss: f64,
    /// What the mean square of the logits' log-sum-exp is multiplied with.
    pub z_loss: f64,
    /// How a step moves the biases by which experts are chosen, of families that have some: sign, each one by a
    /// rate, or quantile, to where the step's tokens would have gone to all alike.
    pub bias_update: BiasUpdate,
    /// How far a step moves them by sign.
    pub bias_update_rate: f64,
    /// Whether training chooses by the scores that Sinkhorn's algorithm makes of a micro-batch's.
    pub sinkhorn: bool,
    /// How many tokens an expert takes of each sequence: this times what all would take if all took as many.
    /// Default: all that come.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
    /// Which tokens an expert takes that has too many: probs, those that give it the most weight, or position,
    /// the first.
    pub drop_policy: DropPolicyName,
    /// Among which tokens they are counted: those of each sequence, or, as Megatron-LM does, of each rank.
    pub capacity_scope: CapacityScopeName,
    /// Whether every expert is given as many rows as it can take.
    pub pad_to_capacity: bool,
    /// How tokens get to the ranks of their experts: alltoall, to those only, or allgather, all to all.
    pub dispatcher: DispatcherName,
    /// Whether experts are chosen in turn, whatever their scores: for benchmarks.
    pub force_balance: bool,
}

/// How a step moves the biases by which experts are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BiasUpdate {
    /// Each by a rate: up if its expert got less than the mean, down if it got more.
    #[default]
    Sign,
    /// To where the step's tokens would have gone to all experts alike.
    Quantile,
}

/// How tokens get to the ranks of their experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DispatcherName {
    /// To those only.
    #[default]
    AllToAll,
    /// All to all.
    AllGather,
}

/// Which tokens an expert takes that has too many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DropPolicyName {
    /// Those that give it the most weight.
    #[default]
    Probs,
    /// The first.
    Position,
}

/// The tokens among which an expert's are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CapacityScopeName {
    /// Those of each sequence, whichever ranks have them.
    #[default]
    Sequence,
    /// Those of each rank.
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
    /// How experts are used.
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

    /// What shall make tokens go to all experts alike.
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

    /// How many tokens each expert takes.
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
    /// Whether experts of `model` can be trained as the keys say.
    pub(crate) fn check_experts(&self, model: &DecoderConfig) -> Result<(), TrainError> {
        let Some(experts) = &model.experts else {
            return Ok(());
        };
        let by_quantile = self.moe.bias_update == BiasUpdate::Quantile;
        let has_quantile = experts.bias && experts.groups.is_none() && experts.top_k < experts.num;
        if by_quantile && !has_quantile {
            let rule = "sign, where experts have no biases, are chosen by groups, or all go to all";
            return require(false, "moe.bias_update", "quantile", rule);
        }
        let balances = self.moe.aux_loss + self.moe.seq_aux_loss + self.moe.global_aux_loss > 0.0;
        if self.moe.sinkhorn && (balances || self.moe.force_balance || experts.bias) {
            let rule = "false, with a balancing loss, moe.force_balance or biases by which experts are chosen";
            return require(false, "moe.sinkhorn", true, rule);
        }
        let is_dynamic = self.parallel.max_tokens_per_rank.is_some();
        let by_sequence = self.moe.capacity_factor.is_some()
            && self.moe.capacity_scope == CapacityScopeName::Sequence;
        if is_dynamic && by_sequence {
            let rule = "rank where documents are dealt out to ranks (parallel.max_tokens_per_rank)";
            return require(false, "moe.capacity_scope", "sequence", rule);
        }
        if is_dynamic && self.moe.pad_to_capacity {
            let rule = "false where documents are dealt out to ranks (parallel.max_tokens_per_rank), which \
                        have other numbers of tokens";
            return require(false, "moe.pad_to_capacity", true, rule);
        }
        if is_dynamic && self.moe.sinkhorn {
            let rule = "false where documents are dealt out to ranks (parallel.max_tokens_per_rank), which \
                        have no micro-batches in common";
            return require(false, "moe.sinkhorn", true, rule);
        }
        let of_passes = [
            ("moe.aux_loss", self.moe.aux_loss),
            ("moe.seq_aux_loss", self.moe.seq_aux_loss),
        ];
        let used = of_passes
            .into_iter()
            .find(|(_, loss)| is_dynamic && *loss != 0.0);
        let rule = "0 where documents are dealt out to ranks (parallel.max_tokens_per_rank), which have no \
                    micro-batches in common; moe.global_aux_loss is what balances there";
        used.map_or(Ok(()), |(key, loss)| require(false, key, loss, rule))
    }
}
