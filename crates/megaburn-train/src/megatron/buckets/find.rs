use megaburn_models::DecoderConfig;
use megaburn_torch::megatron::MegatronDir;

use super::{
    order::Order, places::places, proof::prove, ranks::Ranks, refused::refused, values::Buckets,
};
use crate::megatron::{args::Args, error::MegatronError, parameter::Parameter};

/// Finds all parameters, and proves the places by all values.
///
/// The order of parameters is that of the layers that the arguments name, or else another one
/// that Megatron-Core has.
///
/// # Errors
/// No known order puts the f32 weights of every parameter where they are. The error names the
/// first parameter whose weights are others, in the order of the arguments.
pub(in crate::megatron) fn find(
    dir: &MegatronDir,
    args: Args,
    model: &DecoderConfig,
    parameters: &[Parameter],
) -> Result<Buckets, MegatronError> {
    let buckets = dir.buckets()?;
    let ranks = Ranks::of(args, model, &buckets)?;
    let mut refusal = None;
    for order in Order::all(args, model)? {
        let found = places(dir.dcp().path(), order, &ranks, model, parameters, &buckets);
        let proved = found.and_then(|places| {
            let found = Buckets::new(&buckets, parameters, places);
            prove(dir, &found, parameters).map(|()| found)
        });
        match proved {
            Ok(found) => return Ok(found),
            // A file that cannot be read is no proof against an order.
            Err(MegatronError::Torch(error)) => return Err(error.into()),
            Err(error) => refusal = refusal.or(Some(error)),
        }
    }
    Err(refusal.unwrap_or_else(|| refused(dir.dcp().path(), "have no known order")))
}
