//! Parameters whose features are scaled after each step.

use super::*;

/// The factors of the features of this rank's attention matrices and norms.
pub(super) fn factors(plan: &ShardPlan) -> BTreeMap<String, Vec<f32>> {
    let scaled = |path: &str| path.ends_with("attention") || path.ends_with("norm");
    let of = |path: &str, spec: &ParamSpec| {
        let shard = &spec.shard;
        let width = *shard.global_shape.last().unwrap();
        let factor = |at: usize| 1.0 / (1.0 + (at % width) as f32 / 4.0);
        let whole: Vec<f32> = (0..shard.num_global()).map(factor).collect();
        let mut local = cut(shard, &whole);
        local.truncate(*shard.local_shape().last().unwrap());
        (path.to_string(), local)
    };
    let params = plan.iter().filter(|(path, _)| scaled(path));
    params.map(|(path, spec)| of(path, spec)).collect()
}

#[rstest]
fn scaled_features_are_those_of_one_rank(
    #[values(
        "dp2",
        "dp4-ep2",
        "tp2",
        "tp2-dp2-ep2-sp",
        "pp2-dp2-ep2",
        "cp2-dp2-ep2"
    )]
    layout: &str,
    #[values(0.0, 1.0)] offload: f64,
) {
    for level in LEVELS {
        for (bucket, layers_sum) in [(None, true), (Some(1), true), (Some(600), false)] {
            println!("{level:?} {bucket:?} {layers_sum}");
            let config = ShardingConfig::new(level).with_bucket(bucket);
            Setup {
                offload,
                scales: true,
                ..Setup::new(layout, "adamw", config, layers_sum)
            }
            .check();
        }
    }
}

#[test]
fn unscaled_steps_are_others() {
    let found = [false, true].map(|scales| {
        let config = ShardingConfig::new(ShardingLevel::None);
        let setup = Setup {
            scales,
            seed: 1,
            ..Setup::new("dp1", "adamw", config, true)
        };
        setup.train(&ProcessGroups::single(0)).unwrap().params
    });
    for (path, values) in &found[0] {
        let is_scaled = path.contains("blocks.0.");
        if is_scaled {
            assert_ne!(values, &found[1][path], "{path}");
        }
    }
}
