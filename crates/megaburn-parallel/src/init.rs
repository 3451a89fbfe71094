//! Initial values of parameters. They are `rng(seed, path, global index)`, so a weight starts
//! bit-identical under every layout.

use burn::{
    module::{Param, ParamId},
    nn::Initializer,
    prelude::Device,
    tensor::{Tensor, TensorData},
};
use megaburn_collective::Group;
use megaburn_mesh::{PositionRng, Purpose, ShardSpec};
use rayon::prelude::*;

use crate::{error::ParallelError, unsaved_shard::unsaved_shard};

/// `with_name` for configurations whose field `path` keys the draw. (Burn's derive would generate a
/// setter that takes an `Option<String>`.)
macro_rules! named {
    ($config:ty) => {
        impl $config {
            /// Names the layer by its path in the model, which keys the draw of its weights.
            pub fn with_name(mut self, path: impl Into<String>) -> Self {
                self.path = Some(path.into());
                self
            }
        }
    };
}

pub(crate) use named;

/// The key and the size of a parameter's draw.
pub(crate) struct InitDraw<'a> {
    /// The layer's type, for error messages.
    pub(crate) layer: &'static str,
    /// The layer's path in the model, if it has one.
    pub(crate) name: Option<&'a str>,
    /// The field: `weight` or `bias`.
    pub(crate) field: &'static str,
    pub(crate) initializer: &'a Initializer,
    /// Global input and output features, so that a shard has the distribution of the full
    /// parameter.
    pub(crate) fans: [usize; 2],
}

impl InitDraw<'_> {
    /// This rank's shard. Without a name, in a group of one, it is drawn by Burn.
    pub(crate) fn param<const D: usize>(
        &self,
        spec: &ShardSpec,
        group: &Group,
        device: &Device,
    ) -> Result<Param<Tensor<D>>, ParallelError> {
        let Self {
            layer,
            name,
            field,
            initializer,
            fans: [fan_in, fan_out],
        } = *self;
        let Some(name) = name else {
            if group.size() > 1 {
                let (group, size) = (group.name().to_string(), group.size());
                return Err(ParallelError::Unnamed { layer, group, size });
            }
            return Ok(drawn_by_burn(spec, initializer, self.fans, device));
        };
        let law = InitLaw::of(initializer, fan_in as f64, fan_out as f64).ok_or_else(|| {
            let why = format!(
                "{initializer:?} cannot be initialized shard by shard; use another \
                              initializer"
            );
            ParallelError::Config {
                layer,
                name: name.to_string(),
                why,
            }
        })?;
        let rng = PositionRng::new(group.seed(), Purpose::Init, &format!("{name}.{field}"));
        let shape = spec.local_shape();
        let of_shard = spec.clone();
        let spec = spec.clone();
        let lazy_shape = shape.clone();
        // Drawn at first use, so that a model that is loaded from a checkpoint never draws.
        let draw = move |device: &Device, require_grad: bool| {
            let mut values = vec![0.0; shape.iter().product()];
            let runs = runs_of(&spec, &mut values).into_par_iter();
            runs.for_each(|(global, out)| law.fill(&rng, global, out));
            let values = Tensor::from_data(TensorData::new(values, shape), device);
            values.set_require_grad(require_grad)
        };
        let param = Param::uninitialized(
            ParamId::new(),
            draw,
            device.clone(),
            true,
            lazy_shape.into(),
        );
        Ok(unsaved_shard(
            param,
            format!("{name}.{field}"),
            &of_shard,
            group,
        ))
    }
}

/// Elements that one thread draws at a time.
const RUN_LEN: usize = 1 << 16;

/// The runs of `values`, a rank's shard, that are to be drawn, each with the global index of its
/// first element. All other elements are padding.
fn runs_of<'a>(spec: &ShardSpec, values: &'a mut [f32]) -> Vec<(u64, &'a mut [f32])> {
    let mut runs = Vec::new();
    for piece in &spec.pieces {
        spec.for_each_run(piece, |local, global, len| runs.push((local, global, len)));
    }
    runs.sort_unstable();
    let mut rest = values;
    let mut at = 0;
    let mut stretches = Vec::new();
    for (local, global, len) in runs {
        let (run, behind) = std::mem::take(&mut rest)[local - at..].split_at_mut(len);
        rest = behind;
        at = local + len;
        let starts = (global as u64..).step_by(RUN_LEN);
        stretches.extend(starts.zip(run.chunks_mut(RUN_LEN)));
    }
    stretches
}

/// The full parameter as Burn draws it, with zeros as padding.
fn drawn_by_burn<const D: usize>(
    spec: &ShardSpec,
    initializer: &Initializer,
    [fan_in, fan_out]: [usize; 2],
    device: &Device,
) -> Param<Tensor<D>> {
    let param = initializer.init_with(
        spec.global_shape.clone(),
        Some(fan_in),
        Some(fan_out),
        device,
    );
    let padding = spec.local_len - spec.global_shape[spec.dim];
    if padding == 0 {
        return param;
    }
    let values: Tensor<D> = param.val().inner();
    let mut shape = values.dims();
    shape[spec.dim] = padding;
    let zeros = Tensor::zeros(shape, (&values.device(), values.dtype()));
    Param::from_data(
        Tensor::cat(vec![values, zeros], spec.dim).into_data(),
        device,
    )
}

/// A Burn initializer with its fans resolved.
enum InitLaw {
    Constant(f32),
    Uniform { low: f32, width: f32 },
    Normal { mean: f32, std: f32 },
}

impl InitLaw {
    fn of(initializer: &Initializer, fan_in: f64, fan_out: f64) -> Option<Self> {
        let uniform = |a: f64| Self::Uniform {
            low: -a as f32,
            width: (2.0 * a) as f32,
        };
        let normal = |std: f64| Self::Normal {
            mean: 0.0,
            std: std as f32,
        };
        let kaiming = |fan_out_only| 1.0 / f64::sqrt(if fan_out_only { fan_out } else { fan_in });
        let xavier = (2.0 / (fan_in + fan_out)).sqrt();
        Some(match *initializer {
            Initializer::Constant { value } => Self::Constant(value as f32),
            Initializer::Ones => Self::Constant(1.0),
            Initializer::Zeros => Self::Constant(0.0),
            Initializer::Uniform { min, max } => Self::Uniform {
                low: min as f32,
                width: (max - min) as f32,
            },
            Initializer::Normal { mean, std } => Self::Normal {
                mean: mean as f32,
                std: std as f32,
            },
            Initializer::KaimingUniform { gain, fan_out_only } => {
                uniform(3f64.sqrt() * gain * kaiming(fan_out_only))
            }
            Initializer::KaimingNormal { gain, fan_out_only } => {
                normal(gain * kaiming(fan_out_only))
            }
            Initializer::XavierUniform { gain } => uniform(3f64.sqrt() * gain * xavier),
            Initializer::XavierNormal { gain } => normal(gain * xavier),
            Initializer::Orthogonal { .. } => return None,
        })
    }

    fn fill(&self, rng: &PositionRng, start: u64, out: &mut [f32]) {
        match *self {
            Self::Constant(value) => out.fill(value),
            Self::Uniform { low, width } => {
                rng.fill_uniform(start, out);
                out.iter_mut().for_each(|x| *x = low + width * *x);
            }
            Self::Normal { mean, std } => {
                rng.fill_normal(start, out);
                out.iter_mut().for_each(|x| *x = mean + std * *x);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use megaburn_mesh::{Axis, FusedPart};

    use super::*;

    #[test]
    fn a_part_is_drawn_as_the_whole_is() {
        let rng = PositionRng::new(7, Purpose::Init, "w");
        let law = InitLaw::Normal {
            mean: 0.5,
            std: 2.0,
        };
        let drawn = |spec: &ShardSpec| {
            let mut values = vec![f32::NAN; spec.local_shape().iter().product()];
            runs_of(spec, &mut values)
                .into_par_iter()
                .for_each(|(at, out)| law.fill(&rng, at, out));
            values
        };
        // Rows longer than one run, and [q | k | v] columns whose keys and values are replicated.
        let rows = 3;
        let cols = 2 * RUN_LEN + 12;
        let mut whole = vec![0.0; rows * cols];
        law.fill(&rng, 0, &mut whole);
        assert_eq!(
            drawn(&ShardSpec::whole(&[rows, cols], Axis::Tp, 0, 1)),
            whole
        );
        let sizes = [
            FusedPart::new(cols - 8),
            FusedPart::units(2, 2),
            FusedPart::units(2, 2),
        ];
        for rank in 0..4 {
            let spec = ShardSpec::split(&[rows, cols], 1, &sizes, Axis::Tp, rank, 4).unwrap();
            let mut expected = vec![f32::NAN; spec.local_shape().iter().product()];
            for piece in &spec.pieces {
                spec.for_each_run(piece, |local, global, len| {
                    expected[local..local + len].copy_from_slice(&whole[global..global + len]);
                });
            }
            assert_eq!(drawn(&spec), expected);
        }
    }
}
