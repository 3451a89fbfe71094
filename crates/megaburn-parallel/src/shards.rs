//! How a model tells the trainer which part of each parameter a rank holds.

use std::collections::BTreeMap;

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::Tensor,
};
use megaburn_collective::Group;
use megaburn_kernels::MainGrad;
use megaburn_mesh::{Axis, ParamSpec, ShardPlan, ShardSpec};

use crate::ParallelError;

/// A module that knows the shards of its parameters. Layers of this crate implement it; a model
/// passes it on to its fields under their names:
///
/// ```
/// use burn::module::Module;
/// use megaburn_parallel::{Mlp, Norm, PlanBuilder, Sharded};
///
/// #[derive(Module, Debug)]
/// struct Block {
///     norm: Norm,
///     mlp: Mlp,
/// }
///
/// impl Sharded for Block {
///     fn shards(&self, plan: &mut PlanBuilder) {
///         plan.child("norm", &self.norm);
///         plan.child("mlp", &self.mlp);
///     }
/// }
/// ```
pub trait Sharded {
    /// Adds every parameter to the plan.
    fn shards(&self, plan: &mut PlanBuilder);
}

/// A part that another rank of a pipeline has is no part of the plan.
impl<M: Sharded> Sharded for Option<M> {
    fn shards(&self, plan: &mut PlanBuilder) {
        if let Some(module) = self {
            module.shards(plan);
        }
    }
}

/// Collects a [`ShardPlan`] while walking down a model.
#[derive(Debug, Default)]
pub struct PlanBuilder {
    path: Vec<String>,
    params: Vec<(String, ParamSpec)>,
    main_grads: BTreeMap<String, MainGrad>,
    vector_grads: BTreeMap<String, MainGrad>,
    /// Name of each layer that drew its weights from one, and its path.
    names: Vec<(String, String)>,
}

impl PlanBuilder {
    /// A parameter of the current module.
    pub fn param(&mut self, field: &str, shard: &ShardSpec) {
        self.params.push((
            self.join(field),
            ParamSpec {
                shard: shard.clone(),
            },
        ));
    }

    /// A weight of the current module whose gradient may be summed in a [`MainGrad`].
    pub(crate) fn matrix(&mut self, field: &str, shard: &ShardSpec, main_grad: Option<MainGrad>) {
        self.main_grads
            .extend(main_grad.map(|main_grad| (self.join(field), main_grad)));
        self.param(field, shard);
    }

    /// The same of a parameter that is small, and whose gradient is not sent while backward goes on.
    pub(crate) fn vector(&mut self, field: &str, shard: &ShardSpec, main_grad: Option<MainGrad>) {
        self.vector_grads
            .extend(main_grad.map(|main_grad| (self.join(field), main_grad)));
        self.param(field, shard);
    }

    /// A module in field `field`.
    pub fn child(&mut self, field: &str, module: &impl Sharded) {
        self.path.push(field.to_string());
        module.shards(self);
        self.path.pop();
    }

    /// A vector of modules in field `field`.
    pub fn children<M: Sharded>(&mut self, field: &str, modules: &[M]) {
        self.path.push(field.to_string());
        for (index, module) in modules.iter().enumerate() {
            self.child(&index.to_string(), module);
        }
        self.path.pop();
    }

    /// A plain Burn module in field `field`, which every member of `group` holds whole.
    pub fn replicated<M: Module>(&mut self, field: &str, module: &M, group: &Group) {
        let prefix = self.join(field);
        for (path, shape) in shapes(module) {
            let shard = ShardSpec::whole(&shape, Axis::Tp, group.rank(), group.size());
            self.params
                .push((format!("{prefix}.{path}"), ParamSpec { shard }));
        }
    }

    /// The current module drew its weights from this name, if any.
    pub(crate) fn drawn_from(&mut self, name: Option<&str>) {
        self.names
            .extend(name.map(|name| (name.to_string(), self.path.join("."))));
    }

    fn join(&self, field: &str) -> String {
        let prefix = self.path.iter().map(|part| format!("{part}."));
        format!("{}{field}", prefix.collect::<String>())
    }
}

/// The plan of a whole model, checked against its parameters.
///
/// # Errors
/// See [`check_plan`]; also two parameters of one path, or two layers of one name.
pub fn shard_plan<M: Module + Sharded>(model: &M) -> Result<ShardPlan, ParallelError> {
    let mut builder = PlanBuilder::default();
    model.shards(&mut builder);
    let mut plan = ShardPlan::new();
    for (path, spec) in builder.params {
        plan.insert(path, spec)
            .map_err(|error| ParallelError::Plan {
                why: error.to_string(),
            })?;
    }
    check_plan(model, &plan)?;
    let mut paths = BTreeMap::new();
    for (name, second) in builder.names {
        if let Some(first) = paths.insert(name.clone(), second.clone()) {
            return Err(ParallelError::SameName {
                name,
                first,
                second,
            });
        }
    }
    Ok(plan)
}

/// Where a model's linear layers sum the gradients of their weights, by parameter path: for an
/// optimizer to attach itself to. The other parameters get ordinary gradients.
pub fn main_grads<M: Sharded>(model: &M) -> BTreeMap<String, MainGrad> {
    let mut builder = PlanBuilder::default();
    model.shards(&mut builder);
    builder.main_grads
}

/// The same of small parameters, biases and vectors of positions: their values are always with the layer, and
/// their gradients are complete when backward is over.
pub fn vector_grads<M: Sharded>(model: &M) -> BTreeMap<String, MainGrad> {
    let mut builder = PlanBuilder::default();
    model.shards(&mut builder);
    builder.vector_grads
}

/// Refuses a plan that leaves out a parameter, names one that is not there or gives one another
/// local shape.
///
/// # Errors
/// The first such parameter.
pub fn check_plan<M: Module>(module: &M, plan: &ShardPlan) -> Result<(), ParallelError> {
    let refuse = |why: String| Err(ParallelError::Plan { why });
    let found = shapes(module);
    for (path, shape) in &found {
        match plan.get(path).map(|spec| spec.shard.local_shape()) {
            Some(planned) if planned == *shape => {}
            Some(planned) => {
                return refuse(format!(
                    "`{path}` is {shape:?} here and {planned:?} in the plan"
                ));
            }
            None => return refuse(format!("parameter `{path}` is missing from it")),
        }
    }
    match plan.iter().find(|(path, _)| !found.contains_key(*path)) {
        Some((path, _)) => refuse(format!("the module has no parameter `{path}`")),
        None => Ok(()),
    }
}

/// Local shapes of all float parameters by path.
fn shapes<M: Module>(module: &M) -> BTreeMap<String, Vec<usize>> {
    let mut visitor = Shapes::default();
    module.visit(&mut visitor);
    visitor.shapes
}

#[derive(Default)]
struct Shapes {
    path: Vec<String>,
    shapes: BTreeMap<String, Vec<usize>>,
}

impl ModuleVisitor for Shapes {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.shapes
            .insert(self.path.join("."), param.lazy_shape().to_vec());
    }
}
