use std::fmt;

use burn::{grad_clipping::GradientClipping, module::ParamGroup, optim::ModuleOptimizer};
use megaburn_collective::{Group, GroupShards, ParamShards};
use megaburn_mesh::ShardPlan;

use super::{
    on_shards::OnShards,
    reads::{Reads, ShardRule},
};
use crate::error::OptimError;

/// Builds Burn's `ModuleOptimizer` for a module whose parameters are shards, with the updates of one
/// rank that holds the full module.
///
/// Optimizers that update each element by itself run on shards as they are. Of those that read a
/// full parameter ([`Reads::Parameter`]: LAMB, Muon, Adafactor), every rank gathers the parameter
/// and its gradient, computes the full update and keeps its part; their state is that of the full
/// parameter, on every rank. `megaburn_optim`'s own Muon ([`MuonConfig`](crate::MuonConfig)) splits
/// that work and its state.
///
/// ```
/// use burn::{
///     grad_clipping::GradientClipping,
///     module::Module,
///     optim::{AdamWConfig, GradientsParams, MuonConfig},
///     prelude::Device,
///     tensor::Tensor,
/// };
/// use megaburn_collective::{GroupOptions, run_threads};
/// use megaburn_optim::{OptimError, ShardedOptimizer};
/// use megaburn_parallel::{ParallelLinear, ParallelLinearConfig, Sharded, shard_plan};
///
/// #[derive(Module, Sharded, Debug)]
/// struct Net {
///     up: ParallelLinear,
///     down: ParallelLinear,
/// }
///
/// run_threads(2, GroupOptions::default(), |group| {
///     let device = Device::flex().autodiff();
///     let up = ParallelLinearConfig::column(4, 8).with_name("up").init(&group, &device);
///     let down = ParallelLinearConfig::row(8, 4).with_name("down").init(&group, &device);
///     let mut net = Net { up: up.unwrap(), down: down.unwrap() };
///
///     // Muon for the matrices, AdamW for the biases.
///     let mut optimizer = ShardedOptimizer::new(AdamWConfig::new().build())
///         .with_grad_clipping(GradientClipping::Norm(1.0))
///         .with_group(|path| path.ends_with("weight"), MuonConfig::new().build())
///         .init(&shard_plan(&net).unwrap(), &group)?;
///     let x = Tensor::<2>::ones([3, 4], &device);
///     let loss = net.down.forward(net.up.forward(x)).powf_scalar(2.0).mean();
///     let grads = GradientsParams::from_grads(loss.backward(), &net);
///     net = optimizer.step(1e-3, net, grads);
///     Ok::<_, OptimError>(())
/// });
/// ```
pub struct ShardedOptimizer {
    default: Member,
    /// Later ones take precedence, as in Burn.
    groups: Vec<(IsMember, Member)>,
}

type IsMember = Box<dyn Fn(&str) -> bool>;

/// An optimizer of Burn whose type is forgotten.
struct Member {
    reads: Reads,
    clipping: Option<GradientClipping>,
    /// The optimizer of a full module.
    module: Box<dyn Fn() -> ModuleOptimizer>,
    /// Adds the optimizer for some parameters: one that is split, or any number that are not.
    add: Box<dyn Fn(ModuleOptimizer, ParamGroup, Added) -> ModuleOptimizer>,
}

type Added = (Option<ParamShards>, Option<GradientClipping>);

impl Member {
    fn new<O: ShardRule>(optimizer: O) -> Self {
        let of_module = optimizer.clone();
        Self {
            reads: O::READS,
            clipping: None,
            module: Box::new(move || of_module.clone().into()),
            add: Box::new(move |all, group, (shards, clipping)| {
                let optimizer = optimizer.clone();
                match shards {
                    None => all.with_group(group, optimizer, clipping),
                    Some(shards) => {
                        let on_shards = OnShards {
                            optimizer,
                            shards,
                            clipping,
                        };
                        all.with_group(group, on_shards, None)
                    }
                }
            }),
        }
    }

    /// Whether a split parameter needs more than the optimizer itself.
    fn needs_others(&self) -> bool {
        let by_norm = matches!(self.clipping, Some(GradientClipping::Norm(_)));
        self.reads == Reads::Parameter || by_norm
    }
}

impl ShardedOptimizer {
    /// Updates all parameters with an optimizer that a configuration of Burn's builds, such as
    /// `AdamWConfig::new().build()`. The gradient clipping of that configuration is not part of it:
    /// see [`with_grad_clipping`](Self::with_grad_clipping).
    pub fn new<O: ShardRule>(optimizer: O) -> Self {
        Self {
            default: Member::new(optimizer),
            groups: Vec::new(),
        }
    }

    /// Clips the gradient of each parameter of the optimizer that was added last, as Burn does: by
    /// value, or by the norm of the full parameter's gradient.
    #[must_use]
    pub fn with_grad_clipping(mut self, clipping: GradientClipping) -> Self {
        let last = self.groups.last_mut().map(|(_, member)| member);
        last.unwrap_or(&mut self.default).clipping = Some(clipping);
        self
    }

    /// Updates the parameters whose path `is_member` accepts with another optimizer. If several
    /// groups accept a path, the last one takes precedence.
    #[must_use]
    pub fn with_group<O: ShardRule>(
        mut self,
        is_member: impl Fn(&str) -> bool + 'static,
        optimizer: O,
    ) -> Self {
        let member = Member::new(optimizer);
        self.groups.push((Box::new(is_member), member));
        self
    }

    /// Whether the state of the parameter at `path` is that of the full parameter, also where a rank
    /// holds only a part of it.
    pub fn has_full_state(&self, path: &str) -> bool {
        self.member(path).reads == Reads::Parameter
    }

    fn member(&self, path: &str) -> &Member {
        let members = self.groups.iter().rev();
        let mut members = members.filter(|(is_member, _)| is_member(path));
        members.next().map_or(&self.default, |(_, member)| member)
    }

    /// Builds the optimizer for a module with this plan. Its `step` is Burn's, and every member of
    /// the group calls it together.
    ///
    /// # Errors
    /// `group` is not the group that splits the module, or a parameter is an expert's; see
    /// [`megaburn_collective::ShardsError`].
    /// # Collective
    /// All members of `group`.
    pub fn init(&self, plan: &ShardPlan, group: &Group) -> Result<ModuleOptimizer, OptimError> {
        let shards = GroupShards::new(plan, group).map_err(|error| OptimError::Shards {
            why: error.to_string(),
        })?;
        let default = &self.default;
        let mut optimizer = (default.module)();
        if let Some(clipping) = &default.clipping {
            optimizer = optimizer.with_grad_clipping(clipping.clone());
        }
        // For each optimizer, the parameters that need nothing more than itself.
        let mut plain = vec![Vec::new(); self.groups.len()];
        for (path, param) in shards.iter() {
            let index = self
                .groups
                .iter()
                .rposition(|(is_member, _)| is_member(path));
            let member = index.map_or(default, |index| &self.groups[index].1);
            if param.is_split() && member.needs_others() {
                let added = (Some(param.clone()), member.clipping.clone());
                optimizer = (member.add)(optimizer, ParamGroup::from_path(path), added);
            } else if let Some(index) = index {
                plain[index].push(path);
            }
        }
        for (paths, (_, member)) in plain.into_iter().zip(&self.groups) {
            if !paths.is_empty() {
                let added = (None, member.clipping.clone());
                optimizer = (member.add)(optimizer, ParamGroup::from_paths(paths), added);
            }
        }
        Ok(optimizer)
    }
}

impl fmt::Debug for ShardedOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedOptimizer")
            .field("reads", &self.default.reads)
            .field("groups", &self.groups.len())
            .finish()
    }
}
