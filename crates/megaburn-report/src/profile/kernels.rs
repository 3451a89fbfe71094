//! What kinds of work kernels do, by their names.

use serde::{Deserialize, Serialize};

/// What a kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelClass {
    /// Products of matrices.
    Products,
    /// Attention, fused.
    Attention,
    /// The update of weights, and what it needs of gradients.
    Optimizer,
    /// Everything else that computes: it is limited by the bandwidth of memory.
    MemoryBound,
    /// Collectives of NCCL.
    Communication,
    /// Copies and fills.
    Copies,
}

use KernelClass::{Attention, Communication, MemoryBound, Optimizer, Products};

/// Where a name says what a kernel is.
#[derive(Clone, Copy)]
enum Says {
    /// At its beginning: our kernels, which CubeCL names after their functions.
    First(&'static str),
    /// Anywhere, in any case: kernels of NVIDIA's libraries, whose names are mangled.
    Anywhere(&'static str),
}

use Says::{Anywhere, First};

/// The classes of names. The first row that fits counts; what fits none is memory-bound.
const CLASSES: &[(Says, KernelClass)] = &[
    (Anywhere("nccl"), Communication),
    // Fused attention of cuDNN and ours. Before products: cuDNN's names may contain `gemm`.
    (Anywhere("sdpa"), Attention),
    (Anywhere("fmha"), Attention),
    (First("flash_"), Attention),
    (Anywhere("flash"), Attention),
    (First("merge_lse_kernel"), Attention),
    (First("sum_diagonals"), Attention),
    // cuBLASLt: nvjet on Hopper and later, xmma, cutlass and gemm before.
    (Anywhere("nvjet"), Products),
    (Anywhere("gemm"), Products),
    (Anywhere("gemv"), Products),
    (Anywhere("cutlass"), Products),
    (Anywhere("xmma"), Products),
    (Anywhere("splitk"), Products),
    (Anywhere("matmul"), Products),
    // Products of experts: `cubecl-kernels/src/linear/grouped`.
    (First("rows_kernel"), Products),
    (First("weights_kernel"), Products),
    // `cubecl-kernels/src/optimizer`.
    (First("adamw"), Optimizer),
    (First("lion_kernel"), Optimizer),
    (First("sgd_kernel"), Optimizer),
    (First("squares_"), Optimizer),
    (First("total_kernel"), Optimizer),
    (First("scale_kernel"), Optimizer),
    (First("joined_master_kernel"), Optimizer),
    (First("master_remainder_kernel"), Optimizer),
    (First("packed_moment_kernel"), Optimizer),
    (First("unpacked_moment_kernel"), Optimizer),
];

impl KernelClass {
    /// All classes, in the order of tables.
    pub const ALL: [Self; 6] = [
        Self::Products,
        Self::Attention,
        Self::MemoryBound,
        Self::Optimizer,
        Self::Copies,
        Self::Communication,
    ];

    /// The class of a kernel with this name.
    pub fn of(name: &str) -> Self {
        let low = name.to_ascii_lowercase();
        let fits = |says: Says| match says {
            First(start) => name.starts_with(start),
            Anywhere(word) => low.contains(word),
        };
        let row = CLASSES.iter().find(|(says, _)| fits(*says));
        row.map_or(MemoryBound, |(_, class)| *class)
    }

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Products => "products",
            Self::Attention => "attention",
            Self::Optimizer => "optimizer",
            Self::MemoryBound => "memory-bound",
            Self::Communication => "communication",
            Self::Copies => "copies",
        }
    }
}

/// A kernel's name without what differs between its variants: CubeCL adds eight hexadecimal digits
/// to the name of each, and C++ mangles its arguments into it.
pub fn base_name(name: &str) -> &str {
    if let Some((base, hash)) = name.rsplit_once('_')
        && hash.len() == 8
        && hash.bytes().all(|byte| byte.is_ascii_hexdigit())
    {
        return base;
    }
    mangled(name).unwrap_or(name)
}

/// The first name in a mangled one, such as `_Z6kernelPf`.
fn mangled(name: &str) -> Option<&str> {
    let rest = name.strip_prefix("_Z")?;
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let length: usize = rest[..digits].parse().ok()?;
    rest.get(digits..digits.checked_add(length)?)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", Products)]
    #[case(
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        Products
    )]
    #[case("_ZN7cutlass13device_kernelIN4cute", Products)]
    #[case("rows_kernel_bf16_0a1b2c3d", Products)]
    #[case(
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob",
        Attention
    )]
    #[case("flash_backward_keys_0a1b2c3d", Attention)]
    #[case("adamw_of_many_kernel_f32_bf16_01234567", Optimizer)]
    #[case("squares_of_many_kernel_01234567", Optimizer)]
    #[case(
        "_Z40ncclDevKernel_AllReduce_Sum_bf16_RING_LL24ncclDevKernelArgsStorageILm4096EE",
        Communication
    )]
    #[case("forward_kernel_f32_0a1b2c3d", MemoryBound)]
    #[case("softmax_kernel", MemoryBound)]
    #[case("block_cast_kernel_0a1b2c3d", MemoryBound)]
    fn kernels_are_classified_by_their_names(#[case] name: &str, #[case] class: KernelClass) {
        assert_eq!(KernelClass::of(name), class);
    }

    #[rstest]
    #[case("adamw_kernel_f32_0a1b2c3d", "adamw_kernel_f32")]
    #[case("adamw_kernel", "adamw_kernel")]
    #[case(
        "_Z22ncclDevKernel_SendRecv24ncclDevKernelArgsStorage",
        "ncclDevKernel_SendRecv"
    )]
    #[case("_Z99short", "_Z99short")]
    #[case("nvjet_tst_128x256", "nvjet_tst_128x256")]
    fn variants_of_a_kernel_have_one_name(#[case] name: &str, #[case] base: &str) {
        assert_eq!(base_name(name), base);
    }
}
