//! Plans for a GPU that is described but need not exist. They need cuDNN, cuBLASLt, NVRTC and a
//! `libcuda` that accepts compiled code: `tools/cuda-emulator/cudnn-plans` provides them.

use burn::tensor::DType;

use super::{
    api::Api,
    attention::{AttentionShape, Heads},
    descriptor::Descriptor,
    library::AttentionPass,
    names::{Address, Attribute, Handle, Kind},
    plan::{Plan, Target},
};
use crate::error::CudaError;

/// cuDNN's description of an H200.
const H200: &str = r#"{"deviceVer": 900, "driverVer": 13000, "cudaDeviceId": 0,
    "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 65536, "multiProcessorCount": 132, "warpSize": 32,
    "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536, "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0,
    "supportCoopLaunch": 1, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000,
    "memoryBusWidth": 6144, "l2CacheSize": 62914560, "totalGlobalMem": 150754820096,
    "deviceName": "NVIDIA H200"}"#;

fn heads(sizes: [usize; 4]) -> Heads {
    let [_, b, h, d] = sizes;
    Heads {
        sizes,
        strides: [b * h * d, h * d, d, 1],
    }
}

/// The attention of sizes `[s_q, s_k, b, hq, hkv, d, d_v]`.
fn attention(
    [s_q, s_k, b, hq, hkv, d, d_v]: [usize; 7],
    dtype: DType,
    causal: bool,
) -> Result<AttentionShape, String> {
    let heads = [[s_q, b, hq, d], [s_k, b, hkv, d], [s_k, b, hkv, d_v]].map(heads);
    AttentionShape::new(heads, dtype, causal)
}

/// cuDNN, if it is installed.
fn library() -> Option<&'static Api> {
    match Api::get() {
        Ok(api) => Some(api),
        Err(error) => {
            eprintln!("not tested: {error}");
            None
        }
    }
}

fn h200(api: &'static Api) -> Result<Target, CudaError> {
    let gpu = Descriptor::new(api, Kind::DeviceProperties)?;
    let gpu = gpu
        .with(Attribute::DeviceJson, H200.as_bytes())?
        .finished()?;
    Ok(Target::Described(gpu))
}

#[test]
fn what_cudnn_would_read_wrongly_is_refused() {
    use DType::{BF16, F32};
    let good = [65, 70, 2, 4, 2, 64, 128];
    attention(good, BF16, true).unwrap();
    for (sizes, dtype, why) in [
        (good, F32, "not bf16 or f16"),
        ([65, 70, 2, 4, 3, 64, 128], BF16, "do not match"),
        ([0, 70, 2, 4, 2, 64, 128], BF16, "do not match"),
        (
            [65, 70, 2, 4, 2, 100, 128],
            BF16,
            "head dimensions 100 and 128",
        ),
        (
            [65, 70, 2, 4, 2, 64, 264],
            BF16,
            "head dimensions 64 and 264",
        ),
    ] {
        let error = attention(sizes, dtype, true).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    let [q, k] = [[9, 1, 2, 8], [9, 1, 2, 8]].map(heads);
    for strides in [[16, 16, 8, 2], [20, 16, 8, 1], [0, 16, 8, 1]] {
        let v = Heads { strides, ..k };
        let error = AttentionShape::new([q, k, v], BF16, false).unwrap_err();
        assert!(error.contains("strides"), "{error}");
    }
}

#[test]
fn an_h200_has_engines_for_every_kind_of_attention() -> Result<(), CudaError> {
    let Some(api) = library() else { return Ok(()) };
    let gpu = h200(api)?;
    let mut planned = 0;
    for (sizes, dtype, causal) in [
        ([128, 128, 2, 4, 2, 64, 64], DType::BF16, true),
        ([4096, 4096, 1, 32, 8, 128, 128], DType::BF16, true),
        ([300, 300, 1, 4, 4, 32, 32], DType::F16, true),
        ([67, 67, 2, 6, 2, 24, 24], DType::BF16, true),
        ([33, 65, 1, 2, 2, 16, 16], DType::F16, false),
        ([40, 10, 1, 2, 1, 8, 8], DType::BF16, true),
        ([40, 70, 1, 2, 1, 256, 256], DType::BF16, false),
        ([65, 65, 1, 2, 1, 192, 128], DType::BF16, true),
    ] {
        let attention = attention(sizes, dtype, causal).map_err(CudaError::Refused)?;
        for (pass, graph) in [
            (AttentionPass::Forward, attention.forward(api)?),
            (AttentionPass::Backward, attention.backward(api)?),
        ] {
            match Plan::find(api, &gpu, graph) {
                Ok(plan) => {
                    println!("{pass:?} of {attention}: a workspace of {}", plan.workspace);
                    planned += 1;
                }
                // A graph can be built and checked without a driver, but compiled code is loaded
                // through one.
                Err(error) if std::env::var_os("CUDNN_PLANS").is_none() => {
                    eprintln!("not tested: {pass:?} of {attention}: {error}");
                }
                Err(error) => return Err(error),
            }
        }
    }
    println!("{planned} plans");
    Ok(())
}

#[test]
fn views_into_one_tensor_have_engines() -> Result<(), CudaError> {
    let Some(api) = library() else { return Ok(()) };
    let gpu = h200(api)?;
    // Queries and grouped keys and values are interleaved in one tensor.
    let s = 70;
    let b = 2;
    let d = 64;
    let part = |heads: usize| Heads {
        sizes: [s, b, heads, d],
        strides: [b * 8 * d, 8 * d, d, 1],
    };
    let attention = AttentionShape::new([part(4), part(2), part(2)], DType::BF16, true);
    let attention = attention.map_err(CudaError::Refused)?;
    for graph in [attention.forward(api)?, attention.backward(api)?] {
        let plan = Plan::find(api, &gpu, graph);
        assert!(
            plan.is_ok() || std::env::var_os("CUDNN_PLANS").is_none(),
            "{plan:?}"
        );
    }
    Ok(())
}

#[test]
fn a_call_that_the_library_refuses_is_an_error() -> Result<(), CudaError> {
    let Some(api) = library() else { return Ok(()) };
    let attention = attention([64, 64, 1, 2, 2, 64, 64], DType::BF16, false).unwrap();
    let Ok(plan) = Plan::find(api, &h200(api)?, attention.forward(api)?) else {
        return Ok(());
    };
    let at = |address: usize| Address(std::ptr::without_provenance_mut(address));
    let (reads, writes) = AttentionPass::Forward.roles();
    let roles = reads.iter().chain(writes).map(|&role| role as i64);
    let tensors: Vec<_> = roles.map(|id| (id, at(4096))).collect();
    // Without a GPU there can be no handle.
    // SAFETY: without a handle nothing is computed.
    let enqueued = unsafe { plan.enqueue(api, Handle(std::ptr::null_mut()), &tensors, at(4096)) };
    let error = enqueued.unwrap_err();
    assert!(
        error
            .to_string()
            .contains("cudnnBackendExecute failed: CUDNN_STATUS"),
        "{error}"
    );
    Ok(())
}

#[test]
fn what_no_engine_computes_is_an_error() -> Result<(), CudaError> {
    let Some(api) = library() else { return Ok(()) };
    // A single operation is not an attention, and cuDNN has no such engine for a Maxwell GPU.
    let old = H200.replace("\"deviceVer\": 900", "\"deviceVer\": 520");
    let gpu = Descriptor::new(api, Kind::DeviceProperties)?;
    let gpu = Target::Described(
        gpu.with(Attribute::DeviceJson, old.as_bytes())?
            .finished()?,
    );
    let attention = attention([128, 128, 1, 2, 2, 64, 64], DType::BF16, true).unwrap();
    let error = Plan::find(api, &gpu, attention.forward(api)?)
        .unwrap_err()
        .to_string();
    assert!(!error.is_empty());
    let error = Descriptor::new(api, Kind::Tensor)?
        .finished()
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("Tensor") && error.contains("CUDNN_STATUS"),
        "{error}"
    );
    Ok(())
}
