//! The relative position bias of T5: a learned number per head for each bucket of distances between
//! query and key, which is added to their score.
//!
//! Source: Raffel et al. (2020), "Exploring the limits of transfer learning",
//! <https://arxiv.org/abs/1910.10683>, section 2.1; Transformers `models/t5/modeling_t5.py`,
//! `T5Attention.compute_bias`; Megatron-LM
//! `megatron/core/models/common/embeddings/relative_pos_embedding.py`.

use burn::{
    config::Config,
    module::{Module, Param},
    nn::Initializer,
    prelude::{Device, Int},
    tensor::{DType, Tensor, TensorData},
};
use megaburn_autograd::MainGrad;
use megaburn_collective::Group;
use megaburn_kernels::{EmbeddingOptions, embedding};
use megaburn_mesh::{Axis, FusedPart, ShardSpec};

use crate::{
    error::ParallelError,
    init::{InitDraw, named},
    shards::{PlanBuilder, Sharded},
};

/// Configuration of a [`RelativeBias`].
#[derive(Config, Debug)]
pub struct RelativeBiasConfig {
    /// Number of buckets. A bidirectional bias uses one half for earlier keys and the query's own,
    /// and the other half for later keys.
    pub num_buckets: usize,
    /// Keys at this distance and farther share the last bucket of their direction.
    pub max_distance: usize,
    /// Query heads over all ranks.
    pub num_heads: usize,
    /// Whether queries see later keys, whose distances then have buckets of their own (an encoder).
    #[config(default = false)]
    pub bidirectional: bool,
    /// Initializer of the table.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// The layer's path in the model. Required in a group of more than one.
    pub path: Option<String>,
}

named!(RelativeBiasConfig);

const LAYER: &str = "RelativeBias";

impl RelativeBiasConfig {
    /// Builds the table of this rank's heads.
    ///
    /// # Errors
    /// There are too few buckets or the largest distance is too small for them, the ranks do not
    /// divide the heads, or the layer has no name and the group more than one rank.
    /// # Collective
    /// Nothing is sent.
    pub fn init(&self, group: &Group, device: &Device) -> Result<RelativeBias, ParallelError> {
        let name = self.path.as_deref();
        let buckets = Buckets::of(self).map_err(|why| ParallelError::Config {
            layer: LAYER,
            name: name.unwrap_or("unnamed").into(),
            why,
        })?;
        let shape = [self.num_buckets, self.num_heads];
        let part = [FusedPart::units(self.num_heads, 1)];
        let spec = ShardSpec::split(&shape, 1, &part, Axis::Tp, group.rank(), group.size());
        let spec = spec.map_err(|source| ParallelError::Shard {
            name: name.unwrap_or("unnamed").into(),
            source,
        })?;
        let draw = InitDraw {
            layer: LAYER,
            name,
            field: "weight",
            initializer: &self.initializer,
            fans: shape,
        };
        Ok(RelativeBias {
            weight: draw.param(&spec, group, device)?,
            table: Table {
                buckets,
                spec,
                path: self.path.clone(),
                main_grad: MainGrad::default(),
            },
        })
    }
}

/// The relative position bias of T5, its heads split over a group. All blocks of an encoder share
/// one, and all blocks of a decoder another.
///
/// # Collective
/// Nothing is sent.
#[derive(Module, Debug)]
pub struct RelativeBias {
    /// The bias of each bucket for this rank's heads, `[num_buckets, num_heads / n]`.
    pub weight: Param<Tensor<2>>,
    #[module(skip)]
    table: Table,
}

#[derive(Clone, Debug)]
struct Table {
    buckets: Buckets,
    spec: ShardSpec,
    path: Option<String>,
    main_grad: MainGrad,
}

impl RelativeBias {
    /// The bias of all distances in sequences of up to `num_positions` positions, for
    /// [`PositionTables`](super::PositionTables): one line per head, whose column
    /// `key - query + num_positions - 1` is added to the score of a query and a key.
    ///
    /// # Shapes
    /// Output `[num_heads / n, 1, 2 * num_positions - 1]`, in f32 if the table has less precision
    ///
    /// # Panics
    /// If there is no position.
    pub fn forward(&self, num_positions: usize) -> Tensor<3> {
        assert!(
            num_positions > 0,
            "a relative bias needs at least one position"
        );
        let Table {
            buckets, main_grad, ..
        } = &self.table;
        let last = num_positions as i64 - 1;
        let ids: Vec<i64> = (-last..=last)
            .map(|distance| buckets.of_distance(distance) as i64)
            .collect();
        let ids = TensorData::new(ids, [2 * num_positions - 1, 1]);
        let ids = Tensor::<2, Int>::from_data(ids, &self.weight.device().inner());
        let options = EmbeddingOptions {
            first: None,
            main_grad: Some(main_grad.clone()),
        };
        let line = embedding(self.weight.val(), ids, options).permute([2, 1, 0]);
        match line.dtype() {
            // The gradients of all layers are then summed in f32.
            DType::BF16 | DType::F16 => line.cast(DType::F32),
            _ => line,
        }
    }

    /// Marks the layer as copy `copy`, where pipeline stages share the table. Only copy 0 counts in
    /// norms and checkpoints.
    #[must_use]
    pub fn as_copy(mut self, copy: usize) -> Self {
        self.table.spec = self.table.spec.copy(copy);
        self
    }
}

impl Sharded for RelativeBias {
    fn shards(&self, plan: &mut PlanBuilder) {
        let Table {
            spec,
            path,
            main_grad,
            ..
        } = &self.table;
        plan.drawn_from(path.as_deref());
        plan.vector("weight", spec, Some(main_grad.clone()));
    }
}

/// The line of `s_q` queries from position `start` on to `s_k` keys, `[heads, s_q + s_k - 1]`, from
/// one of [`RelativeBias::forward`].
///
/// # Panics
/// If the line is for fewer positions.
pub(super) fn line(bias: &Tensor<3>, start: usize, s_q: usize, s_k: usize) -> Tensor<2> {
    let [heads, _, columns] = bias.dims();
    let num_positions = columns.div_ceil(2);
    assert!(
        start + s_q <= num_positions && s_k <= num_positions + start,
        "a relative bias for {num_positions} positions does not cover {s_q} queries from position \
        {start} on and {s_k} keys"
    );
    let len = s_q + s_k - 1;
    let bias = bias.clone().reshape([heads, columns]);
    bias.narrow(1, num_positions - start - s_q, len)
}

/// How distances are divided into buckets: the nearest have one each, the farther ones share
/// buckets whose widths grow exponentially.
#[derive(Clone, Copy, Debug)]
struct Buckets {
    /// Buckets of a direction.
    per_direction: usize,
    max_distance: usize,
    bidirectional: bool,
}

impl Buckets {
    fn of(config: &RelativeBiasConfig) -> Result<Self, String> {
        let RelativeBiasConfig {
            num_buckets,
            max_distance,
            bidirectional,
            ..
        } = *config;
        let directions = if bidirectional { 2 } else { 1 };
        let per_direction = num_buckets / directions;
        if per_direction < 2 || !num_buckets.is_multiple_of(directions) {
            let least = 2 * directions;
            return Err(format!(
                "{num_buckets} buckets must be {least} or more, and even if the bias is \
                bidirectional"
            ));
        }
        if max_distance <= per_direction / 2 {
            return Err(format!(
                "the largest distance {max_distance} must exceed {}, the distances that have a \
                bucket each",
                per_direction / 2
            ));
        }
        Ok(Self {
            per_direction,
            max_distance,
            bidirectional,
        })
    }

    /// The bucket of a distance, the key's position less the query's. Computed in f32 as PyTorch
    /// does, whose logarithm is rounded correctly, so that bounds of buckets are those of
    /// Transformers.
    fn of_distance(self, distance: i64) -> usize {
        let Self {
            per_direction,
            max_distance,
            bidirectional,
        } = self;
        let exact = per_direction / 2;
        let (first, steps) = match distance {
            1.. if bidirectional => (per_direction, distance as usize),
            1.. => (0, 0),
            _ => (0, distance.unsigned_abs() as usize),
        };
        if steps < exact {
            return first + steps;
        }
        let octaves = f64::from(steps as f32 / exact as f32).ln() as f32;
        let all = (max_distance as f64 / exact as f64).ln() as f32;
        let beyond = octaves / all * (per_direction - exact) as f32;
        first + (exact + beyond as usize).min(per_direction - 1)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn config(bidirectional: bool, num_buckets: usize, max_distance: usize) -> RelativeBiasConfig {
        RelativeBiasConfig::new(num_buckets, max_distance, 2).with_bidirectional(bidirectional)
    }

    /// For distances from -300 to 300 as Transformers' `T5Attention._relative_position_bucket` in
    /// PyTorch: the first distance of each run of one bucket, and the bucket.
    #[rstest]
    #[case::encoder(config(true, 32, 128), &[
        (-300, 15), (-90, 14), (-63, 13), (-45, 12), (-31, 11), (-22, 10), (-15, 9), (-11, 8),
        (-7, 7), (-6, 6), (-5, 5), (-4, 4), (-3, 3), (-2, 2), (-1, 1), (0, 0), (1, 17), (2, 18),
        (3, 19), (4, 20), (5, 21), (6, 22), (7, 23), (8, 24), (12, 25), (16, 26), (23, 27),
        (32, 28), (46, 29), (64, 30), (91, 31),
    ])]
    #[case::decoder(config(false, 32, 128), &[
        (-300, 31), (-112, 30), (-98, 29), (-86, 28), (-76, 27), (-66, 26), (-58, 25), (-51, 24),
        (-45, 23), (-39, 22), (-34, 21), (-30, 20), (-26, 19), (-23, 18), (-20, 17), (-18, 16),
        (-15, 15), (-14, 14), (-13, 13), (-12, 12), (-11, 11), (-10, 10), (-9, 9), (-8, 8),
        (-7, 7), (-6, 6), (-5, 5), (-4, 4), (-3, 3), (-2, 2), (-1, 1), (0, 0),
    ])]
    #[case::few(config(true, 6, 20), &[(-300, 2), (-4, 1), (0, 0), (1, 4), (5, 5)])]
    #[case::odd(config(false, 5, 17), &[(-300, 4), (-8, 3), (-4, 2), (-1, 1), (0, 0)])]
    #[case::near(config(true, 8, 9), &[
        (-300, 3), (-4, 2), (-1, 1), (0, 0), (1, 5), (2, 6), (5, 7),
    ])]
    #[case::least(config(false, 2, 300), &[(-300, 1), (0, 0)])]
    // A logarithm that is not rounded correctly puts the distance 20 into the bucket before.
    #[case::rounding(config(false, 24, 20), &[
        (-300, 23), (-19, 22), (-18, 21), (-17, 20), (-16, 18), (-15, 17), (-14, 15), (-13, 13),
        (-12, 12), (-11, 11), (-10, 10), (-9, 9), (-8, 8), (-7, 7), (-6, 6), (-5, 5), (-4, 4),
        (-3, 3), (-2, 2), (-1, 1), (0, 0),
    ])]
    fn the_buckets_are_those_of_transformers(
        #[case] config: RelativeBiasConfig,
        #[case] runs: &[(i64, usize)],
    ) {
        let buckets = Buckets::of(&config).unwrap();
        for distance in -300..=300 {
            let run = runs.iter().rfind(|(first, _)| *first <= distance).unwrap();
            assert_eq!(buckets.of_distance(distance), run.1, "distance {distance}");
        }
    }

    #[rstest]
    #[case(config(true, 3, 20), "3 buckets must be 4 or more, and even")]
    #[case(config(true, 2, 20), "2 buckets must be 4 or more")]
    #[case(config(false, 1, 20), "1 buckets must be 2 or more")]
    #[case(config(true, 32, 8), "the largest distance 8 must exceed 8")]
    fn buckets_that_cannot_be_are_refused(
        #[case] config: RelativeBiasConfig,
        #[case] message: &str,
    ) {
        let error = config.init(&Group::single(0), &Device::flex());
        let error = error.unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }

    #[test]
    fn a_line_is_cut_where_a_segment_needs_it() {
        let device = Device::flex();
        let bias = config(true, 8, 9).init(&Group::single(0), &device).unwrap();
        let [short, long] = [5, 9].map(|len| bias.forward(len));
        assert_eq!(short.dims(), [2, 1, 9]);
        let found = line(&long, 0, 5, 5).into_data();
        assert_eq!(found, line(&short, 0, 5, 5).into_data());
        // Queries at positions 3 and 4 of 5 keys: the first column is of key 0 and query 4.
        let last = line(&short, 3, 2, 5).into_data();
        let all = short.reshape([2, 9]).narrow(1, 0, 6);
        assert_eq!(last, all.into_data());
    }

    #[test]
    #[should_panic(expected = "for 5 positions does not cover 2 queries from position 4 on")]
    fn a_line_that_is_too_short_is_refused() {
        line(&Tensor::zeros([1, 1, 9], &Device::flex()), 4, 2, 6);
    }
}
