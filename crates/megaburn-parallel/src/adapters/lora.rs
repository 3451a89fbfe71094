use std::{collections::BTreeMap, fmt};

use burn::{
    module::{Module, Param, Reparameterizer},
    nn::Initializer,
    prelude::Device,
    tensor::{DType, FloatDType, Tensor},
};
use megaburn_collective::Group;
use megaburn_mesh::ShardSpec;

use super::adapter::{LoraParts, LoraSplit, ShardedAdapter};
use crate::{
    error::ParallelError,
    init::InitDraw,
    shards::{PlanBuilder, Sharded, quantized_layers, shard_plan},
};

/// LoRA of weights that are shards: `W + scale A B`, where W is frozen and A and B are trained.
///
/// The factors follow the split of the weight: with columns `W_i`, `A` is the same on every rank and
/// `B_i` has this rank's columns; with rows, `A_i` has this rank's rows and `B` is the same. Values
/// and gradients are those of one rank, whatever the number of ranks. The paths of the factors
/// (`weight.lora.a`, `weight.lora.b`) are those of Burn's `apply_lora`, so records of either are read
/// by the other. `Module::materialize` merges them into the weights.
///
/// Source: Hu et al. (2021); Burn's `Lora`.
///
/// ```
/// use burn::{
///     module::Module,
///     optim::{AdamWConfig, GradientsParams},
///     prelude::Device,
///     tensor::Tensor,
/// };
/// use megaburn_collective::{GroupOptions, run_threads};
/// use megaburn_parallel::{
///     ParallelError, ParallelLinear, ParallelLinearConfig, Sharded, ShardedLora,
/// };
///
/// #[derive(Module, Sharded, Debug)]
/// struct Net {
///     up: ParallelLinear,
///     down: ParallelLinear,
/// }
///
/// let shapes = run_threads(2, GroupOptions::default(), |group| {
///     let device = Device::flex().autodiff();
///     let up = ParallelLinearConfig::column(4, 8).with_name("up");
///     let down = ParallelLinearConfig::row(8, 4).with_name("down");
///     let net = Net { up: up.init(&group, &device)?, down: down.init(&group, &device)? };
///     let net = ShardedLora::new(2, 4.0).apply(net)?;
///
///     let x = Tensor::<2>::ones([3, 4], &device);
///     let loss = net.down.forward(net.up.forward(x)).mean();
///     let grads = GradientsParams::from_grads(loss.backward(), &net);
///     assert_eq!(grads.len(), 4); // two factors of each weight
///     let net = AdamWConfig::new().init().step(1e-3, net, grads);
///     Ok::<_, ParallelError>(net.materialize().up.weight.dims())
/// });
/// assert!(shapes.into_iter().all(|shape| shape.unwrap() == [4, 4]));
/// ```
pub struct ShardedLora {
    rank: usize,
    alpha: f64,
    init_std: Option<f64>,
    is_member: Box<dyn Fn(&str) -> bool>,
}

impl ShardedLora {
    /// Adapts all matrices of linear layers and embeddings with factors of rank `rank`, whose product
    /// is scaled by `alpha / rank`.
    pub fn new(rank: usize, alpha: f64) -> Self {
        Self {
            rank,
            alpha,
            init_std: None,
            is_member: Box::new(|_| true),
        }
    }

    /// Adapts the matrices whose path `is_member` accepts, e.g. `blocks.0.attention.qkv.weight`.
    #[must_use]
    pub fn with_group(mut self, is_member: impl Fn(&str) -> bool + 'static) -> Self {
        self.is_member = Box::new(is_member);
        self
    }

    /// The standard deviation of A at first, which is `1 / rank` by default; B is zero.
    #[must_use]
    pub fn with_init_std(mut self, init_std: f64) -> Self {
        self.init_std = Some(init_std);
        self
    }

    /// Freezes a module and attaches factors to its matrices.
    ///
    /// # Errors
    /// No matrix is adapted; one has key/value heads that several ranks hold, is quantised by a
    /// recipe, or is adapted already. See also [`shard_plan`].
    /// # Collective
    /// Nothing is sent; every member draws its own part of A.
    pub fn apply<M: Module + Sharded>(&self, module: M) -> Result<M, ParallelError> {
        let plan = shard_plan(&module)?;
        if let Some((path, _)) = plan.iter().find(|(path, _)| path.ends_with(".lora.a")) {
            return Err(ParallelError::Config {
                layer: "ShardedLora",
                name: path.into(),
                why: "the module has factors already; merge them first with `materialize`".into(),
            });
        }
        let mut builder = PlanBuilder::default();
        module.shards(&mut builder);
        let recipes = quantized_layers(&module);
        let mut wanted = BTreeMap::new();
        for (path, group) in builder.into_adaptable() {
            let spec = plan.get(&path).map(|spec| spec.shard.clone());
            let Some(spec) = spec.filter(|_| (self.is_member)(&path)) else {
                continue;
            };
            let layer = path.rsplit_once('.').map_or("", |(layer, _)| layer);
            let refuse = |why: &str| {
                Err(ParallelError::Config {
                    layer: "ShardedLora",
                    name: path.clone(),
                    why: why.into(),
                })
            };
            let is_split = spec.local_shape() != spec.global_shape;
            if is_split && spec.pieces.iter().any(|piece| piece.replicas > 1) {
                return refuse(
                    "several ranks hold the same key/value heads, whose gradients A would count \
                    several times; use at most as many ranks as there are such heads",
                );
            }
            if recipes.contains_key(layer) {
                return refuse(
                    "its products are quantised by a recipe; build it without `precision`",
                );
            }
            wanted.insert(path, (spec, group));
        }
        if wanted.is_empty() {
            return Err(ParallelError::Config {
                layer: "ShardedLora",
                name: "with_group".into(),
                why: "no matrix of a linear layer or embedding is accepted".into(),
            });
        }
        let mut error = None;
        let module = module.apply_reparameterization(Attach {
            lora: self,
            wanted: &wanted,
            error: &mut error,
        });
        if let Some(error) = error {
            return Err(error);
        }
        shard_plan(&module)?;
        Ok(module)
    }

    /// The factors of a weight.
    fn adapter(
        &self,
        path: &str,
        (spec, group): &(ShardSpec, Group),
        (device, base): (&Device, DType),
    ) -> Result<ShardedAdapter, ParallelError> {
        let [rows, columns] = [spec.global_shape[0], spec.global_shape[1]];
        let split = match spec.dim {
            _ if spec.local_shape() == spec.global_shape => LoraSplit::Whole,
            0 => LoraSplit::Rows,
            _ => LoraSplit::Columns,
        };
        let whole =
            |shape: [usize; 2]| ShardSpec::whole(&shape, spec.axis, group.rank(), group.size());
        // The factor that is split has the weight's pieces.
        let like_weight = |shape: [usize; 2]| ShardSpec {
            global_shape: shape.to_vec(),
            ..spec.clone()
        };
        let of_a = [rows, self.rank];
        let of_b = [self.rank, columns];
        let [a, b] = match split {
            LoraSplit::Whole => [whole(of_a), whole(of_b)],
            LoraSplit::Columns => [whole(of_a), like_weight(of_b)],
            LoraSplit::Rows => [like_weight(of_a), whole(of_b)],
        };
        let draw = |field, initializer: &Initializer, spec: &ShardSpec| {
            let draw = InitDraw {
                layer: "ShardedLora",
                name: Some(path),
                field,
                initializer,
                fans: [rows, columns],
            };
            let drawn = draw.param::<2>(spec, group, device)?;
            Ok::<_, ParallelError>(if base.is_float() {
                as_leaf(drawn, base.into(), device)
            } else {
                drawn
            })
        };
        let std = self.init_std.unwrap_or(1.0 / self.rank as f64);
        Ok(ShardedAdapter {
            a: draw("lora.a", &Initializer::Normal { mean: 0.0, std }, &a)?,
            b: draw("lora.b", &Initializer::Zeros, &b)?,
            scale: self.alpha / self.rank as f64,
            parts: LoraParts {
                split,
                specs: [a, b],
                group: group.clone(),
            },
        })
    }
}

impl fmt::Debug for ShardedLora {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedLora")
            .field("rank", &self.rank)
            .field("alpha", &self.alpha)
            .finish()
    }
}

/// The parameter in another type.
fn as_leaf(param: Param<Tensor<2>>, dtype: FloatDType, device: &Device) -> Param<Tensor<2>> {
    if dtype == FloatDType::F32 {
        return param;
    }
    let is_autodiff = device.is_autodiff();
    param.map(|value| {
        if is_autodiff {
            Tensor::from_inner(value.inner().cast(dtype)).require_grad()
        } else {
            value.cast(dtype)
        }
    })
}

/// Attaches factors to the parameters for which there are some, and freezes all.
struct Attach<'a> {
    lora: &'a ShardedLora,
    wanted: &'a BTreeMap<String, (ShardSpec, Group)>,
    error: &'a mut Option<ParallelError>,
}

impl Reparameterizer for Attach<'_> {
    type Reparam = ShardedAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ShardedAdapter>) {
        let frozen = param.set_require_grad(false);
        let Some(place) = self.wanted.get(path) else {
            return (frozen, None);
        };
        let place_of_weight = (&frozen.lazy_device(), frozen.base().dtype());
        match self.lora.adapter(path, place, place_of_weight) {
            Ok(adapter) => (frozen, Some(adapter)),
            Err(error) => {
                *self.error = Some(error);
                (frozen, None)
            }
        }
    }
}
