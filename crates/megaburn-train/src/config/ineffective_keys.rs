//! Keys that are set but have no effect. Each section lists the conditions of its own keys.

use toml::Table;

use super::{DatasetKind, TrainConfig, schema::join, value::value_at};

/// A key that is set but has no effect, because of the value of another key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IneffectiveKey {
    /// Dotted path of the key.
    pub key: String,
    /// The condition under which the key has an effect, as text: "with ..".
    pub used: &'static str,
}

/// Keys of a section, separated by spaces; whether they have an effect; and the condition for that
/// as text, "with ..".
pub(super) type Condition = (&'static str, bool, &'static str);

impl TrainConfig {
    /// The keys that differ from their defaults but have no effect because of another key's value.
    pub fn ineffective_keys(&self) -> Vec<IneffectiveKey> {
        // For a model that is read from `model.init` this is reported elsewhere.
        let has_experts = self.model.init.is_some() || self.model.template().experts.is_some();
        let moe = ("moe", has_experts, "with a model that has experts");
        let writes = self.data.dataset == DatasetKind::Gpt;
        let generate = (
            "generate",
            writes,
            "with data.dataset = \"gpt\": an encoder generates no text",
        );
        let sections = [
            ("recompute", self.recompute.conditions()),
            ("optimizer", self.optimizer.conditions(self.train.dtype)),
            ("train", self.train.conditions(self)),
            ("parallel", self.parallel.conditions()),
            ("data", self.data.conditions()),
            ("", vec![moe, generate]),
            ("moe", self.moe.conditions()),
        ];
        // What TOML cannot hold is refused before.
        let [mine, default] =
            [self, &Self::default()].map(|config| Table::try_from(config).unwrap_or_default());
        let mut unused = Vec::new();
        for (section, conditions) in sections {
            for (keys, _, used) in conditions.into_iter().filter(|(_, is_used, _)| !is_used) {
                let keys = keys.split(' ').map(|key| join(section, key));
                let set = keys.filter(|key| value_at(&mine, key) != value_at(&default, key));
                unused.extend(set.map(|key| IneffectiveKey { key, used }));
            }
        }
        unused
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::config::ConfigLayers;

    #[rstest]
    #[case(&[], &[])]
    #[case(&["optimizer.wsd_decay_steps=10"], &["optimizer.wsd_decay_steps"])]
    #[case(&["optimizer.wsd_decay_steps=10", "optimizer.lr_decay_style=wsd"], &[])]
    #[case(&["optimizer.hysteresis=3", "optimizer.loss_scale=8.0"], &["optimizer.loss_scale", "optimizer.hysteresis"])]
    #[case(&["optimizer.hysteresis=3", "optimizer.loss_scale=8.0", "train.dtype=f16"], &["optimizer.hysteresis"])]
    #[case(&["optimizer.hysteresis=3", "train.dtype=f16"], &[])]
    #[case(&["optimizer.decoupled_min_lr=1e-4"], &["optimizer.decoupled_min_lr"])]
    #[case(&["optimizer.decoupled_min_lr=1e-4", "optimizer.decoupled_lr=1e-3"], &[])]
    #[case(&["optimizer.weight_decay_style=cosine"], &["optimizer.weight_decay_style"])]
    #[case(&["optimizer.weight_decay_steps=9"], &["optimizer.weight_decay_steps"])]
    #[case(&["train.tf32=true", "train.dtype=bf16"], &["train.tf32"])]
    #[case(&["optimizer.beta1=0.8", "optimizer.name=sgd"], &["optimizer.beta1"])]
    #[case(&["optimizer.beta1=0.8", "optimizer.name=muon"], &[])]
    #[case(&["optimizer.muon.momentum=0.8", "optimizer.momentum_dtype=bf16"], &["optimizer.momentum_dtype", "optimizer.muon"])]
    #[case(&["optimizer.lion.beta1=0.8", "optimizer.name=lion", "optimizer.exp_avg_dtype=bf16"], &[])]
    #[case(&["optimizer.sgd.nesterov=true"], &["optimizer.sgd"])]
    #[case(&["parallel.chunks=2", "parallel.count_loss=true"], &["parallel.chunks", "parallel.count_loss"])]
    #[case(&["parallel.chunks=2", "parallel.pp=2"], &[])]
    #[case(&["parallel.cp_pad=true", "parallel.cp_comm=[\"a2a\"]"], &["parallel.cp_comm", "parallel.cp_pad"])]
    #[case(&["parallel.cp_pad=true", "parallel.cp=2"], &[])]
    #[case(&["data.document_multiple=8"], &["data.document_multiple"])]
    #[case(&["data.eod_mask_loss=true"], &[])]
    #[case(&["data.eod_mask_loss=true", "data.documents=true"], &["data.eod_mask_loss"])]
    #[case(&["train.mtp_loss_scaling_factor=0.3"], &["train.mtp_loss_scaling_factor"])]
    #[case(&["train.mtp_loss_scaling_factor=0.3", "model.mtp_layers=1"], &[])]
    #[case(&["data.masking.probability=0.2", "data.short_sequence_probability=0.5"], &["data.short_sequence_probability", "data.masking"])]
    #[case(&["model.family=bert", "data.masking.probability=0.2", "data.order=megatron", "generate.tokens=9"], &["data.order", "generate"])]
    #[case(&["parallel.zero_ranks=2"], &["parallel.zero_ranks"])]
    #[case(&["parallel.zero_ranks=2", "parallel.zero=2"], &[])]
    fn what_changes_nothing_is_named(#[case] sets: &[&str], #[case] expected: &[&str]) {
        let layers = sets
            .iter()
            .try_fold(ConfigLayers::new(), |layers, set| layers.with_set(set));
        let unused = layers.unwrap().load().unwrap().ineffective_keys();
        let unused: Vec<_> = unused.iter().map(|key| key.key.as_str()).collect();
        assert_eq!(unused, expected);
    }
}
