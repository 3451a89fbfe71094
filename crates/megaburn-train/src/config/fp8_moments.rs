//! Where moments cannot be stored in 8 bits.

use megaburn_mesh::Layout;
use megaburn_models::DecoderConfig;
use megaburn_optim::StateDtype;

use super::{OptimizerName, TrainConfig, require::require};
use crate::error::TrainError;

impl TrainConfig {
    /// Refuses moments in 8 bits where tensor-parallel ranks hold copies of keys and values. They
    /// are in blocks with other numbers of each rank, so that the copies would be rounded apart.
    pub(super) fn check_fp8_moments(
        &self,
        layout: &Layout,
        model: &DecoderConfig,
    ) -> Result<(), TrainError> {
        let optimizer = &self.optimizer;
        let name = optimizer.name;
        let has_momentum = matches!(name, OptimizerName::Sgd | OptimizerName::Muon);
        let (tp, kv_heads) = (layout.tp, model.kv_heads);
        let rule = format!(
            "f32 or bf16: {tp} tensor-parallel ranks hold copies of {kv_heads} key and value heads, \
             whose moments in fp8 would differ. Set parallel.tp to at most {kv_heads}"
        );
        for (key, dtype, is_used) in [
            (
                "optimizer.exp_avg_dtype",
                optimizer.exp_avg_dtype,
                name != OptimizerName::Sgd,
            ),
            (
                "optimizer.exp_avg_sq_dtype",
                optimizer.exp_avg_sq_dtype,
                name.has_adamw(),
            ),
            (
                "optimizer.momentum_dtype",
                optimizer.momentum_dtype,
                has_momentum,
            ),
        ] {
            let is_fp8 = is_used && dtype == StateDtype::Fp8;
            require(!is_fp8 || tp <= kv_heads, key, dtype, rule.as_str())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::config::ConfigLayers;

    #[rstest]
    #[case("tp4", "exp_avg_dtype", "adamw", true)]
    #[case("tp4", "exp_avg_sq_dtype", "adamw", true)]
    #[case("tp4", "exp_avg_sq_dtype", "lion", false)]
    #[case("tp4", "momentum_dtype", "muon", true)]
    #[case("tp4", "momentum_dtype", "adamw", false)]
    #[case("tp2-dp2", "exp_avg_dtype", "adamw", false)]
    fn copies_of_keys_and_values_are_not_rounded_apart(
        #[case] layout: &str,
        #[case] key: &str,
        #[case] name: &str,
        #[case] is_refused: bool,
    ) {
        let text = format!(
            "[model]\nheads = 4\nkv_heads = 2\n[optimizer]\nname = '{name}'\n{key} = 'fp8'"
        );
        let layers = ConfigLayers::new().with_text("o.toml", &text).unwrap();
        let config = layers.with_layout(layout).unwrap().load().unwrap();
        match config.layout(None) {
            Ok(_) => assert!(!is_refused),
            Err(error) => {
                let start =
                    format!("`optimizer.{key}` is fp8: it must be f32 or bf16: 4 tensor-parallel");
                assert!(is_refused && error.to_string().contains(&start), "{error}");
            }
        }
    }
}
