//! The sinks of a rank's heads.

use burn::{module::Param, nn::Initializer, prelude::Device, tensor::Tensor};
use megaburn_collective::Group;
use megaburn_mesh::{Axis, FusedPart, ShardSpec};

use crate::{error::ParallelError, init::InitDraw};

/// Draws the sinks of this rank's heads, `[heads / ranks]`, and returns them with their place in the
/// sinks of all heads.
///
/// # Errors
/// The ranks do not divide the heads, or there is more than one rank and no name.
pub(super) fn init_sinks(
    heads: usize,
    initializer: &Initializer,
    name: Option<&str>,
    group: &Group,
    device: &Device,
) -> Result<(Param<Tensor<1>>, ShardSpec), ParallelError> {
    let part = [FusedPart::units(heads, 1)];
    let spec = ShardSpec::split(&[heads], 0, &part, Axis::Tp, group.rank(), group.size());
    let spec = spec.map_err(|source| ParallelError::Shard {
        name: name.unwrap_or("attention").into(),
        source,
    })?;
    let draw = InitDraw {
        layer: "SelfAttention",
        name,
        field: "sinks",
        initializer,
        fans: [1, heads],
    };
    Ok((draw.param(&spec, group, device)?, spec))
}
