//! How a model reports which part of each parameter a rank holds.

use std::collections::BTreeMap;

use burn::{
    module::{Module, ModuleVisitor, Param},
    nn,
    tensor::{Tensor, kind::Basic},
};
use megaburn_autograd::MainGrad;
use megaburn_collective::Group;
pub use megaburn_derive::Sharded;
use megaburn_mesh::{Axis, ParamSpec, ShardPlan, ShardSpec};

use crate::{
    adapters::ShardedAdapter, error::ParallelError, linear::QuantizedLayer, parallelize::Layers,
};

/// A module that knows the shards of its parameters. Layers of this crate implement it; a model
/// derives it, and adds its fields under their names:
///
/// ```
/// use burn::{module::Module, nn};
/// use megaburn_collective::Group;
/// use megaburn_parallel::{Mlp, Norm, Sharded};
///
/// #[derive(Module, Sharded, Debug)]
/// struct Block {
///     norm: Norm,
///     mlp: Mlp,
/// }
///
/// #[derive(Module, Sharded, Debug)]
/// struct Model {
///     blocks: Vec<Block>,
///     /// A plain Burn layer, of which every rank of the group has the same copy.
///     #[sharded(replicated = group)]
///     scale: nn::LayerNorm,
///     #[module(skip)]
///     group: Group,
/// }
/// ```
///
/// A plain Burn layer without `replicated` does not compile:
///
/// ```compile_fail,E0277
/// use burn::{module::Module, nn};
/// use megaburn_parallel::Sharded;
///
/// #[derive(Module, Sharded, Debug)]
/// struct Model {
///     scale: nn::LayerNorm,
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say which part of its parameters a rank holds",
    label = "not `Sharded`",
    note = "derive it for a module of parallel layers: `#[derive(Module, Sharded, Debug)]`",
    note = "mark a field of a plain Burn layer `#[sharded(replicated = group)]`, where `group: Group` is a field \
        with `#[module(skip)]`"
)]
pub trait Sharded {
    /// Adds every parameter to the plan.
    fn shards(&self, plan: &mut PlanBuilder);

    /// Splits the layers of a module that was built for one rank; see
    /// [`parallelize`](crate::parallelize). A layer that is built with a group refuses.
    fn parallelize(&mut self, layers: &mut Layers<'_>) {
        layers.refuse::<Self>();
    }
}

/// `None` is a part that another pipeline stage holds; it adds nothing to the plan.
impl<M: Sharded> Sharded for Option<M> {
    fn shards(&self, plan: &mut PlanBuilder) {
        if let Some(module) = self {
            module.shards(plan);
        }
    }

    fn parallelize(&mut self, layers: &mut Layers<'_>) {
        if let Some(module) = self {
            module.parallelize(layers);
        }
    }
}

/// Each module is added under its number.
impl<M: Sharded> Sharded for Vec<M> {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.numbered(self);
    }

    fn parallelize(&mut self, layers: &mut Layers<'_>) {
        for (index, module) in self.iter_mut().enumerate() {
            layers.child(&index.to_string(), module);
        }
    }
}

/// Each module is added under its number.
impl<M: Sharded, const N: usize> Sharded for [M; N] {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.numbered(self);
    }

    fn parallelize(&mut self, layers: &mut Layers<'_>) {
        for (index, module) in self.iter_mut().enumerate() {
            layers.child(&index.to_string(), module);
        }
    }
}

/// A constant, which is not a parameter.
impl<const D: usize, K: Basic> Sharded for Tensor<D, K> {
    fn shards(&self, _: &mut PlanBuilder) {}

    fn parallelize(&mut self, _: &mut Layers<'_>) {}
}

/// Implements the trait for modules of Burn without parameters.
macro_rules! without_parameters {
    ($($module:ty),*) => {$(
        impl Sharded for $module {
            fn shards(&self, _: &mut PlanBuilder) {}

            fn parallelize(&mut self, _: &mut Layers<'_>) {}
        }
    )*};
}

without_parameters!(
    bool, usize, u64, u32, u16, u8, isize, i64, i32, i16, i8, f64, f32, String
);
without_parameters!(nn::Gelu, nn::Relu, nn::Sigmoid, nn::Tanh);

impl Sharded for nn::Dropout {
    fn shards(&self, _: &mut PlanBuilder) {}

    fn parallelize(&mut self, layers: &mut Layers<'_>) {
        layers.plain_dropout(self.prob);
    }
}

/// Collects a [`ShardPlan`] while walking down a model.
#[derive(Debug, Default)]
pub struct PlanBuilder {
    path: Vec<String>,
    params: Vec<(String, ParamSpec)>,
    main_grads: BTreeMap<String, MainGrad>,
    vector_grads: BTreeMap<String, MainGrad>,
    quantized: BTreeMap<String, QuantizedLayer>,
    /// For each layer with a name, the name that keyed its draw, and the layer's path.
    names: Vec<(String, String)>,
    /// The matrices that may have low-rank adapters, with the group that splits or copies them.
    adaptable: Vec<(String, Group)>,
    /// The group of the module's layers.
    group: Option<Group>,
    /// Parameters of which all members of that group have copies, with their shapes.
    copies: Vec<(String, Vec<usize>)>,
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

    /// Adds the low-rank factors of the weight in field `field`, if there are any. Without them, they
    /// may be attached.
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
    fn numbered<M: Sharded>(&mut self, modules: &[M]) {
        for (index, module) in modules.iter().enumerate() {
            self.child(&index.to_string(), module);
        }
    }

    /// Adds a plain Burn module in field `field` that is replicated on every member of `group`.
    pub fn replicated<M: Module>(&mut self, field: &str, module: &M, group: &Group) {
        let prefix = self.join(field);
        for (path, shape) in shapes(module) {
            let shard = ShardSpec::whole(&shape, Axis::Tp, group.rank(), group.size());
            let path = format!("{prefix}.{path}");
            if shape.len() == 2 {
                self.adaptable.push((path.clone(), group.clone()));
            }
            self.params.push((path, ParamSpec { shard }));
        }
    }

    /// Adds a plain Burn module in field `field` that is replicated on every member of the group that
    /// splits the other layers of the module.
    pub fn replicated_in_module<M: Module>(&mut self, field: &str, module: &M) {
        let prefix = self.join(field);
        let of_module = shapes(module).into_iter();
        self.copies
            .extend(of_module.map(|(path, shape)| (format!("{prefix}.{path}"), shape)));
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
    fn add_copies(&mut self) {
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

    fn join(&self, field: &str) -> String {
        let prefix = self.path.iter().map(|part| format!("{part}."));
        format!("{}{field}", prefix.collect::<String>())
    }
}

/// The plan of a full model, checked against its parameters.
///
/// # Errors
/// See [`check_plan`]; also two parameters with the same path, or two layers with the same name.
pub fn shard_plan<M: Module + Sharded>(model: &M) -> Result<ShardPlan, ParallelError> {
    let mut builder = PlanBuilder::default();
    model.shards(&mut builder);
    builder.add_copies();
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

/// The main gradients of a model's linear layers and embeddings, by parameter path, for an
/// optimizer to attach to. All other parameters get ordinary gradients.
pub fn main_grads<M: Sharded>(model: &M) -> BTreeMap<String, MainGrad> {
    let mut builder = PlanBuilder::default();
    model.shards(&mut builder);
    builder.main_grads
}

/// The main gradients of small parameters: biases, norms and position vectors. Their values always
/// stay in the layer, and their gradients are complete only when backward has finished.
pub fn vector_grads<M: Sharded>(model: &M) -> BTreeMap<String, MainGrad> {
    let mut builder = PlanBuilder::default();
    model.shards(&mut builder);
    builder.vector_grads
}

/// The precision of the linear layers of a model that may be quantised, by the path of the layer.
pub fn quantized_layers<M: Sharded>(model: &M) -> BTreeMap<String, QuantizedLayer> {
    let mut builder = PlanBuilder::default();
    model.shards(&mut builder);
    builder.quantized
}

/// Refuses a plan that misses a parameter, names one that does not exist, or gives one another
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
                    "`{path}` is {shape:?} in the module, but {planned:?} in the plan"
                ));
            }
            None if path.contains(".lora.") => {
                return refuse(format!(
                    "`{path}` is a factor of Burn's `apply_lora`, which does not know shards; use \
                    `ShardedLora`"
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
