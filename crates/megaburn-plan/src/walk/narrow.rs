//! A run with the layers, heads, experts and layout of another one, and narrow matrices.

use megaburn_mesh::Layout;
use megaburn_train::{
    TrainConfig,
    config::{DataConfig, PrecisionRecipe},
};

use super::WALKED_MICRO_BATCHES;
use crate::error::PlanError;

/// Features of a head.
const HEAD: usize = 8;
/// Generated tokens, so that nothing is read.
const DATA: &str = "mock:random?tokens=10000000";

/// The narrow run. A rank computes a step of it in a moment, with the collectives of the other one.
///
/// # Errors
/// The layout does not split the narrow run.
pub(super) fn narrowed(config: &TrainConfig, layout: &Layout) -> Result<TrainConfig, PlanError> {
    let world = Some(layout.world_size());
    let narrow = with_heads(config, layout, true)?;
    if narrow.layout(world).is_ok() {
        return Ok(narrow);
    }
    // Models without a key for the size of heads.
    let narrow = with_heads(config, layout, false)?;
    narrow.layout(world)?;
    Ok(narrow)
}

/// The narrow run, with heads of a size of its own or of their part of the hidden size.
fn with_heads(
    config: &TrainConfig,
    layout: &Layout,
    own_size: bool,
) -> Result<TrainConfig, PlanError> {
    let mut narrow = config.clone();
    narrow_model(&mut narrow, layout, own_size);
    let model = &mut narrow.model;
    let tokens = 2 * layout.tp * layout.cp;
    model.window = model.window.map(|window| window.min(tokens));
    narrow.data = DataConfig {
        path: Some(DATA.into()),
        dataset: config.data.dataset,
        masking: config.data.masking.clone(),
        seq_len: of_at_least(tokens, 32),
        decoder_seq_len: of_at_least(tokens, 32),
        ..DataConfig::default()
    };
    let micro_batches = config.train.num_micro_batches(layout.dp)?;
    let walked = micro_batches.min(of_at_least(layout.pp, WALKED_MICRO_BATCHES));
    narrow.train.micro_batch = 1;
    narrow.train.global_batch = walked * layout.dp;
    narrow.train.batch_ramp = None;
    narrow.parallel.max_tokens_per_rank = None;
    // Otherwise the last collectives of a step run in a thread that the walk does not wait for.
    narrow.parallel.overlap = false;
    Ok(narrow)
}

fn narrow_model(config: &mut TrainConfig, layout: &Layout, own_size: bool) {
    // Scales of FP8 belong to blocks of up to 128 values.
    let part = match config.precision.recipe {
        PrecisionRecipe::Bf16 => HEAD,
        _ => 128,
    };
    let model = &mut config.model;
    model.init = None;
    model.vocab = None;
    (model.head_dim, model.hidden) = match own_size {
        true => (Some(part), 4 * part),
        false => (None, part * model.heads),
    };
    model.ffn = part * layout.tp;
    if let Some(experts) = &mut model.experts {
        experts.ffn = experts.ffn.map(|_| part * layout.etp);
        experts.shared_ffn = experts.shared_ffn.map(|_| part * layout.tp);
    }
    if let Some(latent) = &mut model.latent {
        model.head_dim = None;
        latent.q_lora_rank = latent.q_lora_rank.map(|_| 2 * part);
        latent.kv_lora_rank = 2 * part;
        latent.qk_nope_head_dim = part;
        latent.qk_rope_head_dim = part;
        latent.v_head_dim = part;
        model.hidden = 4 * part;
    }
}

/// The smallest multiple of `unit` that is not below `least`.
fn of_at_least(unit: usize, least: usize) -> usize {
    least.div_ceil(unit) * unit
}

#[cfg(test)]
mod tests {
    use megaburn_train::ConfigLayers;

    use super::*;

    #[test]
    fn layers_heads_experts_and_layout_stay() {
        let recipe = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../configs/recipes/deepseek-v3-256xh200.toml"
        );
        let config = ConfigLayers::new().with_file(recipe).unwrap();
        let config = config.load().unwrap();
        let layout = config.layout(None).unwrap();
        let narrow = narrowed(&config, &layout).unwrap();
        assert_eq!(narrow.layout(None).unwrap(), layout);
        let [before, after] = [&config, &narrow].map(|config| &config.model);
        assert_eq!(
            (before.layers, before.heads, before.kv_heads),
            (after.layers, after.heads, after.kv_heads)
        );
        let experts = [before, after].map(|model| model.experts.clone().unwrap());
        assert_eq!(experts[0].num, experts[1].num);
        assert_eq!(experts[0].groups, experts[1].groups);
        assert!(after.hidden <= 64 && after.ffn <= 64);
    }
}
