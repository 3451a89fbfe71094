use std::convert::Infallible;

use burn::{
    Tensor,
    module::{Module, ModuleMapper, Param},
    tensor::{DType, FloatDType, TensorData},
};

use crate::{
    leaf::{Leaf, wide},
    offload::{HostSlot, Key},
    optimizer::Optimizer,
    visit::Path,
};

impl Optimizer {
    /// Casts the float parameters of the module to `dtype`.
    ///
    /// If `dtype` is narrower than f32 (and is not the optimizer's `main_params`), the current
    /// value of each trainable parameter is kept in f32 as its master. [`Optimizer::step`] updates
    /// masters, and a parameter is its master rounded to nearest. So call this with the f32 values
    /// that a run starts from, and whenever new values are put into the module. A
    /// parameter that already has type `dtype` stays as it is, and so does its master.
    ///
    /// A rank keeps the part of each master that its [`Sharding`](crate::Sharding) assigns to it.
    /// With [`ShardingLevel::Parameters`](crate::ShardingLevel::Parameters), the same holds for
    /// parameters: a sharded one is represented in the module by its shape and a NaN placeholder,
    /// and stays so when it is cast a second time.
    ///
    /// Parameters are cast one after the other: of those that are still lazy, at most one exists in
    /// f32 at a time.
    pub fn cast_params<M: Module>(&mut self, module: M, dtype: FloatDType) -> M {
        match self.cast(module, dtype, |_, _| Ok::<_, Infallible>(None)) {
            Ok(module) => module,
            Err(never) => match never {},
        }
    }

    /// Like [`cast_params`](Self::cast_params), with new values: `read` gets a path and local shape
    /// and returns the data. Lazy parameters are not initialized first, and at most one exists in
    /// f32 at a time.
    ///
    /// # Errors
    /// The first error of `read`; the module is lost then.
    ///
    /// # Panics
    /// If `read` returns data of another shape.
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

    /// The part of the f32 master of the parameter at `path` that this rank keeps, or `None` if the
    /// parameter has no master or is frozen.
    ///
    /// # Shapes
    /// `[local elements]`: the local parameter, row-major, padding included; fewer elements where
    /// the optimizer's state is sharded.
    pub fn master(&self, path: &str) -> Option<Tensor<1>> {
        self.state.get(&Key::master(path)).map(HostSlot::tensor)
    }

    /// Whether a parameter of type `dtype` is the rounding of an f32 master.
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
            // A sharded parameter is represented in the module by a NaN placeholder.
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
                assert_eq!(
                    data.shape(),
                    &shape,
                    "the new value of `{path}` has another shape"
                );
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
