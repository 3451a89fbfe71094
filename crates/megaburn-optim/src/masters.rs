use std::convert::Infallible;

use burn::{
    Tensor,
    module::{Module, ModuleMapper, Param},
    tensor::{DType, FloatDType, TensorData},
};

use crate::{
    Optimizer,
    leaf::{Leaf, wide},
    offload::{HostSlot, Key},
    visit::Path,
};

impl Optimizer {
    /// The module with its float parameters in `dtype`.
    ///
    /// Where that is narrower than f32 (and than the optimizer's `main_params`), what a trainable parameter
    /// is now stays here in f32: its master. [`Optimizer::step`] updates masters, and a parameter is its
    /// master rounded to nearest. So call it with the f32 values that a run starts from, and again whenever
    /// others are put into the module. A parameter that is in `dtype` already stays as it is, and so does
    /// its master.
    ///
    /// Of masters a rank keeps what its [`Sharding`](crate::Sharding) says, and so of parameters: one that
    /// is [shared out](crate::ShardingLevel::Parameters) leaves its shape and one NaN, and stays so when it
    /// is cast again.
    ///
    /// One after the other: of parameters that were not drawn yet no more than one is there in f32.
    pub fn cast_params<M: Module>(&mut self, module: M, dtype: FloatDType) -> M {
        match self.cast(module, dtype, |_, _| Ok::<_, Infallible>(None)) {
            Ok(module) => module,
            Err(never) => match never {},
        }
    }

    /// The same with other values: what `read` gives for a path and local shape. One that was not drawn
    /// yet is not drawn, and no more than one is there in f32.
    ///
    /// # Errors
    /// The first error of `read`; the module is lost then.
    ///
    /// # Panics
    /// If it gives data of another shape.
    pub fn load_params<M: Module, E>(
        &mut self,
        module: M,
        dtype: FloatDType,
        mut read: impl FnMut(&str, &[usize]) -> Result<TensorData, E>,
    ) -> Result<M, E> {
        self.cast(module, dtype, |path, shape| read(path, shape).map(Some))
    }

    fn cast<M: Module, E>(
        &mut self,
        module: M,
        dtype: FloatDType,
        read: impl FnMut(&str, &[usize]) -> Result<Option<TensorData>, E>,
    ) -> Result<M, E> {
        self.choose_in(&module);
        let path = Path::default();
        let dtype = dtype.into();
        let mut cast = Cast {
            path,
            dtype,
            optimizer: self,
            read,
            error: None,
        };
        let module = module.map(&mut cast);
        let error = cast.error;
        self.state.land();
        error.map_or(Ok(module), Err)
    }

    /// What this rank keeps of the f32 master of the parameter at `path`; none if the parameter itself is
    /// updated, or frozen.
    ///
    /// # Shapes
    /// `[local elements]`: the local parameter, row-major, padding included; less where the optimizer's
    /// state is shared out.
    pub fn master(&self, path: &str) -> Option<Tensor<1>> {
        self.state.get(&Key::master(path)).map(HostSlot::tensor)
    }

    /// Whether a parameter of this type is the rounding of an f32 master.
    pub(crate) fn has_master(&self, dtype: DType) -> bool {
        matches!(dtype, DType::BF16 | DType::F16) && dtype != self.rule.main_params().into()
    }
}

struct Cast<'a, F, E> {
    path: Path,
    dtype: DType,
    optimizer: &'a mut Optimizer,
    read: F,
    error: Option<E>,
}

impl<F, E> Cast<'_, F, E> {
    fn cast<const D: usize>(&mut self, path: String, tensor: Tensor<D>, is_new: bool) -> Tensor<D> {
        let Self {
            dtype, optimizer, ..
        } = self;
        let dtype = &if optimizer.f32_params.contains(&path) {
            DType::F32
        } else {
            *dtype
        };
        let sharding = optimizer.sharding.clone();
        let is_sharded = sharding.is_param_sharded(&path);
        let is_there = match is_sharded {
            false => tensor.dtype() == *dtype,
            // Nothing but NaN is what stands for values that are shared out.
            true => !is_new && sharding.part(&path).is_some() && is_nan(&tensor),
        };
        if is_there {
            return tensor;
        }
        let leaf = Leaf::of(&tensor).of_type(*dtype);
        let value = wide(tensor);
        optimizer.state.remove(&Key::master(&path));
        if leaf.requires_grad && optimizer.has_master(*dtype) {
            optimizer
                .state
                .put(Key::master(&path), sharding.cut(&path, value.clone()));
        }
        if is_sharded {
            let device = value.device();
            sharding.give(&path, sharding.cut(&path, value).cast(*dtype));
            return leaf.without_values(&device);
        }
        leaf.with(value)
    }
}

fn is_nan<const D: usize>(tensor: &Tensor<D>) -> bool {
    tensor.clone().inner().is_nan().all().into_scalar()
}

impl<F, E> ModuleMapper for Cast<'_, F, E>
where
    F: FnMut(&str, &[usize]) -> Result<Option<TensorData>, E>,
{
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let path = self.path.text();
        let shape = param.lazy_shape();
        let (param, is_new) = match (self.read)(&path, &shape) {
            Ok(None) => (param, false),
            Ok(Some(data)) => {
                assert_eq!(data.shape(), &shape, "the new value of `{path}`");
                let id = param.id;
                let dtype = data.dtype();
                let value = Tensor::from_data(data, (&param.lazy_device(), dtype));
                (param.transform_for_load(value, id), true)
            }
            Err(error) => {
                self.error = Some(error);
                return param;
            }
        };
        param.map(|tensor| self.cast(path, tensor, is_new))
    }
}

#[cfg(test)]
mod tests;
