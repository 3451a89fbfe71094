use std::convert::Infallible;

use burn::{
    Tensor,
    module::{Module, ModuleMapper, Param},
    tensor::{DType, FloatDType, TensorData},
};

use crate::{
    Optimizer,
    leaf::{Leaf, wide},
    visit::Path,
};

impl Optimizer {
    /// The module with its float parameters in `dtype`.
    ///
    /// Where that is narrower than f32 (and than the optimizer's `main_params`), what
    /// a trainable parameter is now stays here in f32: its master. [`Optimizer::step`] updates masters,
    /// and a parameter is its master rounded to nearest. So call it with the f32 values that a run
    /// starts from, and again whenever others are put into the module. A parameter that is in `dtype`
    /// already stays as it is, and so does its master. Of masters a rank keeps what its
    /// [`Sharding`](crate::Sharding) says, and so of parameters: one that is [shared
    /// out](crate::ShardingLevel::Parameters) leaves its shape, and a value that is NaN. Such a one
    /// stays as it is too.
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
        let (path, dtype) = (Path::default(), dtype.into());
        let mut cast = Cast { path, dtype, optimizer: self, read, error: None };
        let module = module.map(&mut cast);
        cast.error.map_or(Ok(module), Err)
    }

    /// What this rank keeps of the f32 master of the parameter at `path`; none if the parameter itself is
    /// updated, or frozen.
    ///
    /// # Shapes
    /// `[local elements]`: the local parameter, row-major, padding included; less where the optimizer's
    /// state is shared out.
    pub fn master(&self, path: &str) -> Option<Tensor<1>> {
        self.masters.get(path).cloned()
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
        let Self { dtype, optimizer, .. } = self;
        let sharding = optimizer.sharding.clone();
        let is_shared = sharding.shares_out(&path);
        let is_there = match is_shared {
            false => tensor.dtype() == *dtype,
            // Nothing but NaN is what stands for values that are shared out.
            true => !is_new && sharding.part(&path).is_some() && is_nan(&tensor),
        };
        if is_there {
            return tensor;
        }
        let leaf = Leaf::of(&tensor).as_type(*dtype);
        let value = wide(tensor);
        optimizer.masters.remove(&path);
        if leaf.requires_grad && optimizer.has_master(*dtype) {
            optimizer.masters.insert(path.clone(), sharding.cut(&path, value.clone()));
        }
        if is_shared {
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
        let (path, shape) = (self.path.text(), param.lazy_shape());
        let (param, is_new) = match (self.read)(&path, &shape) {
            Ok(None) => (param, false),
            Ok(Some(data)) => {
                assert_eq!(data.shape(), &shape, "the new value of `{path}`");
                let (id, dtype) = (param.id, data.dtype());
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
mod tests {
    use burn::tensor::Device;
    use rstest::rstest;

    use super::*;
    use crate::{
        AdamWConfig, GradientAccumulator, Sharding,
        testing::{Net, plan_of, values},
    };

    fn f32_values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        values(tensor.cast(DType::F32))
    }

    /// A net in `dtype`, its optimizer, and its values before.
    fn cast_net(dtype: FloatDType) -> (Net, Optimizer, [Vec<f32>; 2]) {
        let net = Net::new(3, 4, 0, 1, &Device::default().autodiff());
        let before = [values(net.matrix.val()), values(net.bias.val())];
        let mut optimizer =
            AdamWConfig::new().with_weight_decay(0.0).init(&Sharding::none()).unwrap();
        let net = optimizer.cast_params(net, dtype);
        (net, optimizer, before)
    }

    /// One step down the gradient of `sum(matrix)`, which is 1.
    fn step(net: Net, optimizer: &mut Optimizer, grads: &mut GradientAccumulator, lr: f64) -> Net {
        grads.reset();
        grads.accumulate(&net, &mut net.matrix.val().sum().backward());
        optimizer.step(lr, net, grads).unwrap()
    }

    fn rounded(values: &[f32], dtype: FloatDType) -> Vec<f32> {
        f32_values(Tensor::<1>::from_floats(values, &Device::default()).cast(dtype))
    }

    #[rstest]
    #[case(FloatDType::BF16)]
    #[case(FloatDType::F16)]
    fn a_narrow_parameter_is_its_master_rounded_from_the_start(#[case] dtype: FloatDType) {
        let (net, optimizer, [matrix, bias]) = cast_net(dtype);
        assert_eq!(net.matrix.val().dtype(), dtype.into());
        assert!(net.matrix.val().is_require_grad() && net.matrix.val().is_autodiff());
        assert_eq!(values(optimizer.master("matrix").unwrap()), matrix);
        assert_eq!(values(optimizer.master("bias").unwrap()), bias);
        assert_eq!(f32_values(net.matrix.val()), rounded(&matrix, dtype));
        assert_ne!(f32_values(net.matrix.val()), matrix);
    }

    /// Adam moves each element by the learning rate where gradients are constant: 1e-4 a step is
    /// less than half of the distance between two bf16 (or f16) numbers below 1.
    #[rstest]
    #[case(FloatDType::BF16)]
    #[case(FloatDType::F16)]
    fn small_steps_move_the_master_and_in_the_end_the_parameter(#[case] dtype: FloatDType) {
        let mut net = Net::new(3, 4, 0, 1, &Device::default().autodiff());
        net.matrix = net.matrix.map(|t| t.inner().ones_like().autodiff().require_grad());
        let mut optimizer =
            AdamWConfig::new().with_weight_decay(0.0).init(&Sharding::none()).unwrap();
        net = optimizer.cast_params(net, dtype);
        let mut grads =
            GradientAccumulator::new(&net, &plan_of(3, 4, 0, 1), &Sharding::none()).unwrap();
        for taken in 1..=100 {
            net = step(net, &mut optimizer, &mut grads, 1e-4);
            let (master, matrix) = (values(optimizer.master("matrix").unwrap()), &net.matrix);
            let expected = 1.0 - 1e-4 * taken as f32;
            assert!(master.iter().all(|x| (x - expected).abs() < 1e-5), "{taken}: {master:?}");
            assert_eq!(f32_values(matrix.val()), rounded(&master, dtype));
            assert_eq!(f32_values(matrix.val()) == [1.0; 12], expected > 1.0 - half_step(dtype));
        }
    }

    /// Half of the distance from 1 to the number below.
    fn half_step(dtype: FloatDType) -> f32 {
        if dtype == FloatDType::BF16 { 2f32.powi(-9) } else { 2f32.powi(-12) }
    }

    #[test]
    fn masters_of_narrow_parameters_are_updated_as_f32_parameters_are() {
        let (mut narrow, mut with_masters, [matrix, bias]) = cast_net(FloatDType::BF16);
        let device = Device::default().autodiff();
        let mut plain = Net::new(3, 4, 0, 1, &device);
        let set = |values: &[f32]| Tensor::<1>::from_floats(values, &device).require_grad();
        plain.matrix =
            plain.matrix.map(|_| set(&matrix).inner().reshape([3, 4]).autodiff().require_grad());
        plain.bias = plain.bias.map(|_| set(&bias));
        let mut without =
            AdamWConfig::new().with_weight_decay(0.0).init(&Sharding::none()).unwrap();
        let plan = plan_of(3, 4, 0, 1);
        let mut grads = GradientAccumulator::new(&plain, &plan, &Sharding::none()).unwrap();
        for _ in 0..5 {
            // The gradient is the same for both: it does not depend on the values.
            plain = step(plain, &mut without, &mut grads, 1e-2);
            narrow = with_masters.step(1e-2, narrow, &grads).unwrap();
        }
        assert_eq!(values(with_masters.master("matrix").unwrap()), values(plain.matrix.val()));
        assert_eq!(
            f32_values(narrow.matrix.val()),
            rounded(&values(plain.matrix.val()), FloatDType::BF16)
        );
        assert!(without.masters.is_empty(), "an f32 parameter is its own master");
    }

    #[test]
    fn only_trainable_narrow_parameters_have_masters_and_casting_again_changes_nothing() {
        let mut net = Net::new(3, 4, 0, 1, &Device::default().autodiff());
        net.bias = net.bias.set_require_grad(false);
        let matrix = values(net.matrix.val());
        let mut optimizer = AdamWConfig::new().init(&Sharding::none()).unwrap();
        net = optimizer.cast_params(net, FloatDType::F32);
        assert!(optimizer.masters.is_empty());
        net = optimizer.cast_params(net, FloatDType::BF16);
        assert!(optimizer.master("bias").is_none() && !net.bias.val().is_require_grad());
        net = optimizer.cast_params(net, FloatDType::BF16);
        assert_eq!(values(optimizer.master("matrix").unwrap()), matrix);
        net = optimizer.cast_params(net, FloatDType::F32);
        assert_eq!(net.matrix.val().dtype(), DType::F32);
        assert!(optimizer.masters.is_empty());
    }
}
