//! The parameters of a module that a file or record has tensors for.

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{Bool, DType, Int, Tensor},
};
use megaburn_mesh::{ShardPlan, ShardSpec};
use megaburn_parallel::is_transposed_in_files;

use crate::layout::{Layout, Place};

/// The kind of a parameter's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Float,
    Int,
    Bool,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Float => "floats",
            Self::Int => "integers",
            Self::Bool => "bools",
        }
    }

    /// Whether a tensor of a source may become such a parameter. Stores without a type for bools
    /// keep them as integers.
    pub(crate) fn accepts(self, dtype: DType) -> bool {
        match self {
            Self::Float => dtype.is_float(),
            Self::Int => dtype.is_int() || dtype.is_uint(),
            Self::Bool => dtype.is_bool() || matches!(dtype, DType::U8 | DType::U32),
        }
    }
}

/// A parameter, and the tensor of a source that it is read from.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) path: String,
    /// The name of its tensor.
    pub(crate) name: String,
    pub(crate) kind: Kind,
    /// The full tensor's shape in the source.
    pub(crate) shape: Vec<usize>,
    /// The part that this rank holds; `None` means all of it.
    pub(crate) spec: Option<ShardSpec>,
    /// Whether the tensor is transposed before Burn's own mapping of the parameter sees it.
    pub(crate) is_transposed: bool,
}

/// The parameters of a module in its order.
pub(crate) fn targets<M: Module>(module: &M, plan: &ShardPlan, layout: Layout) -> Vec<Target> {
    let mut visitor = Targets {
        place: Place::default(),
        plan,
        layout,
        found: Vec::new(),
    };
    module.visit(&mut visitor);
    visitor.found
}

struct Targets<'a> {
    place: Place,
    plan: &'a ShardPlan,
    layout: Layout,
    found: Vec<Target>,
}

impl Targets<'_> {
    /// Adds a parameter, which Burn's own mapping transposes if `is_mapped`.
    fn add(&mut self, kind: Kind, local: &[usize], is_mapped: bool) {
        let path = self.place.path();
        let spec = self.plan.get(&path).map(|spec| spec.shard.clone());
        let spec = spec.filter(|_| kind == Kind::Float);
        let mut shape = spec
            .as_ref()
            .map_or(local.to_vec(), |spec| spec.global_shape.clone());
        let is_transposed = self.layout.transposes(&self.place, shape.len());
        if is_transposed || is_mapped {
            shape.reverse();
        }
        self.found.push(Target {
            name: self.layout.tensor_name(&self.place),
            spec: spec.filter(|spec| spec.local_shape() != spec.global_shape),
            path,
            kind,
            shape,
            is_transposed: is_transposed && !is_mapped,
        });
    }
}

impl ModuleVisitor for Targets<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.place.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let is_mapped = is_transposed_in_files(param);
        self.add(Kind::Float, &param.lazy_shape(), is_mapped);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(Kind::Int, &param.lazy_shape(), false);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(Kind::Bool, &param.lazy_shape(), false);
    }
}
