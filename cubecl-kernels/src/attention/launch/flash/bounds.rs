//! The bounds of packed sequences on the GPU, uploaded once for all layers.

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;

use crate::attention::options::{Bounds, PackedSequences, Sequence};

/// The bounds on the GPU of `like`, as [`keys_of`] and [`queries_of`] read them.
///
/// [`keys_of`]: crate::attention::kernels::flash::visible::keys_of
/// [`queries_of`]: crate::attention::kernels::flash::visible::queries_of
pub(super) fn bounds(packed: &PackedSequences, like: &CubeTensor) -> Bounds {
    let brought = packed.on_gpu.get_or_init(|| bring(packed, like));
    // A process has one GPU. On any other device the bounds are uploaded on every call.
    if brought.of_queries.device == like.device {
        brought.clone()
    } else {
        bring(packed, like)
    }
}

fn bring(packed: &PackedSequences, like: &CubeTensor) -> Bounds {
    let mut of_queries = Vec::new();
    let mut of_keys = Vec::new();
    for Sequence {
        queries,
        keys,
        offset,
        ..
    } in packed.sequences()
    {
        let [queries, keys] = [queries, keys].map(|range| (range.start as i32, range.end as i32));
        for _ in queries.0..queries.1 {
            of_queries.extend([keys.0, keys.1, keys.0 - queries.0 + offset as i32]);
        }
        for _ in keys.0..keys.1 {
            of_keys.extend([queries.0, queries.1, queries.0 - keys.0 - offset as i32]);
        }
    }
    let [of_queries, of_keys] = [of_queries, of_keys].map(|numbers| {
        let bytes: Vec<u8> = numbers
            .iter()
            .flat_map(|number: &i32| number.to_ne_bytes())
            .collect();
        let handle = like.client.create_from_slice(&bytes);
        let client = like.client.clone();
        let device = like.device.clone();
        CubeTensor::new_contiguous(
            client,
            device,
            Shape::from([numbers.len()]),
            handle,
            DType::I32,
        )
    });
    Bounds {
        of_queries,
        of_keys,
    }
}
