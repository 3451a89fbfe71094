//! Splits a model that was built for one rank by a plan of path patterns.

mod attention;
mod broadcast;
mod cut;
mod dropout;
mod layers;
mod pairs;
mod pattern;
mod plan;
mod refusal;

use std::collections::BTreeMap;

use burn::module::Module;
use megaburn_collective::Group;

pub use attention::{ParallelMhaInput, ParallelMultiHeadAttention};
pub use dropout::ReplicatedDropout;
pub use layers::Layers;
pub use plan::{ParallelPlan, Rule, Style};

pub(crate) use cut::{Cut, cut};
pub(crate) use layers::{Kind, SplitLayer};
use layers::{Layer, Step};
use pairs::{check_pairs, check_siblings};
use pattern::Pattern;
use refusal::refuse;

use crate::{
    error::ParallelError,
    shards::{Sharded, shard_plan},
};

/// Splits the layers of a module that was built for one rank over the ranks of a group, as PyTorch's
/// `parallelize_module` does. Rank 0's weights are sent to all ranks, of which each keeps its parts.
///
/// A Burn module needs these edits before: fields of `nn::Linear` become [`ParallelLinear`], those
/// of `nn::Embedding` [`VocabParallelEmbedding`], and those of `nn::attention::MultiHeadAttention`
/// [`ParallelMultiHeadAttention`], built with `.into()`; other Burn layers are marked
/// `#[sharded(replicated)]`, and `nn::Dropout` becomes [`ReplicatedDropout`] or, where activations
/// are split, is marked `#[sharded(skip)]`; the module derives [`Sharded`]. Its `forward` stays as
/// it is, except that an attention of your own has this rank's heads only: reshape to the features
/// of a head, not to the number of heads. A layer that no pattern matches stays whole, with copies
/// on all ranks, which all apply it to the same activations. A layer between a column and a row
/// therefore has to be split; a linear layer in the module that has both needs a pattern, which may
/// be [`ParallelPlan::whole`].
///
/// [`ParallelLinear`]: crate::ParallelLinear
/// [`VocabParallelEmbedding`]: crate::VocabParallelEmbedding
///
/// ```
/// use burn::{
///     module::Module,
///     nn::{LayerNorm, LayerNormConfig, LinearConfig},
///     prelude::Device,
///     tensor::{Tensor, activation::gelu},
/// };
/// use megaburn_collective::{GroupOptions, run_threads};
/// use megaburn_parallel::{ParallelLinear, ParallelPlan, Sharded, parallelize};
///
/// #[derive(Module, Sharded, Debug)]
/// struct Mlp {
///     #[sharded(replicated)]
///     norm: LayerNorm,
///     up: ParallelLinear, // was Linear
///     down: ParallelLinear,
/// }
///
/// impl Mlp {
///     fn new(device: &Device) -> Self {
///         Self {
///             norm: LayerNormConfig::new(8).init(device),
///             up: LinearConfig::new(8, 32).init(device).into(),
///             down: LinearConfig::new(32, 8).init(device).into(),
///         }
///     }
///
///     fn forward(&self, x: Tensor<3>) -> Tensor<3> {
///         self.down.forward(gelu(self.up.forward(self.norm.forward(x))))
///     }
/// }
///
/// let device = Device::flex();
/// let mlp = Mlp::new(&device);
/// let x = Tensor::<3>::ones([2, 3, 8], &device);
/// let expected = mlp.forward(x.clone()).into_data();
/// let plan = ParallelPlan::new().column("up").row("down");
/// for output in run_threads(4, GroupOptions::default(), |group| {
///     let mlp = parallelize(mlp.clone(), &plan, &group)?;
///     assert_eq!(mlp.up.weight.dims(), [8, 8]);
///     Ok::<_, megaburn_parallel::ParallelError>(mlp.forward(x.clone()).into_data())
/// }) {
///     output.unwrap().assert_approx_eq::<f32>(&expected, Default::default());
/// }
/// ```
///
/// # Errors
/// A pattern matches no layer, or a layer that its style does not fit; two patterns match one layer;
/// a column split without a row split in the same module, or the reverse; a linear layer without a
/// pattern next to both; features, heads or a
/// vocabulary that do not divide; a layer that is split already, or was built with a group.
/// # Collective
/// All members of `group`: a broadcast of each parameter.
pub fn parallelize<M: Module + Sharded>(
    mut module: M,
    plan: &ParallelPlan,
    group: &Group,
) -> Result<M, ParallelError> {
    let mut layers = Layers::new(Step::List(Vec::new()));
    module.parallelize(&mut layers);
    let rules = check(plan, &layers.into_list()?)?;
    let mut module = broadcast::from_first(module, group)?;
    let mut layers = Layers::new(Step::Split {
        rules: &rules,
        group,
    });
    module.parallelize(&mut layers);
    layers.into_result()?;
    shard_plan(&module)?;
    Ok(module)
}

/// The rule of each layer that has one.
fn check(plan: &ParallelPlan, layers: &[Layer]) -> Result<BTreeMap<String, Rule>, ParallelError> {
    let mut found: BTreeMap<String, Rule> = BTreeMap::new();
    for rule in &plan.rules {
        let pattern = Pattern::new(&rule.pattern)?;
        let matched: Vec<_> = layers
            .iter()
            .filter(|layer| pattern.matches(&layer.path))
            .collect();
        if matched.is_empty() {
            return refuse(&rule.pattern, nothing(layers));
        }
        for layer in matched {
            fits(rule, layer)?;
            if let Some(other) = found.insert(layer.path.clone(), rule.clone()) {
                let (first, second) = (&other.pattern, &rule.pattern);
                let why = format!("two patterns match it, `{first}` and `{second}`; keep one");
                return refuse(&layer.path, why);
            }
        }
    }
    check_pairs(&found)?;
    check_siblings(&found, layers)?;
    Ok(found)
}

/// The message for a pattern without a layer.
fn nothing(layers: &[Layer]) -> String {
    let is_split = |layer: &&Layer| !matches!(layer.kind, Kind::Plain(_));
    let mut paths: Vec<_> = layers.iter().filter(is_split).collect();
    let others = paths.len().saturating_sub(6);
    paths.truncate(6);
    let paths: Vec<_> = paths
        .iter()
        .map(|layer| format!("`{}`", layer.path))
        .collect();
    let more = if others > 0 {
        format!(" and {others} more")
    } else {
        String::new()
    };
    format!(
        "the pattern matches no layer; the module's are {}{more}",
        paths.join(", ")
    )
}

/// Refuses a style that the layer does not have.
fn fits(rule: &Rule, layer: &Layer) -> Result<(), ParallelError> {
    match (&layer.kind, rule.style) {
        (_, Style::Whole) if rule.heads.is_some() => refuse(
            &layer.path,
            "a layer that is not split has no split heads; leave `heads` out".into(),
        ),
        (_, Style::Whole) => Ok(()),
        (Kind::Linear, Style::Vocabulary) => refuse(
            &layer.path,
            "`vocabulary` splits an embedding, and this is a linear layer: use `column`, \
            `column_gathered` or `row`"
                .into(),
        ),
        (Kind::Embedding, Style::Column | Style::ColumnGathered | Style::Row) => refuse(
            &layer.path,
            "this is an embedding, whose rows `vocabulary` splits".into(),
        ),
        (Kind::Plain(name), _) => refuse(
            &layer.path,
            format!(
                "`{name}` is a plain Burn layer, which cannot be split; make the field a \
                `ParallelLinear` or `VocabParallelEmbedding`, built with `.into()`"
            ),
        ),
        _ => Ok(()),
    }
}
