//! The random numbers that a quantised layer draws.

use megaburn_collective::Group;
use megaburn_kernels::RandomNumbers;
use megaburn_mesh::ShardSpec;

use super::{config::ParallelLinearConfig, split::Split};

/// The random numbers of a rank's features of the layer's output.
pub(super) fn random_numbers(
    config: &ParallelLinearConfig,
    group: &Group,
    weight: &ShardSpec,
) -> RandomNumbers {
    let numbers = RandomNumbers::new(group.seed(), config.path.as_deref().unwrap_or_default());
    match config.split {
        Split::Row => numbers,
        Split::Column => {
            let own = weight.pieces.iter().map(|piece| piece.global.clone());
            numbers.with_cols(own.collect::<Vec<_>>(), config.d_output)
        }
    }
}
