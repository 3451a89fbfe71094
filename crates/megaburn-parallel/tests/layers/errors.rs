//! What is refused, and with which message.

use burn::{nn::Initializer, prelude::Device};
use megaburn_collective::Group;
use megaburn_mesh::{FusedPart, Zigzag};
use megaburn_parallel::{
    AttentionGroups, ContextComm, ContextParallel, CrossAttentionConfig, CrossEntropyConfig,
    MlpConfig, MultiLatentAttentionConfig, ParallelDropoutConfig, ParallelError,
    ParallelLinearConfig, PositionEmbeddingConfig, RelativeBiasConfig, ReplicatedLinearConfig,
    SelfAttentionConfig, VocabParallelEmbeddingConfig,
};
use rstest::rstest;

use crate::support::on_ranks;

/// The configuration of any layer.
trait Layer: Sync {
    fn build(&self, group: &Group) -> Result<(), ParallelError>;
}

macro_rules! layers {
    ($($config:ty => |$this:ident, $group:ident| $init:expr),* $(,)?) => {$(
        impl Layer for $config {
            fn build(&self, $group: &Group) -> Result<(), ParallelError> {
                let $this = self;
                $init.map(drop)
            }
        }
    )*};
}

layers!(
    ParallelLinearConfig => |config, group| config.init(group, &Device::flex()),
    VocabParallelEmbeddingConfig => |config, group| config.init(group, &Device::flex()),
    MlpConfig => |config, group| config.init(group, &Device::flex()),
    PositionEmbeddingConfig => |config, group| config.init(group, &Device::flex()),
    SelfAttentionConfig => |config, group| config.init(group, &Device::flex()),
    MultiLatentAttentionConfig => |config, group| config.init(group, &Device::flex()),
    CrossAttentionConfig => |config, group| config.init(group, &Device::flex()),
    RelativeBiasConfig => |config, group| config.init(group, &Device::flex()),
    ReplicatedLinearConfig => |config, group| config.init(group, &Device::flex()),
    CrossEntropyConfig => |config, group| config.init(group),
    ParallelDropoutConfig => |config, group| config.init(group, Zigzag::WHOLE),
);

/// The error message, which must be the same on every rank.
fn message(ranks: usize, layer: impl Layer) -> String {
    let refuse = |group: Group| layer.build(&group).expect_err("it is refused").to_string();
    let mut messages = on_ranks(ranks, 0, refuse);
    messages.dedup();
    assert_eq!(messages.len(), 1, "{messages:?}");
    messages.remove(0)
}

fn up(config: ParallelLinearConfig) -> ParallelLinearConfig {
    config.with_name("up")
}

fn attention(heads: usize, kv_heads: usize) -> SelfAttentionConfig {
    SelfAttentionConfig::new(8, heads, kv_heads, 2).with_name("attention")
}

fn cross(heads: usize) -> CrossAttentionConfig {
    CrossAttentionConfig::new(8, heads, 2).with_name("cross")
}

fn dropout(prob: f64) -> ParallelDropoutConfig {
    ParallelDropoutConfig::new(prob, "blocks.0.dropout".into())
}

#[rstest]
#[case::linear("ParallelLinear", ParallelLinearConfig::new(4, 4))]
#[case::embedding("VocabParallelEmbedding", VocabParallelEmbeddingConfig::new(4, 4))]
#[case::gated("ParallelLinear", MlpConfig::gated(4, 4))]
#[case::mlp("ParallelLinear", MlpConfig::new(4, 4))]
#[case::attention("ParallelLinear", SelfAttentionConfig::new(4, 2, 2, 2))]
#[case::latent("ParallelLinear", MultiLatentAttentionConfig::new(4, 2, 2, 2, 2, 2))]
#[case::cross_attention("ParallelLinear", CrossAttentionConfig::new(4, 2, 2))]
#[case::relative_bias("RelativeBias", RelativeBiasConfig::new(8, 16, 2))]
#[case::replicated("ReplicatedLinear", ReplicatedLinearConfig::new(4, 4))]
fn an_unnamed_layer_in_a_group_is_refused(#[case] layer: &str, #[case] config: impl Layer + Clone) {
    assert_eq!(
        message(2, config.clone()),
        format!(
            "a {layer} in group world of 2 ranks needs a name, which seeds its weights equally on every rank: add `.with_name(\"path\")`"
        )
    );
    config.build(&Group::single(0)).unwrap();
}

#[rstest]
#[case::sequence_and_features(
    "ParallelLinear `up`: a row split with sequence parallelism needs `input_is_parallel`",
    up(ParallelLinearConfig::row(4, 4).with_input_is_parallel(false).with_sequence_parallel(true)))]
#[case::parallel_input_of_columns(
    "ParallelLinear `up`: `input_is_parallel` belongs to a row split",
    up(ParallelLinearConfig::column(4, 4).with_input_is_parallel(true)))]
#[case::gathered_parts(
    "ParallelLinear `up`: `gather_output` with parts would interleave",
    up(ParallelLinearConfig::new(4, 4).with_parts([FusedPart::new(2), FusedPart::new(2)])))]
#[case::scattered_parts(
    "ParallelLinear `up`: a row split of parts needs `input_is_parallel`",
    up(ParallelLinearConfig::row(4, 4).with_parts([FusedPart::new(4)]).with_input_is_parallel(false)))]
#[case::orthogonal(
    "ParallelLinear `up`: Orthogonal { gain: 1.0 } cannot be initialized shard by shard",
    up(ParallelLinearConfig::new(4, 4).with_initializer(Initializer::Orthogonal { gain: 1.0 })))]
#[case::parts_of_another_sum(
    "`up`: dimension 1 of [4, 4] has size 4, but its parts add up to 6",
    up(ParallelLinearConfig::column(4, 4).with_parts([FusedPart::new(6)])))]
#[case::smoothing(
    "CrossEntropy `vocab 9`: `label_smoothing` 1 is not in [0, 1)",
    CrossEntropyConfig::new(9).with_label_smoothing(1.0))]
#[case::negative_smoothing(
    "CrossEntropy `vocab 9`: `label_smoothing` -0.1 is not in [0, 1)",
    CrossEntropyConfig::new(9).with_label_smoothing(-0.1))]
#[case::no_vocabulary(
    "CrossEntropy `vocab 0`: there are no tokens to predict",
    CrossEntropyConfig::new(0)
)]
#[case::dropping_all(
    "ParallelDropout `blocks.0.dropout`: dropout 1 is not in [0, 1)",
    dropout(1.0)
)]
#[case::dropping_nan(
    "ParallelDropout `blocks.0.dropout`: dropout NaN is not in [0, 1)",
    dropout(f64::NAN)
)]
#[case::heads(
    "SelfAttention `attention`: 6 heads are not divisible by 4 key/value heads and",
    attention(6, 4)
)]
#[case::sinks_with_relative_bias(
    "SelfAttention `attention`: a relative bias does not support attention sinks",
    attention(4, 4).with_relative_bias(true).with_sinks(true)
)]
#[case::cross_heads(
    "CrossAttention `cross`: 6 heads are not divisible by 4 key/value heads and",
    cross(6).with_num_kv_heads(Some(4))
)]
#[case::cross_dropout("CrossAttention `cross`: dropout 1 is not in [0, 1)", cross(4).with_dropout(1.0))]
#[case::no_buckets(
    "RelativeBias `bias`: 0 buckets must be 2 or more",
    RelativeBiasConfig::new(0, 16, 4).with_name("bias")
)]
#[case::no_kv_heads(
    "SelfAttention `attention`: 6 heads are not divisible by 0 key/value heads and",
    attention(6, 0)
)]
fn a_contradiction_is_refused_under_every_layout(
    #[case] expected: &str,
    #[case] config: impl Layer,
    #[values(1, 2)] ranks: usize,
) {
    let message = message(ranks, config);
    assert!(message.starts_with(expected), "{message}");
}

#[rstest]
#[case::columns(
    "ParallelLinear `up`: 10 output features are not divisible over 4 ranks; use a multiple of 4",
    up(ParallelLinearConfig::new(8, 10))
)]
#[case::fewer_columns_than_ranks(
    "ParallelLinear `up`: 2 output features are not divisible over 4 ranks; use a multiple of 4",
    up(ParallelLinearConfig::new(8, 2))
)]
#[case::rows(
    "ParallelLinear `up`: 10 input features are not divisible over 4 ranks",
    up(ParallelLinearConfig::row(10, 8))
)]
#[case::fewer_rows_than_ranks(
    "ParallelLinear `up`: 2 input features are not divisible over 4 ranks",
    up(ParallelLinearConfig::row(2, 8))
)]
#[case::row_parts(
    "ParallelLinear `up`: 6 input features are not divisible over 4 ranks; use a multiple of 12",
    up(ParallelLinearConfig::row(6, 8).with_parts([FusedPart::units(2, 3)])))]
#[case::column_parts(
    "`up`: a part of 6 units of 2 cannot be sharded over 4 tp ranks",
    up(ParallelLinearConfig::column(8, 12).with_parts([FusedPart::units(6, 2)])))]
#[case::heads(
    "SelfAttention `attention`: 6 heads are not divisible by 2 key/value heads and 4 tensor-parallel ranks",
    attention(6, 2)
)]
#[case::key_value_heads(
    "`attention.qkv`: a part of 6 units of 2 cannot be sharded over 4 tp ranks",
    attention(12, 6)
)]
#[case::cross_heads(
    "CrossAttention `cross`: 6 heads are not divisible by 2 key/value heads and 4 tensor-parallel ranks",
    cross(6).with_num_kv_heads(Some(2))
)]
#[case::cross_key_value_heads(
    "`cross.q`: a part of 6 units of 2 cannot be sharded over 4 tp ranks",
    cross(6)
)]
#[case::heads_of_a_bias(
    "`bias`: a part of 6 units of 1 cannot be sharded over 4 tp ranks",
    RelativeBiasConfig::new(8, 16, 6).with_name("bias")
)]
#[case::mlp(
    "`mlp.up`: a part of 6 units of 1 cannot be sharded over 4 tp ranks",
    MlpConfig::gated(8, 6).with_name("mlp"))]
fn features_that_do_not_divide_are_refused(#[case] expected: &str, #[case] config: impl Layer) {
    let message = message(4, config);
    assert!(message.starts_with(expected), "{message}");
}

#[test]
fn an_orthogonal_layer_may_be_drawn_whole() {
    let config = ParallelLinearConfig::new(4, 4)
        .with_bias(false)
        .with_initializer(Initializer::Orthogonal { gain: 1.0 });
    let layer = config.init(&Group::single(0), &Device::flex()).unwrap();
    let weight = layer.weight.val();
    let product: Vec<f32> = weight
        .clone()
        .matmul(weight.transpose())
        .into_data()
        .iter()
        .collect();
    for (i, value) in product.into_iter().enumerate() {
        let unit = if i % 5 == 0 { 1.0 } else { 0.0 };
        assert!((value - unit).abs() < 1e-5, "element {i}: {value}");
    }
}

#[test]
fn ranks_that_share_sequences_are_refused_by_name() {
    let messages = on_ranks(2, 0, |group| {
        let groups = AttentionGroups {
            tp: Group::single(0),
            cp: ContextParallel::new(&group, ContextComm::P2p).unwrap(),
        };
        let device = Device::flex();
        let crossed = cross(4).init(groups.clone(), &device).unwrap_err();
        let biased = attention(4, 4).with_relative_bias(true);
        let biased = biased.init(groups, &device).unwrap_err();
        [crossed.to_string(), biased.to_string()]
    });
    for [crossed, biased] in messages {
        let why = "does not support sequences that 2 context-parallel ranks share: set cp = 1";
        assert_eq!(
            crossed,
            format!("CrossAttention `cross`: cross attention {why}")
        );
        assert_eq!(
            biased,
            format!("SelfAttention `attention`: a relative bias {why}")
        );
    }
}
