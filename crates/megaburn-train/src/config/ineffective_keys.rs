use super::{
    CpComm, Dtype, OptimizerName, RecomputeMethod, RecomputeModule, TrainConfig,
    schedule::LrDecayStyle,
};

/// A key that is set but has no effect, because of the value of another key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IneffectiveKey {
    /// Dotted path of the key.
    pub key: &'static str,
    /// The condition under which the key has an effect, as text: "with ..".
    pub used: &'static str,
}

impl TrainConfig {
    /// The keys that differ from their defaults but have no effect because of another key's value.
    pub fn ineffective_keys(&self) -> Vec<IneffectiveKey> {
        let mine = &self.optimizer;
        let default = &Self::default().optimizer;
        let is_wsd = mine.lr_decay_style == LrDecayStyle::Wsd;
        let adamw = mine.name.has_adamw();
        let name = |name| mine.name == name;
        let [sgd, lion, muon] =
            [OptimizerName::Sgd, OptimizerName::Lion, OptimizerName::Muon].map(name);
        let is_f16 = self.train.dtype == Dtype::F16;
        let is_dynamic = is_f16 && mine.loss_scale.is_none();
        let (parallel, pp, cp) = (&self.parallel, self.parallel.pp > 1, self.parallel.cp > 1);
        // For a model that is read from `model.init` this is reported elsewhere.
        let has_experts =
            self.model.init.is_some() || self.model.family.template().experts.is_some();
        const CAPACITY: &str = "with moe.capacity_factor";
        const PP: &str = "with parallel.pp above 1";
        const WSD: &str = "with optimizer.lr_decay_style = \"wsd\"";
        const ADAMW: &str = "with optimizer.name = \"adamw\" or \"muon\"";
        const F16: &str = "with train.dtype = \"f16\"";
        const DYNAMIC: &str = "with train.dtype = \"f16\" and without optimizer.loss_scale";
        let again = &self.recompute;
        let keys = [
            (
                "recompute.modules",
                again
                    .modules
                    .iter()
                    .any(|module| *module != RecomputeModule::Norm),
                !again.has_all_layers(),
                "with recompute.method = \"block\" or \"none\"",
            ),
            (
                "recompute.offload",
                again.offload,
                again.method != RecomputeMethod::None,
                "with recompute.method = \"uniform\" or \"block\"",
            ),
            (
                "recompute.keep_attention",
                again.keep_attention,
                again.method != RecomputeMethod::None,
                "with recompute.method = \"uniform\" or \"block\"",
            ),
            (
                "recompute.num_layers",
                again.num_layers != 1,
                again.method != RecomputeMethod::None,
                "with recompute.method = \"uniform\" or \"block\"",
            ),
            ("optimizer.beta1", mine.beta1 != default.beta1, adamw, ADAMW),
            ("optimizer.beta2", mine.beta2 != default.beta2, adamw, ADAMW),
            ("optimizer.eps", mine.eps != default.eps, adamw, ADAMW),
            (
                "optimizer.exp_avg_sq_dtype",
                mine.exp_avg_sq_dtype != Dtype::F32,
                adamw,
                ADAMW,
            ),
            (
                "optimizer.exp_avg_dtype",
                mine.exp_avg_dtype != Dtype::F32,
                adamw || lion,
                "with optimizer.name = \"adamw\", \"lion\" or \"muon\"",
            ),
            (
                "optimizer.momentum_dtype",
                mine.momentum_dtype != Dtype::F32,
                sgd || muon,
                "with optimizer.name = \"sgd\" or \"muon\"",
            ),
            (
                "optimizer.sgd",
                mine.sgd != default.sgd,
                sgd,
                "with optimizer.name = \"sgd\"",
            ),
            (
                "optimizer.lion",
                mine.lion != default.lion,
                lion,
                "with optimizer.name = \"lion\"",
            ),
            (
                "optimizer.muon",
                mine.muon != default.muon,
                muon,
                "with optimizer.name = \"muon\"",
            ),
            (
                "optimizer.wsd_decay_style",
                mine.wsd_decay_style != default.wsd_decay_style,
                is_wsd,
                WSD,
            ),
            (
                "optimizer.wsd_decay_steps",
                mine.wsd_decay_steps.is_some(),
                is_wsd,
                WSD,
            ),
            (
                "optimizer.wsd_decay_samples",
                mine.wsd_decay_samples.is_some(),
                is_wsd,
                WSD,
            ),
            (
                "optimizer.loss_scale",
                mine.loss_scale.is_some(),
                is_f16,
                F16,
            ),
            (
                "optimizer.initial_loss_scale",
                mine.initial_loss_scale != default.initial_loss_scale,
                is_dynamic,
                DYNAMIC,
            ),
            (
                "optimizer.min_loss_scale",
                mine.min_loss_scale != default.min_loss_scale,
                is_dynamic,
                DYNAMIC,
            ),
            (
                "optimizer.loss_scale_window",
                mine.loss_scale_window != default.loss_scale_window,
                is_dynamic,
                DYNAMIC,
            ),
            (
                "optimizer.hysteresis",
                mine.hysteresis != default.hysteresis,
                is_dynamic,
                DYNAMIC,
            ),
            (
                "optimizer.decoupled_min_lr",
                mine.decoupled_min_lr.is_some(),
                mine.decoupled_lr.is_some(),
                "with optimizer.decoupled_lr",
            ),
            (
                "optimizer.weight_decay_style",
                mine.weight_decay_style != default.weight_decay_style,
                mine.end_weight_decay.is_some(),
                "with optimizer.end_weight_decay",
            ),
            (
                "optimizer.weight_decay_steps",
                mine.weight_decay_steps.is_some(),
                mine.end_weight_decay.is_some(),
                "with optimizer.end_weight_decay",
            ),
            (
                "train.tf32",
                self.train.tf32,
                self.train.dtype == Dtype::F32,
                "with train.dtype = \"f32\"",
            ),
            (
                "parallel.zero_ranks",
                self.parallel.zero_ranks.is_some(),
                self.parallel.zero > 0,
                "with parallel.zero above 0",
            ),
            (
                "parallel.cp_comm",
                parallel.cp_comm != [CpComm::Auto],
                cp || parallel.max_tokens_per_rank.is_some(),
                "with parallel.cp above 1, or parallel.max_tokens_per_rank",
            ),
            (
                "parallel.cp_pad",
                parallel.cp_pad,
                cp && parallel.max_tokens_per_rank.is_none(),
                "with parallel.cp above 1, without parallel.max_tokens_per_rank",
            ),
            (
                "train.micro_batch",
                self.train.micro_batch != Self::default().train.micro_batch,
                parallel.max_tokens_per_rank.is_none(),
                "without parallel.max_tokens_per_rank",
            ),
            (
                "data.document_multiple",
                self.data.document_multiple != 16,
                self.data.documents,
                "with data.documents = true",
            ),
            (
                "train.mtp_loss_scaling_factor",
                self.train.mtp_loss_scaling_factor != Self::default().train.mtp_loss_scaling_factor,
                self.model.mtp_layers > 0,
                "with model.mtp_layers above 0",
            ),
            (
                "moe",
                self.moe != Self::default().moe,
                has_experts,
                "with a model.family that has experts",
            ),
            (
                "moe.drop_policy",
                self.moe.drop_policy != Self::default().moe.drop_policy,
                self.moe.capacity_factor.is_some(),
                CAPACITY,
            ),
            (
                "moe.capacity_scope",
                self.moe.capacity_scope != Self::default().moe.capacity_scope,
                self.moe.capacity_factor.is_some(),
                CAPACITY,
            ),
            (
                "moe.pad_to_capacity",
                self.moe.pad_to_capacity,
                self.moe.capacity_factor.is_some(),
                CAPACITY,
            ),
            ("parallel.schedule", parallel.schedule.is_some(), pp, PP),
            ("parallel.chunks", parallel.chunks.is_some(), pp, PP),
            (
                "parallel.micro_batch_group",
                parallel.micro_batch_group.is_some(),
                pp,
                PP,
            ),
            (
                "parallel.pipeline_layout",
                parallel.pipeline_layout.is_some(),
                pp,
                PP,
            ),
            (
                "parallel.first_stage_layers",
                parallel.first_stage_layers.is_some(),
                pp,
                PP,
            ),
            (
                "parallel.last_stage_layers",
                parallel.last_stage_layers.is_some(),
                pp,
                PP,
            ),
            ("parallel.count_embedding", parallel.count_embedding, pp, PP),
            ("parallel.count_loss", parallel.count_loss, pp, PP),
        ];
        let unused = keys
            .into_iter()
            .filter(|(_, is_set, is_used, _)| *is_set && !is_used);
        unused
            .map(|(key, _, _, used)| IneffectiveKey { key, used })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::ConfigLayers;

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
    #[case(&["train.mtp_loss_scaling_factor=0.3"], &["train.mtp_loss_scaling_factor"])]
    #[case(&["train.mtp_loss_scaling_factor=0.3", "model.mtp_layers=1"], &[])]
    #[case(&["parallel.zero_ranks=2"], &["parallel.zero_ranks"])]
    #[case(&["parallel.zero_ranks=2", "parallel.zero=2"], &[])]
    fn what_changes_nothing_is_named(#[case] sets: &[&str], #[case] expected: &[&str]) {
        let layers = sets
            .iter()
            .try_fold(ConfigLayers::new(), |layers, set| layers.with_set(set));
        let unused = layers.unwrap().load().unwrap().ineffective_keys();
        assert_eq!(
            unused.iter().map(|key| key.key).collect::<Vec<_>>(),
            expected
        );
    }
}
