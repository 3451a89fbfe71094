//! What kernels share that ask Hopper's tensor cores for products, by `wgmma`.
//!
//! Tiles in shared memory are panels one behind the other; a panel's rows have 128 bytes, whose chunks of 16
//! are swapped by the row's number: NVIDIA's "128-byte swizzle".

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Two numbers side by side, as the lanes of tensor core operands hold them.
pub(crate) type Pair<F> = Vector<F, Const<2>>;

/// Columns of a panel.
pub(crate) const PANEL: usize = 64;

/// Whether the GPU that a tensor is on has them.
pub(crate) fn is_hopper(x: &CubeTensor) -> bool {
    x.client.properties().identity.fingerprint == "ptx_sm90"
}

/// 16 bytes, a descriptor's unit: of a panel of `rows`, and of eight rows of one.
pub(crate) const fn panel(rows: usize) -> usize {
    rows * PANEL * 2 / 16
}

/// As many registers as the call at hand says.
#[cube]
#[allow(
    clippy::extra_unused_type_parameters,
    reason = "the kernel's scope keeps the size by it"
)]
pub(crate) fn size_is<N: Size>(#[comptime] count: usize) {
    intrinsic!(|scope| scope.register_size::<N>(count))
}

/// Of an element in shared memory.
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

/// A descriptor of the tile that begins at an address, in panels of `rows`.
#[cube]
pub(crate) fn descriptor(address: u32, #[comptime] rows: usize) -> u64 {
    // Of the address, to the next panel and to the next eight rows; and the swizzle of 128 bytes.
    let shape = comptime!((panel(rows) as u64) << 16 | (panel(8) as u64) << 32 | 1u64 << 62);
    ((address >> 4) & 0x3fff) as u64 | shape.runtime()
}

/// Writes numbers as `count` pairs.
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
