use std::collections::BTreeMap;

use burn::{
    module::{Module, Param},
    tensor::Tensor,
};
use megaburn_autograd::MainGrad;
use megaburn_collective::Group;
use megaburn_mesh::{Axis, ParamSpec, ShardSpec};

use super::{Sharded, check::shapes};
use crate::{adapters::ShardedAdapter, error::ParallelError, linear::QuantizedLayer};

/// Collects a [`ShardPlan`](megaburn_mesh::ShardPlan) while walking down a model.
#[derive(Debug, Default)]
pub struct PlanBuilder {
    path: Vec<String>,
    pub(super) params: Vec<(String, ParamSpec)>,
    pub(super) main_grads: BTreeMap<String, MainGrad>,
    pub(super) vector_grads: BTreeMap<String, MainGrad>,
    pub(super) quantized: BTreeMap<String, QuantizedLayer>,
    /// For each layer with a name, the name that keyed its draw, and the layer's path.
    pub(super) names: Vec<(String, String)>,
    /// The matrices that may have low-rank adapters, with the group that splits or copies them.
    adaptable: Vec<(String, Group)>,
    /// The group of the module's layers.
    group: Option<Group>,
    /// Parameters of which all members of that group have copies, with their shapes.
    copies: Vec<(String, Vec<usize>)>,
    /// Paths of dropouts whose masks differ between ranks, and what to do instead.
    dropouts: Vec<(String, &'static str)>,
}

impl PlanBuilder {
    /// Adds a parameter of the current module.
    pub fn param(&mut self, field: &str, shard: &ShardSpec) {
        self.params.push((
            self.join(field),
            ParamSpec {
                shard: shard.clone(),
            },
        ));
    }

    /// Adds a weight of the current module whose gradient may be accumulated in a [`MainGrad`].
    pub(crate) fn matrix(&mut self, field: &str, shard: &ShardSpec, main_grad: Option<MainGrad>) {
        self.main_grads
            .extend(main_grad.map(|main_grad| (self.join(field), main_grad)));
        self.param(field, shard);
    }

    /// Like [`matrix`](Self::matrix), for a small parameter, whose gradient is not communicated
    /// before backward has finished.
    pub(crate) fn vector(&mut self, field: &str, shard: &ShardSpec, main_grad: Option<MainGrad>) {
        self.vector_grads
            .extend(main_grad.map(|main_grad| (self.join(field), main_grad)));
        self.param(field, shard);
    }

    /// Adds the low-rank factors of the weight in field `field`, if there are any. Without them,
    /// they may be attached.
    pub(crate) fn adapter(&mut self, field: &str, weight: &Param<Tensor<2>>, group: &Group) {
        match weight.reparameterization::<ShardedAdapter>() {
            Some(adapter) => {
                for (factor, spec) in adapter.specs() {
                    self.param(&format!("{field}.{factor}"), spec);
                }
            }
            None => self.adaptable.push((self.join(field), group.clone())),
        }
    }

    /// The matrices that may have low-rank adapters.
    pub(crate) fn into_adaptable(mut self) -> Vec<(String, Group)> {
        self.add_copies();
        self.adaptable
    }

    /// Records the precision of the current module, if it may be quantised.
    pub(crate) fn quantized(&mut self, layer: Option<&QuantizedLayer>) {
        self.quantized
            .extend(layer.map(|layer| (self.path.join("."), layer.clone())));
    }

    /// Adds the module in field `field`.
    pub fn child(&mut self, field: &str, module: &impl Sharded) {
        self.path.push(field.to_string());
        module.shards(self);
        self.path.pop();
    }

    /// Adds modules under their numbers.
    pub(super) fn numbered<M: Sharded>(&mut self, modules: &[M]) {
        for (index, module) in modules.iter().enumerate() {
            self.child(&index.to_string(), module);
        }
    }

    /// Adds a plain Burn module in field `field` that is replicated on every member of `group`.
    pub fn replicated<M: Module>(&mut self, field: &str, module: &M, group: &Group) {
        let prefix = self.join(field);
        for (path, shape) in shapes(module) {
            let shard = ShardSpec::whole(&shape, Axis::Tp, group.rank(), group.size());
            let path = under(&prefix, &path);
            if shape.len() == 2 {
                self.adaptable.push((path.clone(), group.clone()));
            }
            self.params.push((path, ParamSpec { shard }));
        }
    }

    /// Adds a plain Burn module in field `field` that is replicated on every member of the group
    /// that splits the other layers of the module.
    pub fn replicated_in_module<M: Module>(&mut self, field: &str, module: &M) {
        let prefix = self.join(field);
        let of_module = shapes(module).into_iter();
        self.copies
            .extend(of_module.map(|(path, shape)| (under(&prefix, &path), shape)));
    }

    /// Records a group that splits or copies a layer. The largest is the module's.
    pub(crate) fn of_group(&mut self, group: &Group) {
        if self
            .group
            .as_ref()
            .is_none_or(|own| own.size() < group.size())
        {
            self.group = Some(group.clone());
        }
    }

    /// Adds the parameters of which all members of the module's group have copies.
    pub(super) fn add_copies(&mut self) {
        let group = self.group.clone().unwrap_or_else(|| Group::single(0));
        for (path, shape) in std::mem::take(&mut self.copies) {
            let shard = ShardSpec::whole(&shape, Axis::Tp, group.rank(), group.size());
            if shape.len() == 2 {
                self.adaptable.push((path.clone(), group.clone()));
            }
            self.params.push((path, ParamSpec { shard }));
        }
    }

    /// Records the name that keyed the draw of the current module's weights, if any.
    pub(crate) fn drawn_from(&mut self, name: Option<&str>) {
        self.names
            .extend(name.map(|name| (name.to_string(), self.path.join("."))));
    }

    /// Records that the dropout in field `field` draws the elements of each rank anew, although
    /// ranks hold the same activations; `instead` says what to do. An empty field is the current
    /// module.
    pub(crate) fn dropout(&mut self, field: &str, prob: f64, instead: &'static str) {
        if prob > 0.0 {
            let path = self.join(field);
            let path = path.trim_end_matches('.').to_string();
            self.dropouts.push((path, instead));
        }
    }

    /// Refuses dropouts whose masks differ between the ranks that split or copy the layers. (Ranks
    /// of a data-parallel group have other samples, whose masks should differ.)
    pub(super) fn check_dropouts(&self) -> Result<(), ParallelError> {
        let ranks = self.group.as_ref().map_or(1, Group::size);
        match self.dropouts.first() {
            Some((path, instead)) if ranks > 1 => Err(ParallelError::Config {
                layer: "dropout",
                name: path.clone(),
                why: format!(
                    "the {ranks} ranks that hold the same activations would drop different elements; \
                    {instead}"
                ),
            }),
            _ => Ok(()),
        }
    }

    fn join(&self, field: &str) -> String {
        let prefix = self.path.iter().map(|part| format!("{part}."));
        format!("{}{field}", prefix.collect::<String>())
    }
}

/// The path of a parameter of the module at `prefix`. A parameter that is a field itself has no path
/// in it.
fn under(prefix: &str, path: &str) -> String {
    if path.is_empty() {
        prefix.into()
    } else {
        format!("{prefix}.{path}")
    }
}
