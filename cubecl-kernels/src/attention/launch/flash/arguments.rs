//! The kernels' arguments that follow from the options and the tensors.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::bounds::bounds;
use crate::attention::kernels::flash::visible::{Mask, Side, Visible, VisibleLaunch};
use crate::attention::kernels::flash::{
    Dropout, DropoutLaunch, Dropped, RowsLaunch, Scale, ScaleLaunch,
};
use crate::attention::options::{AttentionDropout, AttentionOptions};
use crate::dropout::kept;
use crate::kernel_parts::RandomStream;

impl Scale {
    pub(super) fn launch_arg(options: &AttentionOptions, d: usize) -> ScaleLaunch {
        let factor = options.factor(d);
        let (share, base_2) = Self::numbers(options, d);
        let of_bias = (std::f64::consts::LOG2_E / f64::from(base_2)) as f32;
        ScaleLaunch::new(share, base_2, factor as f32, of_bias)
    }

    /// Whether the factors are normal and positive numbers, as the kernels require.
    pub(super) fn fits(options: &AttentionOptions, d: usize) -> bool {
        let (share, base_2) = Self::numbers(options, d);
        let factor = options.factor(d) as f32;
        [factor, share, base_2]
            .iter()
            .all(|number| number.is_normal() && *number > 0.0)
    }

    fn numbers(options: &AttentionOptions, d: usize) -> (f32, f32) {
        let factor = options.factor(d);
        let cap = options.soft_cap.unwrap_or(factor);
        (
            (factor / cap) as f32,
            (cap * std::f64::consts::LOG2_E) as f32,
        )
    }
}

impl Dropped {
    pub(super) fn of(options: &AttentionOptions) -> Self {
        let Some(AttentionDropout { key, .. }) = &options.dropout else {
            return Self::No;
        };
        let (first, by) = key.numbers();
        if by[..3]
            .iter()
            .chain([&first])
            .all(|number| number.is_multiple_of(2))
        {
            Self::Pairs
        } else {
            Self::Each
        }
    }
}

impl Dropout {
    pub(super) fn launch_arg(options: &AttentionOptions) -> DropoutLaunch {
        let Some(AttentionDropout { p, key }) = &options.dropout else {
            return DropoutLaunch {
                random: RandomStream::nothing(),
                first: 0,
                by_row: 0,
                by_head: 0,
                by_query: 0,
                p: 0.0,
                kept: 1.0,
            };
        };
        let (first, by) = key.numbers();
        DropoutLaunch {
            random: RandomStream::of(key.rng()),
            first,
            by_row: by[0],
            by_head: by[1],
            by_query: by[2],
            p: *p as f32,
            kept: kept(*p),
        }
    }
}

impl Mask {
    pub(super) fn of(options: &AttentionOptions) -> Self {
        Self {
            causal: options.causal,
            windowed: options.window.is_some(),
            packed: options.sequences.is_some(),
        }
    }
}

impl Visible {
    pub(super) fn launch_arg(options: &AttentionOptions) -> VisibleLaunch {
        // A window longer than any sequence has no effect.
        let window = options.window.unwrap_or(0).min(i32::MAX as usize / 2) as i32;
        VisibleLaunch::new(options.query_offset as i32, window)
    }
}

/// The lines of the bias, or `q` as an unused placeholder.
pub(super) fn line_of(bias: Option<&CubeTensor>, q: &CubeTensor) -> BufferArg {
    bias.unwrap_or(q).clone().into_buffer_arg()
}

/// The bounds of packed sequences, or `q` as an unused placeholder.
pub(super) fn bounds_of(options: &AttentionOptions, side: Side, q: &CubeTensor) -> BufferArg {
    let bounds = options.sequences.as_ref().map(|packed| bounds(packed, q));
    let tensor = bounds.map(|bounds| match side {
        Side::Keys => bounds.of_queries,
        Side::Queries => bounds.of_keys,
    });
    tensor.unwrap_or_else(|| q.clone()).into_buffer_arg()
}

pub(super) fn dims(x: &CubeTensor) -> [usize; 4] {
    x.meta.shape().dims()
}

pub(super) fn rows(x: &CubeTensor) -> RowsLaunch {
    let strides = x.meta.strides();
    RowsLaunch {
        position: strides[0],
        batch: strides[1],
        head: strides[2],
        len: x.meta.shape()[0] as u32,
    }
}

pub(super) fn dtype_of(x: &CubeTensor) -> ElemType {
    burn::backend::cubecl::dtype_to_storage_type(x.dtype)
}
