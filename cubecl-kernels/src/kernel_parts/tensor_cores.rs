//! Helpers of the kernels that use Hopper's tensor cores through `wgmma`.
//!
//! Tiles in shared memory are consecutive panels. A row of a panel has 128 bytes, and its 16-byte
//! chunks are permuted by the row's number: NVIDIA's "128-byte swizzle".

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Two adjacent numbers, as tensor-core operands hold them in a lane.
pub(crate) type Pair<F> = Vector<F, Const<2>>;

/// Columns of a panel.
pub(crate) const PANEL: usize = 64;

/// Whether the tensor is on a GPU with Hopper's tensor cores.
pub(crate) fn is_hopper(x: &CubeTensor) -> bool {
    x.client.properties().identity.fingerprint == "ptx_sm90"
}

/// The size of a panel of `rows` rows in units of 16 bytes, the unit of descriptors.
pub(crate) const fn panel(rows: usize) -> usize {
    rows * PANEL * 2 / 16
}

/// Binds the vector size `N` to `count` registers in the scope of the kernel.
#[cube]
#[allow(
    clippy::extra_unused_type_parameters,
    reason = "the kernel's scope registers the size under this type"
)]
pub(crate) fn size_is<N: Size>(#[comptime] count: usize) {
    intrinsic!(|scope| scope.register_size::<N>(count))
}

/// The shared-memory address of element `at`.
#[cube]
pub(crate) fn address<F: Float>(tiles: &Shared<[F]>, at: usize) -> u32 {
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 at; cvta.to.shared.u64 at, {}; cvt.u32.u64 {}, at; }}",
        in(_) &tiles[at],
        out(_) address,
    );
    address
}

/// The `wgmma` descriptor of the tile at `address`, in panels of `rows` rows.
#[cube]
pub(crate) fn descriptor(address: u32, #[comptime] rows: usize) -> u64 {
    // The fields: stride to the next panel, stride to the next eight rows, and the 128-byte
    // swizzle.
    let shape = comptime!((panel(rows) as u64) << 16 | (panel(8) as u64) << 32 | 1u64 << 62);
    ((address >> 4) & 0x3fff) as u64 | shape.runtime()
}

/// Splits `numbers` into `count` pairs.
#[cube]
pub(crate) fn split<N: Size>(
    numbers: Vector<f32, N>,
    pairs: &mut Array<Pair<f32>>,
    #[comptime] count: usize,
) {
    #[unroll]
    for i in 0..count {
        let mut pair = Pair::<f32>::new(0.0);
        pair.insert(0usize, numbers.extract(comptime!(2 * i)));
        pair.insert(1usize, numbers.extract(comptime!(2 * i + 1)));
        pairs[i] = pair;
    }
}
