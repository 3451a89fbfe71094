//! Takes parameters out of a module and puts them back.

use burn::{
    Tensor,
    module::{Module, ModuleMapper, Param},
    tensor::{DType, Device, GradientCheckpointingStrategy},
};

use crate::visit::Path;

/// The values without autodiff, as one dimension.
pub(crate) fn flat<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    tensor.inner().flatten(0, D - 1)
}

/// The values without autodiff, as one dimension, in f32.
pub(crate) fn wide<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    flat(tensor).cast(DType::F32)
}

/// The properties that a new value needs to replace a parameter: type, shape and autodiff settings.
#[derive(Clone, Debug)]
pub(crate) struct Leaf {
    pub(crate) dtype: DType,
    shape: Vec<usize>,
    strategy: Option<GradientCheckpointingStrategy>,
    pub(crate) requires_grad: bool,
}

impl Leaf {
    pub(crate) fn of<const D: usize>(tensor: &Tensor<D>) -> Self {
        Self {
            dtype: tensor.dtype(),
            shape: tensor.dims().to_vec(),
            strategy: tensor.gradient_checkpointing_strategy(),
            requires_grad: tensor.is_require_grad(),
        }
    }

    pub(crate) fn of_type(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// The parameter of flat `value`, rounded to nearest.
    pub(crate) fn with<const D: usize>(&self, value: Tensor<1>) -> Tensor<D> {
        self.leaf(value.reshape(self.shape()).cast(self.dtype))
    }

    /// A placeholder for values that are elsewhere: a single NaN expanded to the parameter's shape,
    /// so that computing with it by mistake is noticed.
    pub(crate) fn without_values<const D: usize>(&self, device: &Device) -> Tensor<D> {
        let one = Tensor::<D>::full([1; D], f32::NAN, (device, self.dtype));
        self.leaf(one.expand(self.shape::<D>()))
    }

    fn shape<const D: usize>(&self) -> [usize; D] {
        self.shape
            .as_slice()
            .try_into()
            .expect("the shape has this number of dimensions")
    }

    fn leaf<const D: usize>(&self, value: Tensor<D>) -> Tensor<D> {
        match self.strategy {
            None => value,
            Some(strategy) => value
                .autodiff()
                .with_gradient_checkpointing_strategy(strategy)
                .set_require_grad(self.requires_grad),
        }
    }
}

/// Returns the module with the parameters replaced for which `value` returns new flat values. If it
/// also returns a [`Leaf`], the new parameter takes its properties from that.
pub(crate) fn put<M: Module>(
    module: M,
    value: impl FnMut(&str) -> Option<(Option<Leaf>, Tensor<1>)>,
) -> M {
    module.map(&mut Put {
        path: Path::default(),
        value,
    })
}

struct Put<F> {
    path: Path,
    value: F,
}

impl<F: FnMut(&str) -> Option<(Option<Leaf>, Tensor<1>)>> ModuleMapper for Put<F> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match (self.value)(&self.path.text()) {
            Some((leaf, value)) => {
                param.map(|old| leaf.unwrap_or_else(|| Leaf::of(&old)).with(value))
            }
            None => param,
        }
    }
}
