//! LoRA and quantisation of shards in bf16.

use burn::{
    module::{Module, ModuleMapper, Param},
    nn,
    prelude::Device,
    tensor::{
        DType, FloatDType, Tensor, TensorData,
        activation::gelu,
        quantization::{Calibration, QuantValue},
    },
};
use megaburn_collective::{Group, GroupOptions, run_threads};
use megaburn_parallel::{
    ParallelError, ParallelLinear, ParallelLinearConfig, Sharded, ShardedAdapter, ShardedLora,
    ShardedQuantizer,
};
use rstest::rstest;

#[derive(Module, Sharded, Debug)]
struct Net {
    up: ParallelLinear,
    down: ParallelLinear,
}

/// Casts parameters to bf16.
struct ToBf16;

impl ModuleMapper for ToBf16 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| Tensor::from_inner(value.inner().cast(FloatDType::BF16)).require_grad())
    }
}

/// Sets the factors of LoRA, whose second one is zero at first.
struct Filled;

impl ModuleMapper for Filled {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        param.map(|value| Tensor::from_inner(value.inner().sin() + 0.1).require_grad())
    }
}

impl Net {
    fn new(group: &Group) -> Result<Self, ParallelError> {
        let device = Device::flex().autodiff();
        let normal = nn::Initializer::Normal {
            mean: 0.0,
            std: 0.5,
        };
        let up = ParallelLinearConfig::column(6, 8).with_initializer(normal.clone());
        let down = ParallelLinearConfig::row(8, 6).with_initializer(normal);
        let net = Self {
            up: up.with_name("up").init(group, &device)?,
            down: down.with_name("down").init(group, &device)?,
        };
        Ok(net.map(&mut ToBf16))
    }

    /// The output, and the gradient of the input.
    fn outputs(&self) -> [TensorData; 2] {
        let x = Tensor::<1, burn::tensor::Int>::arange(0..18, &Device::flex()).float();
        let x = x.sin().reshape([3, 6]).cast(FloatDType::BF16);
        let x = Tensor::<2>::from_inner(x).require_grad();
        let y = self.down.forward(gelu(self.up.forward(x.clone())));
        let grads = y.clone().square().sum().backward();
        [y.into_data(), x.grad(&grads).unwrap().into_data()]
    }
}

/// The largest difference from one rank's values, relative to the largest of these.
fn distance(found: &TensorData, expected: &TensorData) -> f32 {
    assert_eq!(
        (found.dtype(), expected.dtype()),
        (DType::BF16, DType::BF16)
    );
    let pairs = found.iter::<f32>().zip(expected.iter::<f32>());
    let largest = expected.iter::<f32>().map(f32::abs).max_by(f32::total_cmp);
    let differences = pairs.map(|(found, expected)| (found - expected).abs());
    differences.max_by(f32::total_cmp).unwrap() / largest.unwrap()
}

fn on_ranks<T: Send>(
    ranks: usize,
    body: impl Fn(Group) -> Result<T, ParallelError> + Sync,
) -> Vec<T> {
    let found = run_threads(ranks, GroupOptions::default(), body);
    found.into_iter().map(Result::unwrap).collect()
}

#[rstest]
#[case::adapted(true, false)]
#[case::quantised(false, true)]
#[case::both(true, true)]
fn shards_in_bf16_are_adapted_and_quantised_as_on_one_rank(
    #[case] is_adapted: bool,
    #[case] is_quantised: bool,
) {
    let outputs = |group: Group| {
        let mut net = Net::new(&group)?;
        let plain = net.outputs();
        if is_quantised {
            let scheme = Device::flex().settings().quantization.scheme;
            let scheme = scheme.with_value(QuantValue::Q8S);
            net = ShardedQuantizer::new(Calibration::MinMax, scheme).apply(net, &group)?;
        }
        if is_adapted {
            net = ShardedLora::new(2, 3.0).apply(net)?.map(&mut Filled);
            let adapter = net.up.weight.reparameterization::<ShardedAdapter>();
            // The factors of a quantised weight are f32.
            let dtype = adapter.unwrap().a.val().dtype();
            assert_eq!(dtype == DType::BF16, !is_quantised);
        }
        Ok((net.outputs(), plain))
    };
    let (expected, plain) = on_ranks(1, outputs).remove(0);
    assert!(distance(&plain[0], &expected[0]) > 1e-3, "nothing changed");
    for ranks in [2, 4] {
        for (found, _) in on_ranks(ranks, outputs) {
            for (found, expected) in found.iter().zip(&expected) {
                // Partial sums of ranks are rounded to bf16, whose unit is 1/256.
                let distance = distance(found, expected);
                assert!(distance < 0.02, "{ranks} ranks: {distance}");
            }
        }
    }
}
