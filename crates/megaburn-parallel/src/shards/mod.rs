//! How a model reports which part of each parameter a rank holds.

mod builder;
mod check;
mod in_files;

use std::collections::BTreeMap;

use burn::{
    module::Module,
    nn,
    tensor::{Tensor, kind::Basic},
};
use megaburn_autograd::MainGrad;
pub use megaburn_derive::Sharded;
use megaburn_mesh::ShardPlan;

pub use builder::PlanBuilder;
pub use check::check_plan;
pub use in_files::is_transposed_in_files;

use crate::{error::ParallelError, linear::QuantizedLayer, parallelize::Layers};

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
/// A replicated module computes the same on every rank, so none may drop elements inside, as Burn's
/// `TransformerEncoderLayer` does by default: no check can see its dropout, and ranks would drop
/// different elements. Nor may it stand between a column and a row, where ranks hold different
/// activations and each would get the gradient of its own only.
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
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.dropout(
            "",
            self.prob,
            "make the field a `ParallelDropout` or, if its input is split between a column and a row, \
            mark it `#[sharded(skip)]`",
        );
    }

    fn parallelize(&mut self, layers: &mut Layers<'_>) {
        layers.plain_dropout(self.prob);
    }
}

/// The plan of a full model, checked against its parameters.
///
/// # Errors
/// See [`check_plan`]; also two parameters with the same path, two layers with the same name, or,
/// where several ranks split layers, a dropout whose masks differ between them: Burn's own, or a
/// [`ReplicatedDropout`](crate::ReplicatedDropout) that [`parallelize`](crate::parallelize) has not
/// seen.
pub fn shard_plan<M: Module + Sharded>(model: &M) -> Result<ShardPlan, ParallelError> {
    let mut builder = PlanBuilder::default();
    model.shards(&mut builder);
    builder.add_copies();
    builder.check_dropouts()?;
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
