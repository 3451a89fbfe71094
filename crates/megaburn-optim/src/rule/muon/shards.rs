use std::ops::Range;

use burn::{Tensor, tensor::DType};
use megaburn_collective::{Group, Lane, ReduceOp, tensors};
use megaburn_mesh::{ShardPiece, ShardSpec};

use super::{
    MuonConfig, MuonTpMode,
    newton_schulz::{Sum, orthogonalized},
};
use crate::error::OptimError;

/// Orthogonalizes matrices that the ranks of a group shard.
pub(super) struct Orthogonalizer<'a> {
    config: &'a MuonConfig,
    tp: &'a Group,
    coefficients: Vec<[f64; 3]>,
}

impl<'a> Orthogonalizer<'a> {
    pub(super) fn new(config: &'a MuonConfig, tp: &'a Group) -> Self {
        let coefficients = config.coefficients.coefficients(config.num_ns_steps);
        Self {
            config,
            tp,
            coefficients,
        }
    }

    /// This rank's shard of the direction, from its shard of the momentum.
    ///
    /// # Shapes
    /// `[local elements]` to `[local elements]`.
    /// # Collective
    /// All ranks of the group, in the same order of matrices, unless each rank has the full matrix.
    pub(super) fn of(
        &self,
        shard: &ShardSpec,
        momentum: Tensor<1>,
    ) -> Result<Tensor<1>, OptimError> {
        let shape: [usize; 2] = shard
            .local_shape()
            .try_into()
            .expect("the parameter is a matrix");
        let local = momentum.reshape(shape);
        let is_split = shard
            .pieces
            .iter()
            .any(|piece| piece.replicas < self.tp.size());
        let mode = if is_split {
            self.config.tp_mode
        } else {
            MuonTpMode::Blockwise
        };
        let direction = match mode {
            MuonTpMode::Blockwise => {
                self.each_part(local, shard, |x, part| self.alone(x, shard, part))
            }
            MuonTpMode::Distributed => {
                self.each_part(local, shard, |x, part| self.together(x, shard, part))
            }
            MuonTpMode::Duplicated => self.whole(local, shard),
        };
        Ok(direction?.flatten(0, 1))
    }

    /// Orthogonalizes this rank's slice of one fused part as a matrix of its own.
    fn alone(&self, x: Tensor<2>, shard: &ShardSpec, part: usize) -> Result<Tensor<2>, OptimError> {
        let mut shape = x.dims();
        // Scale by the size without padding; 1 if there is nothing but padding.
        shape[shard.dim] = shard.pieces[part].local.len().max(1);
        self.of_shape(x, shape)
    }

    fn of_shape(&self, x: Tensor<2>, shape: [usize; 2]) -> Result<Tensor<2>, OptimError> {
        let x = orthogonalized(x, &self.coefficients, self.config.iteration_dtype(), None)?;
        Ok(x * self.scale(shape))
    }

    fn scale(&self, shape: [usize; 2]) -> f64 {
        self.config.scale.factor(shape) * self.config.extra_scale
    }

    /// Applies `of` to each fused part of this rank's shard, and fills the padding with zeros.
    fn each_part(
        &self,
        local: Tensor<2>,
        shard: &ShardSpec,
        of: impl Fn(Tensor<2>, usize) -> Result<Tensor<2>, OptimError>,
    ) -> Result<Tensor<2>, OptimError> {
        let mut parts = Vec::with_capacity(shard.pieces.len());
        for (index, piece) in shard.pieces.iter().enumerate() {
            parts.push(of(cut(&local, shard.dim, &range_of(shard, piece)), index)?);
        }
        Ok(padded(parts, shard.dim, shard.local_len))
    }

    /// Orthogonalizes one fused part, with products summed over the ranks.
    fn together(
        &self,
        x: Tensor<2>,
        shard: &ShardSpec,
        part: usize,
    ) -> Result<Tensor<2>, OptimError> {
        let replicas = shard.pieces[part].replicas;
        let sum: Sum<'_> = &|x| {
            // Ranks that hold copies each contribute an equal fraction.
            let x = x.cast(DType::F32) / replicas as f32;
            Ok(tensors::all_reduce(x, ReduceOp::Sum, self.tp, Lane::InOrder)?.wait())
        };
        let mut shape = x.dims();
        shape[shard.dim] = match shard.pieces.len() {
            1 => shard.global_shape[shard.dim],
            _ => shape[shard.dim] * self.tp.size() / replicas,
        };
        let split = Some((shard.dim, sum));
        let x = orthogonalized(x, &self.coefficients, self.config.iteration_dtype(), split)?;
        Ok(x * self.scale(shape))
    }

    /// Gathers the full matrix, orthogonalizes it, and returns this rank's shard of the result.
    fn whole(&self, local: Tensor<2>, shard: &ShardSpec) -> Result<Tensor<2>, OptimError> {
        let ShardSpec { dim, local_len, .. } = *shard;
        let [rows, _] = local.dims();
        let all = tensors::all_gather(local, self.tp, Lane::InOrder)?.wait();
        let of_rank = |rank: usize| all.clone().narrow(0, rank * rows, rows);
        let rank = self.tp.rank();
        let ranks = self.tp.size();
        let mut parts = Vec::with_capacity(shard.pieces.len());
        for piece in &shard.pieces {
            let range = range_of(shard, piece);
            let holders = (0..ranks).step_by(piece.replicas);
            let whole: Vec<_> = holders
                .map(|rank| cut(&of_rank(rank), dim, &range))
                .collect();
            let held = whole.len() * range.len();
            let whole: Tensor<2> = Tensor::cat(whole, dim);
            let len = if shard.pieces.len() == 1 {
                shard.global_shape[dim]
            } else {
                held
            };
            let whole = whole.narrow(dim, 0, len);
            let shape = whole.dims();
            let whole = self.of_shape(whole, shape)?;
            let start = rank / piece.replicas * range.len();
            parts.push(padded(vec![whole], dim, held).narrow(dim, start, range.len()));
        }
        Ok(padded(parts, dim, local_len))
    }
}

/// The range of a piece in the local shard, the same on every rank. A single piece includes the
/// padding that follows it.
fn range_of(shard: &ShardSpec, piece: &ShardPiece) -> Range<usize> {
    match shard.pieces.len() {
        1 => 0..shard.local_len,
        _ => piece.local.clone(),
    }
}

fn cut(x: &Tensor<2>, dim: usize, range: &Range<usize>) -> Tensor<2> {
    x.clone().narrow(dim, range.start, range.len())
}

/// Concatenates the parts and appends zeros up to `len`.
fn padded(parts: Vec<Tensor<2>>, dim: usize, len: usize) -> Tensor<2> {
    let found: usize = parts.iter().map(|part| part.dims()[dim]).sum();
    let mut shape = parts[0].dims();
    shape[dim] = len - found;
    let zeros = (len > found).then(|| Tensor::zeros(shape, &parts[0].device()));
    Tensor::cat(parts.into_iter().chain(zeros).collect(), dim)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Distribution};
    use megaburn_collective::{GroupOptions, run_threads};
    use megaburn_mesh::{Axis, FusedPart, pad_vocab};
    use rstest::rstest;

    use super::*;
    use crate::{
        Dtype,
        testing::{cut as cut_values, values},
    };

    /// A rank's shard of a `[6, 24]` or `[24, 6]` matrix, with fused parts or padding.
    fn shard(kind: &str, dim: usize, rank: usize, ranks: usize) -> ShardSpec {
        let mut shape = [6, 6];
        shape[dim] = if kind == "padded" { 21 } else { 24 };
        let parts = match kind {
            "plain" => vec![FusedPart::new(24)],
            // Four query heads, and two key and value heads, which four ranks hold copies of.
            "fused" => vec![
                FusedPart::units(4, 3),
                FusedPart::units(2, 3),
                FusedPart::units(2, 3),
            ],
            "whole" => return ShardSpec::whole(&shape, Axis::Tp, rank, ranks),
            _ => {
                let padded = pad_vocab(21, 4, ranks);
                return ShardSpec::split_padded(&shape, dim, padded, Axis::Tp, rank, ranks)
                    .unwrap();
            }
        };
        ShardSpec::split(&shape, dim, &parts, Axis::Tp, rank, ranks).unwrap()
    }

    #[rstest]
    fn ranks_have_shards_of_what_one_has(
        #[values("plain", "fused", "whole", "padded")] kind: &str,
        #[values(0, 1)] dim: usize,
        #[values(2, 4)] ranks: usize,
        #[values(MuonTpMode::Duplicated, MuonTpMode::Distributed)] mode: MuonTpMode,
        #[values((Dtype::F32, 2e-5), (Dtype::Bf16, 0.15))] (dtype, tolerance): (Dtype, f32),
    ) {
        let one = shard(kind, dim, 0, 1);
        let normal = Distribution::Normal(0.0, 1.0);
        let global = Tensor::<1>::random([one.num_global()], normal, &Device::default());
        // On one rank, the padding to a multiple of four follows the last row or column.
        let alone = cut_values(&one, &values(global.clone()));
        let config = MuonConfig {
            tp_mode: mode,
            dtype: Some(dtype),
            ..MuonConfig::default()
        };
        let single = Group::single(0);
        let of = |tp: &Group, shard: &ShardSpec, local: Vec<f32>| {
            let local = Tensor::from_floats(local.as_slice(), &Device::default());
            Orthogonalizer::new(&config, tp)
                .of(shard, local)
                .map(values)
        };
        let expected = of(&single, &one, alone).unwrap();
        let mut by_global = vec![0.0; one.num_global()];
        for piece in &one.pieces {
            one.for_each_run(piece, |local, global, n| {
                by_global[global..global + n].copy_from_slice(&expected[local..local + n]);
            });
        }
        let global = values(global);
        let results = run_threads(ranks, GroupOptions::default(), |world| {
            let mine = shard(kind, dim, world.rank(), ranks);
            let found = of(&world, &mine, cut_values(&mine, &global))?;
            Ok::<_, OptimError>((found, cut_values(&mine, &by_global)))
        });
        for result in results {
            let (found, expected) = result.unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    (found - expected).abs() < tolerance,
                    "{kind}: {found} {expected}"
                );
            }
        }
    }

    #[test]
    fn parts_are_matrices_by_themselves_and_blocks_too() {
        let config = MuonConfig {
            tp_mode: MuonTpMode::Blockwise,
            ..MuonConfig::default()
        };
        let x = Tensor::<2>::random([6, 24], Distribution::Normal(0.0, 1.0), &Device::default());
        let alone = Group::single(0);
        let of = |shard: &ShardSpec, x: Tensor<2>| {
            values(
                Orthogonalizer::new(&config, &alone)
                    .of(shard, x.flatten(0, 1))
                    .unwrap(),
            )
        };
        let joined = Tensor::<1>::from_floats(
            of(&shard("fused", 1, 0, 1), x.clone()).as_slice(),
            &Device::default(),
        );
        let keys = joined.reshape([6, 24]).narrow(1, 12, 6);
        let expected = of(
            &ShardSpec::whole(&[6, 6], Axis::Tp, 0, 1),
            x.narrow(1, 12, 6),
        );
        assert_eq!(values(keys), expected);
    }
}
