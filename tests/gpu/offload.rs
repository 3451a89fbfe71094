//! Optimizer state in pinned host memory, and its transfers to the GPU and back.

use burn::{
    module::{Module, Param},
    prelude::Device,
    tensor::{DType, Distribution, FloatDType, Tensor, TensorData},
};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use megaburn::{
    cuda::{CudaError, CudaQueue, Op, host::HostTensor, memory::MemoryReport},
    mesh::{Axis, ParamSpec, ShardPlan, ShardSpec},
    optim::{AdamWConfig, GradientAccumulator, Sharding},
    parallel::read_params,
    train::{TrainConfig, TrainError, config::Dtype},
};

use crate::{
    Test,
    steps::{OPTIMIZERS, trainer, with_config},
};
use megaburn_kernel_tests::part;

pub(crate) const TESTS: &[Test] = &[
    ("host_memory_gives_back_what_it_took", round_trip),
    ("copies_wait_for_kernels_and_kernels_for_copies", in_order),
    ("a_clone_is_not_written", clones),
    ("what_failed_is_told_by_its_copies", failures),
    ("memory_that_is_not_to_be_had_is_an_error", too_much),
    ("steps_are_the_same_to_the_bit", steps),
    ("state_in_host_memory_takes_none_of_the_gpu", memory),
];

fn cube<const D: usize>(tensor: Tensor<D>) -> CubeTensor {
    tensor
        .try_into_primitive::<CubeBackend>()
        .unwrap_or_else(|_| panic!("the tensor is not on a CUDA device"))
}

fn tensor(tensor: CubeTensor) -> Tensor<1> {
    Tensor::from_primitive::<CubeBackend>(tensor)
}

fn random(len: usize) -> Tensor<1> {
    Tensor::random([len], Distribution::Uniform(-1.0, 1.0), &Device::cuda(0))
}

fn told(error: CudaError) -> String {
    error.to_string()
}

fn read(tensor: Tensor<1>) -> Result<TensorData, String> {
    tensor.try_into_data().map_err(|error| error.to_string())
}

fn equal<T: PartialEq + std::fmt::Debug>(
    what: &str,
    found: &T,
    expected: &T,
) -> Result<(), String> {
    if found == expected {
        Ok(())
    } else {
        Err(format!("{what}: {found:?}, not {expected:?}"))
    }
}

fn round_trip() -> Result<(), String> {
    for len in [1, 2, 3, 255, 4097, 100_003] {
        for dtype in [DType::F32, DType::BF16] {
            let what = format!("{len} {dtype:?}");
            let mut host = None;
            // The second round reuses the memory.
            for _ in 0..2 {
                let x = random(len).cast(dtype);
                let expected = read(x.clone())?;
                let x = cube(x);
                let mut memory = host
                    .map_or_else(|| HostTensor::like(&x), Ok)
                    .map_err(told)?;
                equal("whether it fits", &memory.takes(&x), &true)?;
                drop(memory.store(x));
                equal(&what, &read(tensor(memory.fetch().wait()))?, &expected)?;
                equal(&what, &memory.read().map_err(told)?, &expected)?;
                equal(&what, &memory.bytes(), &(len * dtype.size()))?;
                host = Some(memory);
            }
            let other = cube(random(len + 1).cast(dtype));
            equal(
                "whether another fits",
                &host.is_some_and(|host| host.takes(&other)),
                &false,
            )?;
        }
    }
    // A slice of a larger tensor, with an offset.
    let whole = random(3000);
    let expected = read(whole.clone())?
        .convert::<f32>()
        .try_to_vec::<f32>()
        .unwrap_or_default();
    let part = cube(whole.narrow(0, 1024, 1111));
    let mut host = HostTensor::like(&part).map_err(told)?;
    drop(host.store(part));
    let found = host
        .read()
        .map_err(told)?
        .try_to_vec::<f32>()
        .unwrap_or_default();
    equal("a part", &found, &expected[1024..2135].to_vec())
}

/// Freed memory is reused at once by computations while copies are in flight.
fn in_order() -> Result<(), String> {
    const ROUNDS: usize = 40;
    let len = 1_000_003;
    let start = random(len);
    let mut expected = start.clone();
    let mut hosts = Vec::new();
    for i in 0..3 {
        let x = cube(start.clone() + i as f32);
        let mut host = HostTensor::like(&x).map_err(told)?;
        drop(host.store(x));
        hosts.push(host);
    }
    let mut leaving = Vec::new();
    for _ in 0..ROUNDS {
        let coming: Vec<_> = hosts.iter().map(HostTensor::fetch).collect();
        for (host, coming) in hosts.iter_mut().zip(coming) {
            let x = tensor(coming.wait()) * 0.5 + 0.25;
            leaving.push(host.store(cube(x)));
            // This takes the memory of stored tensors as soon as it is free.
            let _other = random(len) * 1e9;
            if leaving.len() > 2 {
                drop(leaving.remove(0));
            }
        }
        expected = expected * 0.5 + 0.25;
    }
    drop(leaving);
    let expected = read(expected)?;
    // The initial differences have been halved away.
    for host in &hosts {
        let found = host.read().map_err(told)?;
        let found = found.iter::<f32>();
        let expected = expected.iter::<f32>();
        let worst = found
            .zip(expected)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        if worst.is_nan() || worst > 1e-6 {
            return Err(format!("{worst} apart"));
        }
    }
    Ok(())
}

fn clones() -> Result<(), String> {
    let x = random(1001);
    let expected = read(x.clone())?;
    let x = cube(x);
    let mut host = HostTensor::like(&x).map_err(told)?;
    drop(host.store(x.clone()));
    let clone = host.clone();
    equal("whether it fits", &host.takes(&x), &false)?;
    drop(host);
    equal("whether it fits alone", &clone.takes(&x), &true)?;
    equal("the clone", &clone.read().map_err(told)?, &expected)?;
    // Memory is released while its copy may be in flight.
    let coming = clone.fetch();
    drop(clone);
    equal("the last copy", &read(tensor(coming.wait()))?, &expected)
}

fn failures() -> Result<(), String> {
    let x = random(777);
    let good = read(x.clone())?;
    let queue = CudaQueue::of(&cube(x.clone()));
    let bad = cube(random(777));
    let mut host = HostTensor::like(&bad).map_err(told)?;
    let empty = host.read().err().ok_or("nothing was read")?.to_string();
    equal(&empty, &empty.contains("nothing has been copied"), &true)?;
    drop(host.store(cube(x.clone())));
    let op = Op::new(|| "the broken work".to_string()).writes(&bad);
    let broken = |_, _: &_| Err(CudaError::Refused("it is broken".to_string()));
    queue
        .ok_or("the tensor is not on a CUDA device")?
        .enqueue(op, broken);
    drop(host.store(bad));
    for found in [
        read(tensor(host.fetch().wait())).err(),
        host.read().err().map(told),
    ] {
        let found = found.ok_or("stale values were read")?;
        equal(&found, &found.contains("it is broken"), &true)?;
    }
    drop(host.store(cube(x)));
    equal("what came then", &host.read().map_err(told)?, &good)
}

fn too_much() -> Result<(), String> {
    let one = cube(random(1).expand([1usize << 47]));
    let error = HostTensor::like(&one)
        .err()
        .ok_or("there are 512 TiB")?
        .to_string();
    let message = "cannot allocate 562949953421312 bytes of pinned host memory";
    equal(&error, &error.contains(message), &true)
}

/// The losses of the steps, as bits, and the final parameters.
type Trained = (Vec<u64>, Vec<(String, TensorData)>);

/// The losses and parameters of some steps; also runs the replica check on the state.
fn trained(config: &TrainConfig) -> Result<Trained, TrainError> {
    let mut trainer = trainer(config, Device::cuda(0))?;
    let steps = (0..3).map(|_| Ok(trainer.step()?.loss.to_bits()));
    let losses = steps.collect::<Result<_, TrainError>>()?;
    trainer.check_replicas()?;
    Ok((losses, read_params(trainer.model()).into_iter().collect()))
}

fn steps() -> Result<(), String> {
    with_config(|mut config| {
        for name in OPTIMIZERS {
            for dtype in [Dtype::F32, Dtype::Bf16]
                .into_iter()
                .filter(|_| part::is_mine())
            {
                config.optimizer.name = name;
                config.train.dtype = dtype;
                let mut run = |fraction| {
                    config.optimizer.cpu_offload_fraction = fraction;
                    trained(&config).map_err(|error| error.to_string())
                };
                let expected = run(0.0)?;
                for fraction in [0.3, 1.0] {
                    let found = run(fraction)?;
                    equal(&format!("losses of {name}, {dtype}"), &found.0, &expected.0)?;
                    if found != expected {
                        return Err(format!("{name}, {dtype}, {fraction}: other parameters"));
                    }
                }
            }
        }
        Ok(())
    })
}

#[derive(Module, Debug)]
struct Weights {
    all: Vec<Param<Tensor<2>>>,
}

const SHAPE: [usize; 2] = [512, 1024];
const NUM: usize = 6;

/// Bytes in live tensors, with a fraction of AdamW's state in host memory.
fn allocated(fraction: f64) -> Result<f64, String> {
    let device = Device::cuda(0);
    let text = |error: megaburn::optim::OptimError| error.to_string();
    let mut plan = ShardPlan::new();
    for i in 0..NUM {
        let shard = ShardSpec::whole(&SHAPE, Axis::Tp, 0, 1);
        plan.insert(format!("all.{i}"), ParamSpec { shard })
            .map_err(|error| error.to_string())?;
    }
    let ones = || Param::from_tensor(Tensor::ones(SHAPE, &device.clone().autodiff()));
    let mut weights = Weights {
        all: (0..NUM).map(|_| ones()).collect(),
    };
    let optimizer = AdamWConfig::new().init(&Sharding::none());
    let mut optimizer = optimizer
        .and_then(|o| o.with_cpu_offload(fraction))
        .map_err(text)?;
    weights = optimizer.cast_params(weights, FloatDType::BF16);
    let mut grads = GradientAccumulator::new(&weights, &plan, &Sharding::none()).map_err(text)?;
    for _ in 0..3 {
        grads.reset();
        let sums = weights
            .all
            .iter()
            .map(|w| w.val().cast(FloatDType::F32).square().sum());
        let loss = sums.reduce(|a, b| a + b).ok_or("no weights")?;
        grads.accumulate(&weights, &mut loss.backward());
        weights = optimizer.step(1e-3, weights, &grads).map_err(text)?;
    }
    grads.reset();
    device.sync().map_err(|error| error.to_string())?;
    Ok(MemoryReport::of(&device).ok_or("no report")?.allocated as f64)
}

fn memory() -> Result<(), String> {
    let elements = (NUM * SHAPE[0] * SHAPE[1]) as f64;
    let none = allocated(0.0)?;
    // A master and two moments in f32.
    for fraction in [0.5, 1.0] {
        let saved = (none - allocated(fraction)?) / elements;
        if (saved - 12.0 * fraction).abs() > 0.2 {
            return Err(format!("{saved} bytes an element less, at {fraction}"));
        }
    }
    Ok(())
}
