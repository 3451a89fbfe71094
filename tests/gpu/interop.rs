//! Foreign work between CubeCL's kernels runs in order without host waits, and its failures surface
//! at the next read.

use burn::{
    prelude::Device,
    tensor::{DType, Distribution, Tensor, TensorData},
};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cudarc::driver::sys;
use megaburn::cuda::{
    Buffers, CudaError, CudaQueue, Op, Retained,
    events::Event,
    gemm::{ProductOptions, product},
    memory::MemoryReport,
    streams::{Priority, Stream},
    tensor::{contiguous, empty},
};

use crate::Test;

pub(crate) const TESTS: &[Test] = &[
    (
        "foreign_work_runs_between_its_neighbours",
        between_neighbours,
    ),
    ("another_stream_keeps_what_it_reads", another_stream),
    ("an_error_is_told_at_the_next_read", an_error),
    ("a_panic_is_told_at_the_next_read", a_panic),
    (
        "a_failure_goes_on_through_foreign_work",
        through_foreign_work,
    ),
    ("events_are_used_again", events),
    ("the_memory_report_counts_tensors", memory),
    ("ragged_and_strided_matrices_are_multiplied", ragged),
];

const ROUNDS: usize = 40;

const F32_PRODUCT: ProductOptions = ProductOptions {
    scale: 1.0,
    dtype: DType::F32,
    tune: true,
};

fn cube<const D: usize>(tensor: &Tensor<D>) -> CubeTensor {
    tensor
        .clone()
        .try_into_primitive::<CubeBackend>()
        .unwrap_or_else(|_| panic!("the tensor is not on a CUDA device"))
}

fn tensor<const D: usize>(tensor: CubeTensor) -> Tensor<D> {
    Tensor::from_primitive::<CubeBackend>(tensor)
}

fn random<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::random(shape, Distribution::Uniform(-1.0, 1.0), &Device::cuda(0))
}

/// Copies on a stream, as a library would.
fn copy(stream: Stream, buffers: &Buffers) -> Result<(), CudaError> {
    let from = buffers.reads[0];
    let to = buffers.writes[0];
    // SAFETY: both buffers are live allocations of equal size, as the test creates them.
    unsafe { sys::cuMemcpyDtoDAsync_v2(to.ptr, from.ptr, from.bytes as usize, stream.0) }
        .result()
        .map_err(|error| CudaError::Refused(error.to_string()))
}

fn read<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, String> {
    let data = tensor.try_into_data().map_err(|error| error.to_string())?;
    data.try_to_vec().map_err(|error| format!("{error:?}"))
}

fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) -> Result<(), String> {
    let apart = |(a, b): (&f32, &f32)| (a - b).abs();
    let worst = found
        .iter()
        .zip(expected)
        .map(apart)
        .fold(0.0f32, |worst, apart| {
            if apart.is_nan() {
                f32::INFINITY
            } else {
                worst.max(apart)
            }
        });
    if worst > tolerance || found.len() != expected.len() {
        return Err(format!("{what}: {worst} apart"));
    }
    Ok(())
}

/// The kernel before writes the input of the work, the kernel after reads its output, and the host
/// does not wait until the end.
fn between_neighbours() -> Result<(), String> {
    let start = random([1000, 257]);
    let expected = read(start.clone())?;
    let mut value = start;
    for _ in 0..ROUNDS {
        let produced = contiguous(cube(&(value * 2.0 + 1.0)));
        let out = empty(&produced, produced.meta.shape().clone(), DType::F32);
        let queue = CudaQueue::of(&produced).ok_or("the tensor is not on a CUDA device")?;
        queue.enqueue(
            Op::new(|| "copy".into()).reads(&produced).writes(&out),
            copy,
        );
        value = (tensor::<2>(out) - 1.0) / 2.0;
    }
    assert_close("after all rounds", &read(value)?, &expected, 1e-3)
}

/// Work on another stream, joined by events. The host releases its buffers at once, but they must
/// not be reused before the work is done.
fn another_stream() -> Result<(), String> {
    let any = cube(&random([1, 1]));
    let queue = CudaQueue::of(&any).ok_or("the tensor is not on a CUDA device")?;
    let side = queue.on_device_thread(|| Stream::create(Priority::High));
    let side = side.map_err(|error| error.to_string())?;
    let mut results = Vec::new();
    let mut expected = Vec::new();
    for round in 0..ROUNDS {
        let source = Tensor::<2>::full([2048, 2048], round as f32, &Device::cuda(0)) + 1.0;
        let produced = contiguous(cube(&source));
        drop(source);
        let out = empty(&produced, produced.meta.shape().clone(), DType::F32);
        let retained = Retained::default();
        let op = Op::new(|| "copy beside".into())
            .reads(&produced)
            .writes(&out);
        queue.enqueue_retaining(op, &retained, move |compute, buffers| {
            side.wait_for(compute)?;
            copy(side, buffers)
        });
        drop(produced);
        // This takes the memory of `produced`, if it is free, and overwrites it on CubeCL's stream.
        let spoil = Tensor::<2>::full([2048, 2048], -1.0, &Device::cuda(0)) * 3.0;
        queue.enqueue(Op::new(|| "join".into()).writes(&out), move |compute, _| {
            compute.wait_for(side)?;
            drop(retained);
            Ok(())
        });
        results.push(tensor::<2>(out).mean() + spoil.mean() * 0.0);
        expected.push(round as f32 + 1.0);
    }
    assert_close("means", &read(Tensor::cat(results, 0))?, &expected, 1e-3)
}

/// Enqueues failing work and returns its output.
fn failure(
    work: impl FnOnce(Stream, &Buffers) -> Result<(), CudaError> + Send + 'static,
) -> Result<Tensor<2>, String> {
    let out = cube(&random([3, 4]));
    let out = empty(&out, [3, 4], DType::F32);
    let queue = CudaQueue::of(&out).ok_or("the tensor is not on a CUDA device")?;
    queue.enqueue(
        Op::new(|| "a product [3, 5] x [5, 4]".into()).writes(&out),
        work,
    );
    Ok(tensor(out))
}

fn assert_told(downstream: Tensor<2>, reason: &str) -> Result<(), String> {
    match read(downstream) {
        Ok(_) => Err("what was never written was read".into()),
        Err(told) if told.contains("a product [3, 5] x [5, 4]") && told.contains(reason) => {
            // Other tensors are not affected.
            assert_close(
                "afterwards",
                &read(random([3, 4]) * 0.0 + 2.0)?,
                &[2.0; 12],
                0.0,
            )
        }
        Err(told) => Err(format!("the error says something else: {told}")),
    }
}

fn an_error() -> Result<(), String> {
    let out = failure(|_, _| Err(CudaError::Refused("on purpose".into())))?;
    assert_told(out * 2.0 + 1.0, "on purpose")
}

fn a_panic() -> Result<(), String> {
    let out = failure(|_, _| panic!("by accident"))?;
    // Burn's `sum` would not do: it returns 0 for a tensor that was never written (see
    // `Decoder::loss`).
    assert_told(out.sum_dim(1) * 2.0, "by accident")
}

fn through_foreign_work() -> Result<(), String> {
    let lost = contiguous(cube(&failure(|_, _| {
        Err(CudaError::Refused("on purpose".into()))
    })?));
    let out = empty(&lost, lost.meta.shape().clone(), DType::F32);
    let queue = CudaQueue::of(&lost).ok_or("the tensor is not on a CUDA device")?;
    queue.enqueue(Op::new(|| "copy".into()).reads(&lost).writes(&out), copy);
    let product = product(out, cube(&random([4, 2])), None, F32_PRODUCT);
    assert_told(
        tensor(product.map_err(|error| error.to_string())?),
        "on purpose",
    )
}

fn events() -> Result<(), String> {
    let queue =
        CudaQueue::of(&cube(&random([1, 1]))).ok_or("the tensor is not on a CUDA device")?;
    let run = || -> Result<(), CudaError> {
        let first = Stream::create(Priority::Normal)?;
        let second = Stream::create(Priority::High)?;
        for _ in 0..10_000 {
            let [one, other] = [Event::record(first)?, Event::record(second)?];
            one.blocks_stream(second)?;
            other.blocks_stream(first)?;
        }
        first.synchronize()?;
        second.synchronize()?;
        let last = Event::record(first)?;
        first.synchronize()?;
        if last.is_done()? {
            Ok(())
        } else {
            Err(CudaError::Refused(
                "an event behind a finished stream is not done".into(),
            ))
        }
    };
    queue
        .on_device_thread(run)
        .map_err(|error| error.to_string())
}

fn memory() -> Result<(), String> {
    const BYTES: u64 = 1 << 30;
    let device = Device::cuda(0);
    let report = || MemoryReport::of(&device).ok_or("no report of a GPU");
    let before = report()?;
    let tensor = Tensor::<2>::zeros([1 << 14, 1 << 14], &device);
    let held = report()?;
    drop(tensor);
    let after = report()?;
    let grown = held.allocated.saturating_sub(before.allocated);
    let whole = held.reserved >= held.allocated && held.peak >= held.reserved;
    let free = held.free < held.total && held.total - held.free >= held.reserved;
    let given_back = after.allocated == before.allocated && after.peak >= held.reserved;
    if !(BYTES..BYTES + BYTES / 16).contains(&grown) || !whole || !free || !given_back {
        return Err(format!(
            "before {before:?}, with 1 GiB more {held:?}, without {after:?}"
        ));
    }
    Ok(())
}

/// Padded rows, slices of a larger tensor, and transposed tensors.
fn ragged() -> Result<(), String> {
    let host = |tensor: &Tensor<3>| -> Result<Tensor<3>, String> {
        let data = tensor
            .clone()
            .try_into_data()
            .map_err(|error| error.to_string())?;
        Ok(Tensor::from_data(data, &Device::flex()))
    };
    for [m, k, n] in [
        [3, 5, 7],
        [1, 130, 1],
        [17, 1, 33],
        [64, 257, 96],
        [129, 65, 31],
    ] {
        let wide = random([2, m + 3, k + 9]);
        let parts: [(&str, Tensor<3>, Tensor<3>); 3] = [
            ("whole", random([2, m, k]), random([2, k, n])),
            (
                "slices",
                wide.narrow(1, 2, m).narrow(2, 4, k),
                random([2, k, n + 5]).narrow(2, 1, n),
            ),
            (
                "transposed",
                random([2, k, m]).swap_dims(1, 2),
                random([2, n, k]).swap_dims(1, 2),
            ),
        ];
        for (name, a, b) in parts {
            let expected: TensorData = host(&a)?.matmul(host(&b)?).into_data();
            let expected: Vec<f32> = expected.try_to_vec().expect("it is f32");
            let found = product(cube(&a), cube(&b), None, F32_PRODUCT);
            let found = read(tensor::<3>(found.map_err(|error| error.to_string())?))?;
            assert_close(&format!("{name} {m}x{k}x{n}"), &found, &expected, 1e-4)?;
        }
    }
    Ok(())
}
