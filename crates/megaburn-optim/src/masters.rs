use std::{convert::Infallible, ops::Range};

use burn::{
    Tensor,
    module::{Module, ModuleMapper, Param},
    tensor::{DType, FloatDType, TensorData},
};

use megaburn_kernels::{joined_master, master_remainder};

use crate::{
    leaf::{Leaf, wide},
    moment::Moment,
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
        match self.cast(module, dtype, |_, _, _| Ok::<_, Infallible>(NewValue::None)) {
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
        self.cast(module, dtype, |path, shape, _| {
            read(path, shape).map(NewValue::Whole)
        })
    }

    /// Like [`load_params`](Self::load_params), with only the values that this rank needs: `read`
    /// gets a path and a range of the flattened local parameter. For a [sharded
    /// parameter](crate::ShardingLevel::Parameters), that is the range that this rank keeps, and for
    /// others the full parameter.
    ///
    /// # Errors
    /// The first error of `read`; the module is lost then.
    ///
    /// # Panics
    /// If `read` returns data of another size.
    pub fn restore_params<M: Module, E>(
        &mut self,
        module: M,
        dtype: FloatDType,
        mut read: impl FnMut(&str, Range<usize>) -> Result<TensorData, E>,
    ) -> Result<M, E> {
        self.cast(module, dtype, |path, shape, kept| match kept {
            Some(kept) if kept.is_empty() => Ok(NewValue::Kept(None)),
            Some(kept) => Ok(NewValue::Kept(Some(read(path, kept)?))),
            None => {
                let data = read(path, 0..shape.iter().product())?;
                let dtype = data.dtype();
                let data = TensorData::from_bytes(data.into_bytes(), shape.to_vec(), dtype);
                Ok(NewValue::Whole(data))
            }
        })
    }

    fn cast<M: Module, E>(
        &mut self,
        module: M,
        dtype: FloatDType,
        read: impl FnMut(&str, &[usize], Option<Range<usize>>) -> Result<NewValue, E>,
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

    /// Stores the f32 masters of bf16 parameters as the 16 bits that the parameters lack of them:
    /// two bytes per element instead of four, and the same numbers
    /// ([`master_remainder`](megaburn_kernels::master_remainder) names the one exception). Parameters
    /// of another type, or without masters, are not affected. Call it before the first step and
    /// before [`Optimizer::cast_params`].
    ///
    /// Source: Megatron-LM `OptimizerConfig.store_param_remainders`.
    #[must_use]
    pub fn with_param_remainders(mut self, has_remainders: bool) -> Self {
        self.has_remainders = has_remainders;
        self
    }

    /// The part of the f32 master of the parameter at `path` that this rank keeps, or `None` if the
    /// parameter has no master or is frozen. `param` returns the same part of the parameter; it is
    /// called only if the master is stored as a remainder.
    ///
    /// # Shapes
    /// `[local elements]`: the local parameter, row-major, padding included; fewer elements where
    /// the optimizer's state is sharded.
    pub fn master(&self, path: &str, param: impl FnOnce() -> Tensor<1>) -> Option<Tensor<1>> {
        let slot = self.state.get(&Key::master(path))?;
        Some(match is_remainder(slot) {
            true => joined_master(param(), slot.tensor()),
            false => slot.tensor(),
        })
    }

    /// Takes the part of a master that this rank keeps; `param` is the same part of the parameter.
    pub(crate) fn take_master(&mut self, path: &str, param: &Tensor<1>) -> Option<Tensor<1>> {
        let slot = self.state.get(&Key::master(path))?;
        match is_remainder(slot) {
            true => Some(self.take_joined_master(path, param.clone())),
            false => self.state.take(&Key::master(path)),
        }
    }

    /// The master of a parameter and its stored remainder, or of a parameter that has none yet.
    pub(crate) fn take_joined_master(&mut self, path: &str, param: Tensor<1>) -> Tensor<1> {
        match self.state.take(&Key::master(path)) {
            Some(remainder) => joined_master(param, remainder),
            None => param.cast(DType::F32),
        }
    }

    /// Stores the master of a parameter of type `dtype`.
    pub(crate) fn put_master(&mut self, path: &str, master: Tensor<1>, dtype: DType) {
        let kept = match self.keeps_remainder(dtype) {
            true => master_remainder(master.clone(), master.cast(dtype)),
            false => master,
        };
        self.state.put(Key::master(path), kept);
    }

    /// Whether the masters of parameters of type `dtype` are stored as remainders.
    pub(crate) fn keeps_remainder(&self, dtype: DType) -> bool {
        self.has_remainders && dtype == DType::BF16 && self.has_master(dtype)
    }

    /// Whether any state is stored as bits from which an update makes f32 tensors.
    pub(crate) fn keeps_bits(&self) -> bool {
        let has_code = |moment| self.rule.moment_dtype(moment).code(moment).is_some();
        self.has_remainders || Moment::ALL.into_iter().any(has_code)
    }

    /// Whether a parameter of type `dtype` is the rounding of an f32 master.
    pub(crate) fn has_master(&self, dtype: DType) -> bool {
        matches!(dtype, DType::BF16 | DType::F16) && dtype != self.rule.main_params().into()
    }
}

/// Whether a stored master is a remainder; other masters are f32.
pub(crate) fn is_remainder(master: &HostSlot) -> bool {
    master.dtype() != DType::F32
}

/// The new value of a parameter.
enum NewValue {
    /// The parameter keeps its value.
    None,
    /// The local parameter.
    Whole(TensorData),
    /// The range of a sharded parameter that this rank keeps, unless that is empty.
    Kept(Option<TensorData>),
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
        let dtype = &self.dtype_of(&path);
        let optimizer = &mut *self.optimizer;
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
        sharding.forget_fp8(&path);
        let leaf = Leaf::of(&tensor).of_type(*dtype);
        let value = wide(tensor);
        optimizer.state.remove(&Key::master(&path));
        if leaf.requires_grad && optimizer.has_master(*dtype) {
            optimizer.put_master(&path, sharding.cut(&path, value.clone()), *dtype);
        }
        if is_sharded {
            let device = value.device();
            sharding.give(&path, sharding.cut(&path, value).cast(*dtype));
            return leaf.without_values(&device);
        }
        leaf.with(value)
    }
}

impl<F, E> Cast<'_, F, E> {
    /// The new type of a parameter.
    fn dtype_of(&self, path: &str) -> DType {
        if self.optimizer.f32_params.contains(path) {
            DType::F32
        } else {
            self.dtype
        }
    }

    /// Stores the values that this rank keeps of a sharded parameter, none if it keeps none. In the
    /// module it gets a placeholder; a lazy parameter is not initialized.
    fn keep<const D: usize>(
        &mut self,
        path: String,
        param: Param<Tensor<D>>,
        data: Option<TensorData>,
    ) -> Param<Tensor<D>> {
        let device = param.lazy_device();
        let shape: [usize; D] = param.lazy_shape().dims();
        let nan = Tensor::<D>::full([1; D], f32::NAN, &device).expand(shape);
        let id = param.id;
        param.transform_for_load(nan, id).map(|placeholder| {
            let dtype = self.dtype_of(&path);
            let optimizer = &mut *self.optimizer;
            let leaf = Leaf::of(&placeholder).of_type(dtype);
            let device = placeholder.device().inner();
            let value = match data {
                Some(data) => {
                    let len = data.num_elements();
                    let stored = data.dtype();
                    let data = TensorData::from_bytes(data.into_bytes(), [len], stored);
                    Tensor::<1>::from_data(data, (&device, stored)).cast(DType::F32)
                }
                None => Tensor::empty([0], (&device, DType::F32)),
            };
            optimizer.state.remove(&Key::master(&path));
            if leaf.requires_grad && optimizer.has_master(dtype) {
                optimizer.put_master(&path, value.clone(), dtype);
            }
            optimizer.sharding.forget_fp8(&path);
            optimizer.sharding.give(&path, value.cast(dtype));
            leaf.without_values(&device)
        })
    }
}

fn is_nan<const D: usize>(tensor: &Tensor<D>) -> bool {
    tensor.clone().inner().is_nan().all().into_scalar()
}

impl<F, E> ModuleMapper for Cast<'_, F, E>
where
    F: FnMut(&str, &[usize], Option<Range<usize>>) -> Result<NewValue, E>,
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
        let sharding = &self.optimizer.sharding;
        let is_sharded = sharding.is_param_sharded(&path);
        let kept = is_sharded.then(|| sharding.kept(&path, shape.num_elements()));
        let (param, is_new) = match (self.read)(&path, &shape, kept) {
            Ok(NewValue::None) => (param, false),
            Ok(NewValue::Kept(data)) => return self.keep(path, param, data),
            Ok(NewValue::Whole(data)) => {
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
