//! The precision of a run of Megatron-LM, from its arguments about FP8 and FP4.

use super::{args::Args, error::MegatronError};
use crate::config::{AmaxCompute, Fp8Format, PrecisionConfig, PrecisionRecipe};

/// `[precision]` of a run. A line is added to `notes` for what differs.
///
/// # Errors
/// A recipe or format that megaburn does not have.
pub(super) fn precision(
    args: Args,
    notes: &mut Vec<String>,
) -> Result<PrecisionConfig, MegatronError> {
    let layers = |name| match args.flag("first_last_layers_bf16")? {
        true => Ok(args.optional_size(name)?.unwrap_or(1)),
        false => Ok::<_, MegatronError>(0),
    };
    if let Some(format) = args.optional_text("fp4")? {
        if format != "e2m1" {
            return Err(args.refused("fp4", "megaburn has `e2m1`"));
        }
        if args.optional_text("fp4_recipe")?.unwrap_or("nvfp4") != "nvfp4" {
            return Err(args.refused("fp4_recipe", "megaburn has `nvfp4`"));
        }
        notes.push(
            "environment variables that switch parts of NVFP4 off (NVTE_NVFP4_DISABLE_*) are not \
            in a checkpoint: see precision.stochastic_rounding, random_hadamard and \
            two_dimensional_weights"
                .into(),
        );
        return Ok(PrecisionConfig {
            recipe: PrecisionRecipe::Nvfp4,
            num_layers_at_start_in_bf16: layers("num_layers_at_start_in_bf16")?,
            num_layers_at_end_in_bf16: layers("num_layers_at_end_in_bf16")?,
            ..PrecisionConfig::default()
        });
    }
    let Some(format) = args.optional_text("fp8")? else {
        return Ok(PrecisionConfig::default());
    };
    let format = match format {
        "hybrid" => Fp8Format::Hybrid,
        "e4m3" => Fp8Format::E4m3,
        _ => return Err(args.refused("fp8", "megaburn has `hybrid` and `e4m3`")),
    };
    let name = "fp8_recipe";
    let recipe = match args.optional_text(name)?.unwrap_or("delayed") {
        "delayed" => PrecisionRecipe::Delayed,
        "tensorwise" => PrecisionRecipe::Tensorwise,
        "blockwise" => PrecisionRecipe::Blockwise,
        "mxfp8" => PrecisionRecipe::Mxfp8,
        _ => {
            let why = "megaburn has `delayed`, `tensorwise`, `blockwise` and `mxfp8`";
            return Err(args.refused(name, why));
        }
    };
    if recipe == PrecisionRecipe::Delayed {
        notes.push(
            "the largest magnitudes of the steps before are not converted: the scales of the first \
            step are derived from its own matrices"
                .into(),
        );
    }
    if args.get("fp8_wgrad").is_some() && !args.flag("fp8_wgrad")? {
        notes.push(
            "argument `fp8_wgrad` is False: megaburn quantises the matrices of weight gradients too"
                .into(),
        );
    }
    // The key is refused without bf16.
    let sends_fp8 = args.flag("bf16")?
        && matches!(
            recipe,
            PrecisionRecipe::Delayed | PrecisionRecipe::Tensorwise
        );
    let precision = PrecisionConfig {
        recipe,
        format: Some(format),
        num_layers_at_start_in_bf16: layers("num_layers_at_start_in_bf16")?,
        num_layers_at_end_in_bf16: layers("num_layers_at_end_in_bf16")?,
        fp8_param_gather: sends_fp8 && args.flag("fp8_param_gather")?,
        ..PrecisionConfig::default()
    };
    if recipe != PrecisionRecipe::Delayed {
        return Ok(precision);
    }
    let name = "fp8_margin";
    let margin = args.optional_size(name)?.unwrap_or(0);
    Ok(PrecisionConfig {
        amax_history_len: args.optional_size("fp8_amax_history_len")?.unwrap_or(1),
        amax_compute: match args.optional_text("fp8_amax_compute_algo")? {
            Some("max") => AmaxCompute::Max,
            Some("most_recent") | None => AmaxCompute::MostRecent,
            Some(_) => {
                let why = "megaburn has `max` and `most_recent`";
                return Err(args.refused("fp8_amax_compute_algo", why));
            }
        },
        margin: u32::try_from(margin).map_err(|_| args.refused(name, "it must be at most 16"))?,
        ..precision
    })
}
