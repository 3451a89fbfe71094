//! `common.pt` of a checkpoint for Megatron-LM: optimizer, schedules and the state of the run.

use megaburn_torch::pickle::{Tree, Value};

use super::{
    arguments::arguments,
    dict::{Dict, int, number},
    exported_run::{Rates, Run, copy_of, decay_style, weight_decay_style},
};
use crate::error::TrainError;

impl Run<'_> {
    /// The dict of `common.pt`.
    pub(super) fn common(&self) -> Result<Tree, TrainError> {
        let rates = self.rates()?;
        let mut common = Dict::default();
        common.set("args", arguments(self, &rates));
        common.set("checkpoint_version", 3.0);
        common.set("iteration", int(self.progress.step));
        common.set("optimizer", self.optimizer(&rates));
        common.set("opt_param_scheduler", self.scheduler(&rates));
        let operations = "num_floating_point_operations_so_far";
        if let Some(count) = self.copied(operations) {
            common.set(operations, count);
        }
        let mut about = Dict::of(self.copied("content_metadata").unwrap_or(Tree::None));
        about.set("distrib_optim_sharding_type", "fully_reshardable");
        about.set_default("distrib_optim_fully_reshardable_mem_efficient", false);
        about.set("singleton_local_shards", false);
        if !self.is_stacked || about.get("non_homogeneous_layers").is_some() {
            about.set("non_homogeneous_layers", !self.is_stacked);
        }
        about.set("chained_optim_avoid_prefix", true);
        common.set("content_metadata", about.tree());
        Ok(common.tree())
    }

    /// The state of the schedules.
    ///
    /// Source: Megatron-LM, `OptimizerParamScheduler.state_dict`.
    fn scheduler(&self, rates: &Rates) -> Tree {
        let mut state = Dict::of(self.copied("opt_param_scheduler").unwrap_or(Tree::None));
        let (lr, decay) = (&rates.lr, &rates.weight_decay);
        state.set("max_lr", lr.max);
        // A warm-up that is a fraction of the decay has no whole number of samples there.
        let warmup = state.get("lr_warmup_steps").and_then(number);
        let is_kept = self.config.optimizer.warmup_fraction.is_some()
            && warmup.is_some_and(|samples| samples.round() == lr.warmup_samples as f64);
        if !is_kept {
            state.set("lr_warmup_steps", int(lr.warmup_samples));
        }
        state.set("num_steps", int(self.num_samples()));
        state.set("lr_decay_style", decay_style(lr.decay));
        state.set("lr_decay_steps", int(lr.decay_samples));
        state.set("min_lr", lr.min);
        state.set("start_wd", decay.start);
        state.set("end_wd", decay.end);
        if decay.start == decay.end {
            state.set_default("wd_incr_style", "constant");
            state.set_default("wd_incr_steps", int(lr.decay_samples));
        } else {
            state.set("wd_incr_style", weight_decay_style(decay.style));
            state.set("wd_incr_steps", int(decay.samples));
        }
        state.tree()
    }

    /// Whether experts have an optimizer of their own.
    fn has_expert_optimizer(&self) -> bool {
        self.model.experts.is_some() && self.ep > 1
    }

    /// The state of the optimizer without tensors: its groups.
    fn optimizer(&self, rates: &Rates) -> Tree {
        let mut kinds = vec![vec![(1.0, false, false), (0.0, false, false)]];
        if self.config.optimizer.decoupled_lr.is_some() {
            kinds[0].push((1.0, false, true));
        }
        if self.has_expert_optimizer() {
            kinds.push(vec![(1.0, true, false)]);
        }
        let mut originals = Vec::new();
        if let Some(original) = self.original.and_then(|file| file.root().get("optimizer")) {
            groups_of(original, 4, &mut originals);
        }
        let is_alike = originals.len() == kinds.len()
            && originals
                .iter()
                .zip(&kinds)
                .all(|(a, b)| a.len() == b.len());
        let mut optimizers = kinds.into_iter().enumerate().map(|(index, kinds)| {
            let group = |(number, kind): (usize, _)| {
                let original = is_alike.then(|| originals[index][number].clone());
                self.group(rates, original.unwrap_or_default(), kind)
            };
            let groups = kinds.into_iter().enumerate().map(group).collect();
            let mut inner = Dict::default();
            inner.set("param_groups", Tree::List(groups));
            let mut outer = Dict::default();
            outer.set("optimizer", inner.tree());
            outer.set("param_state_sharding_type", "fully_reshardable");
            outer.tree()
        });
        match (self.has_expert_optimizer(), optimizers.next()) {
            (false, Some(only)) => only,
            (_, first) => {
                let all = first.into_iter().chain(optimizers);
                Tree::Dict(
                    all.zip(0..)
                        .map(|(of, number)| (Tree::Int(number), of))
                        .collect(),
                )
            }
        }
    }

    /// A group of parameters. The keys are those of PyTorch's, Apex's and Transformer Engine's AdamW.
    fn group(&self, rates: &Rates, mut group: Dict, kind: (f64, bool, bool)) -> Tree {
        // The groups of an optimizer in buckets are not in `common.pt`.
        let is_new = group.get("lr").is_none();
        let found = (
            group.get("wd_mult").cloned(),
            group.get("is_expert_parallel").cloned(),
            group.get("is_decoupled_lr").cloned(),
        );
        // Original groups have an order of their own.
        let (wd_mult, is_expert, is_decoupled) = match found {
            (Some(Tree::Float(mult)), Some(Tree::Bool(expert)), Some(Tree::Bool(decoupled))) => {
                (mult, expert, decoupled)
            }
            _ => kind,
        };
        let optimizer = &self.config.optimizer;
        let samples = self.num_samples();
        let lr = if is_decoupled {
            &rates.decoupled_lr
        } else {
            &rates.lr
        };
        group.set("lr", lr.lr(samples));
        group.set(
            "weight_decay",
            wd_mult * rates.weight_decay.weight_decay(samples),
        );
        let betas = [optimizer.beta1, optimizer.beta2].map(Tree::Float);
        group.set("betas", Tree::Tuple(betas.to_vec()));
        group.set("eps", optimizer.eps);
        for (name, value) in [
            ("amsgrad", Tree::Bool(false)),
            ("maximize", Tree::Bool(false)),
            ("foreach", Tree::None),
            ("capturable", Tree::Bool(false)),
            ("differentiable", Tree::Bool(false)),
            ("fused", Tree::None),
            ("decoupled_weight_decay", Tree::Bool(true)),
        ] {
            group.set_default(name, value);
        }
        if is_new {
            group.set("bias_correction", true);
        }
        group.set("is_expert_parallel", is_expert);
        group.set("default_config", !is_decoupled);
        group.set("wd_mult", wd_mult);
        group.set_default("lr_mult", 1.0);
        group.set("is_decoupled_lr", is_decoupled);
        group.set("max_lr", lr.max);
        group.set("min_lr", lr.min);
        group.set(
            "step",
            int(self.progress.step - self.progress.skipped_steps),
        );
        group.tree()
    }
}

/// All lists of groups in the state of an optimizer, in order.
fn groups_of(value: Value, depth: usize, found: &mut Vec<Vec<Dict>>) {
    let Some(depth) = depth.checked_sub(1) else {
        return;
    };
    for (key, value) in value.entries().into_iter().flat_map(|all| all.iter()) {
        if key.as_str() != Some("param_groups") {
            groups_of(value, depth, found);
        } else if let Some(groups) = value.sequence() {
            let copied = |group| Dict::of(copy_of(group).unwrap_or(Tree::None));
            found.push(groups.iter().map(copied).collect());
        }
    }
}
