use std::fmt;

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::{
        DType, Tensor,
        quantization::{
            Calibration, CalibrationRange, QuantScheme, compute_q_params, compute_range,
        },
    },
};
use megaburn_collective::{
    CollectiveError, Group, GroupShards, Lane, ParamShards, ReduceOp, tensors,
};

use crate::{
    error::ParallelError,
    shards::{Sharded, shard_plan},
};

/// Quantises weights that are shards to the values that one rank's `quantize_weights` would give the
/// full module: the scale of a matrix comes from all of its shards. (Burn's `quantize_weights` would
/// take each shard's own.)
///
/// Layers of this crate dequantise a weight where they multiply by it, to the type of the input. The
/// vectors of a quantised embedding are f32.
///
/// ```
/// use burn::{
///     module::Module,
///     prelude::Device,
///     tensor::quantization::{Calibration, QuantValue},
/// };
/// use megaburn_collective::{GroupOptions, run_threads};
/// use megaburn_parallel::{
///     ParallelError, ParallelLinear, ParallelLinearConfig, Sharded, ShardedQuantizer,
/// };
///
/// #[derive(Module, Sharded, Debug)]
/// struct Net {
///     up: ParallelLinear,
/// }
///
/// let ranks = run_threads(2, GroupOptions::default(), |group| {
///     let device = Device::flex();
///     let up = ParallelLinearConfig::column(4, 8).with_name("up");
///     let net = Net { up: up.init(&group, &device)? };
///     let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
///     ShardedQuantizer::new(Calibration::MinMax, scheme).apply(net, &group)
/// });
/// ranks.into_iter().for_each(|net| drop(net.unwrap()));
/// ```
pub struct ShardedQuantizer {
    calibration: Calibration,
    scheme: QuantScheme,
    is_member: Box<dyn Fn(&str) -> bool>,
}

impl ShardedQuantizer {
    /// Quantises all matrices.
    pub fn new(calibration: Calibration, scheme: QuantScheme) -> Self {
        Self {
            calibration,
            scheme,
            is_member: Box::new(|_| true),
        }
    }

    /// Quantises the matrices whose path `is_member` accepts.
    #[must_use]
    pub fn with_group(mut self, is_member: impl Fn(&str) -> bool + 'static) -> Self {
        self.is_member = Box::new(is_member);
        self
    }

    /// Quantises a module, which cannot be trained or saved then, but whose weights
    /// [`ShardedLora`](super::ShardedLora) adapts.
    ///
    /// # Errors
    /// The scheme has a scale for each block, and a shard could cut blocks; `group` is not the group
    /// that splits the module. See also [`shard_plan`].
    /// # Collective
    /// All members of `group`: two all-reduces of a number for each matrix that is split.
    pub fn apply<M: Module + Sharded>(&self, module: M, group: &Group) -> Result<M, ParallelError> {
        let shards = GroupShards::new(&shard_plan(&module)?, group);
        let shards = shards.map_err(|error| ParallelError::Plan {
            why: error.to_string(),
        })?;
        let has_blocks = self.scheme.block_size().is_some();
        let is_wanted = |param: &ParamShards| param.own().global_shape.len() == 2;
        if let Some((path, _)) = shards.iter().find(|(path, param)| {
            has_blocks && param.is_split() && is_wanted(param) && (self.is_member)(path)
        }) {
            return Err(ParallelError::Config {
                layer: "ShardedQuantizer",
                name: path.into(),
                why:
                    "a scheme with a scale for each block could cut blocks between ranks; use one \
                    scale per tensor"
                        .into(),
            });
        }
        let mut mapper = Quantize {
            path: Vec::new(),
            quantizer: self,
            shards: &shards,
            error: None,
        };
        let module = module.map(&mut mapper);
        match mapper.error {
            Some(error) => Err(error.into()),
            None => Ok(module),
        }
    }

    /// The range of the full matrix.
    fn range(
        &self,
        local: &Tensor<2>,
        shards: &ParamShards,
    ) -> Result<CalibrationRange, CollectiveError> {
        let own = compute_range(&self.scheme, local, &self.calibration);
        if !shards.is_split() {
            return Ok(own);
        }
        let reduced = |x, op| {
            let reduced = tensors::all_reduce(x, op, shards.group(), Lane::InOrder)?;
            Ok::<Tensor<1>, CollectiveError>(reduced.wait())
        };
        if matches!(self.calibration, Calibration::AbsMean) {
            // Neither padding nor copies count.
            let spec = shards.own();
            let mut sum = own.max.zeros_like();
            for piece in spec.owned() {
                let (start, len) = (piece.local.start, piece.local.len());
                sum = sum + local.clone().narrow(spec.dim, start, len).abs().sum();
            }
            let mean = reduced(sum, ReduceOp::Sum)?.div_scalar(spec.num_global() as f64);
            return Ok(CalibrationRange {
                min: mean.clone().neg(),
                max: mean,
            });
        }
        Ok(CalibrationRange {
            min: reduced(own.min.neg(), ReduceOp::Max)?.neg(),
            max: reduced(own.max, ReduceOp::Max)?,
        })
    }
}

impl fmt::Debug for ShardedQuantizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedQuantizer")
            .field("scheme", &self.scheme)
            .finish()
    }
}

struct Quantize<'a> {
    path: Vec<String>,
    quantizer: &'a ShardedQuantizer,
    shards: &'a GroupShards,
    error: Option<CollectiveError>,
}

impl ModuleMapper for Quantize<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let Some(shards) = self.shards.get(&path) else {
            return param;
        };
        let quantizer = self.quantizer;
        let is_wanted = D == 2 && (quantizer.is_member)(&path) && self.error.is_none();
        if !is_wanted || matches!(param.base().dtype(), DType::QFloat(_)) {
            return param;
        }
        let value = param.base();
        let [rows, columns] = [value.dims()[0], value.dims()[1]];
        let is_autodiff = value.is_autodiff();
        let value = if is_autodiff { value.inner() } else { value };
        match quantizer.range(&value.reshape([rows, columns]), shards) {
            Ok(CalibrationRange { min, max }) => param.map(|value| {
                let on_device = |x| {
                    if is_autodiff {
                        Tensor::from_inner(x)
                    } else {
                        x
                    }
                };
                let range = CalibrationRange {
                    min: on_device(min),
                    max: on_device(max),
                };
                let params = compute_q_params(&quantizer.scheme, range);
                value.quantize(&quantizer.scheme, params)
            }),
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}
