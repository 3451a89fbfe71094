//! The kernels that one training step of each family launches.
//!
//! Burn's stock kernels accept tensors of any shape and strides. A sum over tokens by one of them
//! once took three quarters of GPT-2's step and went unnoticed, because every benchmark used
//! Llama's shape. Therefore this test fails for any kernel that is neither ours nor in [`STOCK`],
//! and names the kernel and the family.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use burn::{prelude::Device, tensor::Tensor};
use burn_cubecl::cubecl::logging::{LaunchObservation, LaunchObserver};
use megaburn::{
    models::Family,
    train::{ConfigLayers, TrainConfig, config::Dtype},
};

use crate::{Test, sentences::Sentences, steps::trainer};
use megaburn_test_support::text::{fresh_seed, write_random_text};

pub(crate) const TESTS: &[Test] = &[
    (
        "a_step_of_each_family_launches_known_kernels_only",
        known_only,
    ),
    ("a_sum_by_burn_is_an_unknown_kernel", a_sum_is_unknown),
];

/// Stock kernels that read and write each element once, by prefix of their names.
const STOCK: [&str; 11] = [
    "burn_cubecl::kernel::binary::kernel_binop::",
    "burn_cubecl::kernel::binary::kernel_scalar_binop::",
    "burn_cubecl::kernel::cast::",
    "burn_cubecl::kernel::comparison::kernel_scalar_cmp::",
    // The router's count of the tokens for each expert.
    "burn_cubecl::kernel::index::scatter::scatter_add_atomic_kernel::",
    "burn_cubecl::kernel::index::slice::",
    "burn_cubecl::kernel::index::slice_assign::",
    "burn_cubecl::kernel::mask::mask_fill::",
    "burn_cubecl::kernel::unary_float::",
    "burn_cubecl::ops::numeric::fill_device_dtype::",
    "cubecl_std::tensor::contiguous::",
];

/// Whether a kernel is known in a step of this family.
fn is_known(family: Family, dtype: Dtype, kernel: &str) -> bool {
    let template = family.template();
    let has_gate = template.experts.is_some_and(|experts| experts.shared_gate);
    // The gradients of a shared expert's gate, a number for each token, and of a relative bias where
    // attention is composed, as it is in f32.
    let sums = has_gate || (template.positions.relative().is_some() && dtype == Dtype::F32);
    !is_unknown(kernel) || (sums && kernel.starts_with("cubek_reduce::"))
}

/// Sizes that every family supports; all other settings are the family's defaults.
const SIZES: &str = "hidden = 64\nffn = 96\nlayers = 3\nheads = 4\nkv_heads = 4\nvocab = 307";

/// Counts launches by kernel.
#[derive(Default)]
struct Launches(Mutex<BTreeMap<&'static str, usize>>);

impl LaunchObserver for Launches {
    fn launched(&self, kernel: &'static str) {
        let mut counts = self
            .0
            .lock()
            .expect("no thread panics while holding the lock");
        *counts.entry(kernel).or_default() += 1;
    }
}

/// Runs `work` and counts the kernels that it launches on all threads.
fn launched<T>(work: impl FnOnce() -> T) -> (T, BTreeMap<&'static str, usize>) {
    let launches = Arc::new(Launches::default());
    let observation = LaunchObservation::new(launches.clone());
    let result = work();
    drop(observation);
    let counts = launches
        .0
        .lock()
        .expect("no thread panics while holding the lock")
        .clone();
    (result, counts)
}

/// Whether a kernel is neither ours nor in [`STOCK`].
fn is_unknown(kernel: &str) -> bool {
    !kernel.starts_with("megaburn") && !STOCK.iter().any(|known| kernel.starts_with(known))
}

/// Data of both kinds.
struct Data {
    text: PathBuf,
    sentences: Sentences,
}

fn config(family: Family, dtype: Dtype, data: &Data) -> Result<TrainConfig, String> {
    let model = family.template();
    let data = if model.bidirectional || model.encoder_layers > 0 {
        let Sentences {
            prefix,
            vocabulary,
            cache,
        } = &data.sentences;
        format!("path = {prefix:?}\ntokenizer = {vocabulary:?}\ncache_dir = {cache:?}")
    } else {
        format!("path = {:?}", data.text)
    };
    let experts = match family.template().experts {
        Some(_) => {
            "[moe]\naux_loss = 0.01\nseq_aux_loss = 0.01\nglobal_aux_loss = 0.01\nz_loss = 0.01"
        }
        None => "",
    };
    let text = format!(
        "[model]\nfamily = \"{family}\"\n{SIZES}\n{experts}
        [data]\n{data}\nseq_len = 32
        [train]\nsteps = 3\nglobal_batch = 4\nmicro_batch = 2\ndtype = \"{dtype}\""
    );
    let layers = ConfigLayers::new().with_text("launches.toml", &text);
    layers
        .and_then(ConfigLayers::load)
        .map_err(|error| error.to_string())
}

fn known_only() -> Result<(), String> {
    let folder = std::env::temp_dir().join(format!("megaburn-launches-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let path = folder.join("text.txt");
    write_random_text(&path, 10_000, fresh_seed());
    let data = Data {
        text: path,
        sentences: Sentences::write(&folder, fresh_seed())?,
    };
    let mut unknown = Vec::new();
    // Sinks and biases of experts are composed of tensor operations, with kernels of Burn.
    let fused = Family::BUILT_IN
        .into_iter()
        .filter(|family| *family != Family::GPT_OSS);
    for family in fused {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            let config = config(family, dtype, &data)?;
            let told = |error: megaburn::train::TrainError| format!("{family}, {dtype}: {error}");
            let mut trainer = trainer(&config, Device::cuda(0)).map_err(told)?;
            // The first step also allocates buffers that are kept.
            trainer.step().map_err(told)?;
            let (step, counts) = launched(|| trainer.step());
            step.map_err(told)?;
            if counts.is_empty() {
                return Err(format!("{family}, {dtype}: no launch was seen"));
            }
            let strange = counts
                .into_iter()
                .filter(|(kernel, _)| !is_known(family, dtype, kernel));
            unknown.extend(
                strange.map(|(kernel, count)| format!("{family}, {dtype}: {count} x {kernel}")),
            );
        }
    }
    // Temporary files may stay if they cannot be removed.
    let _ = std::fs::remove_dir_all(&folder);
    if unknown.is_empty() {
        Ok(())
    } else {
        Err(format!("unknown kernels:\n{}", unknown.join("\n")))
    }
}

fn a_sum_is_unknown() -> Result<(), String> {
    let x = Tensor::<2>::ones([512, 64], &Device::cuda(0));
    let (sum, counts) = launched(|| x.sum_dim(0));
    // Read the result, to be sure that the sum ran.
    let sum = sum.into_data().iter::<f32>().sum::<f32>();
    if sum != 512.0 * 64.0 {
        return Err(format!("the sum is {sum}"));
    }
    if counts.keys().any(|kernel| is_unknown(kernel)) {
        Ok(())
    } else {
        Err(format!("Burn's sum is no unknown kernel: {counts:?}"))
    }
}
