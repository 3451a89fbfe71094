//! Quantisation by its definition: the nearest of all numbers of the format.

use std::collections::BTreeMap;

use burn::backend::Flex;
use burn::tensor::{Tensor, TensorData};
use megaburn_autograd::IntoPrimitive;
use megaburn_autograd::testing::values;

use super::hadamard::hadamard;
use super::{MatrixRole, QuantizationRecipe, RandomNumbers, Scaling, SmallFloat, SummedDim};

/// All numbers of a format in ascending order, and whether the code of each is even.
fn numbers(format: SmallFloat) -> Vec<(f64, bool)> {
    let number = |code: u8| match format {
        SmallFloat::E5m2 => float8::F8E5M2::from_bits(code).to_f64(),
        SmallFloat::E4m3 => float8::F8E4M3::from_bits(code).to_f64(),
        SmallFloat::E2m1 if code >= 16 => f64::NAN,
        SmallFloat::E2m1 => {
            let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code % 8)];
            if code < 8 { magnitude } else { -magnitude }
        }
    };
    let all = (0..=255).map(|code| (number(code), code % 2 == 0));
    let mut all: Vec<_> = all.filter(|(number, _)| number.is_finite()).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}

/// The nearest of a format's numbers, the one with an even code of two.
fn nearest(format: SmallFloat, x: f64) -> f64 {
    let all = numbers(format);
    let above = all.partition_point(|(number, _)| *number < x);
    let near = &all[above.saturating_sub(1)..(above + 1).min(all.len())];
    let distance = |(number, is_even): &(f64, bool)| ((number - x).abs(), !is_even);
    let is_nearer = |a: &&(f64, bool), b: &&(f64, bool)| {
        let [a, b] = [distance(a), distance(b)];
        a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))
    };
    near.iter().min_by(is_nearer).unwrap().0
}

/// The neighbour of `x` among a format's numbers that a uniform number decides for.
fn drawn(format: SmallFloat, x: f64, uniform: f64) -> f64 {
    let all = numbers(format);
    let magnitude = x.abs().min(f64::from(format.largest()));
    let low = all.iter().rev().find(|(number, _)| *number <= magnitude);
    let high = all.iter().find(|(number, _)| *number >= magnitude);
    let [low, high] = [low, high].map(|found| found.unwrap().0);
    let is_high = uniform * (high - low) < magnitude - low;
    (if is_high { high } else { low }).copysign(x)
}

/// The numbers that a block of elements stands for, in a matrix of which `of_matrix` is the largest
/// magnitude: each is the nearest of all numbers of the format times the block's scale, or one of the
/// two neighbours that a number in `uniform` decides for.
fn block(
    elements: &[f64],
    scaling: Scaling,
    format: SmallFloat,
    of_matrix: f64,
    uniform: Option<Vec<f32>>,
) -> Vec<f64> {
    let amax = elements.iter().fold(0.0f64, |most, x| most.max(x.abs())) as f32;
    let factor = match scaling {
        Scaling::Microscaling => (format.largest() / amax).log2().floor().exp2(),
        Scaling::Nvfp4(_) => {
            let matrix = 6.0 * 448.0 / of_matrix as f32;
            let stored = nearest(SmallFloat::E4m3, f64::from(amax / 6.0 * matrix));
            1.0 / (stored as f32 * (1.0 / matrix))
        }
        _ => format.largest() / amax,
    };
    let quantized = |(i, x): (usize, &f64)| {
        let scaled = f64::from(*x as f32 * factor);
        let found = match &uniform {
            Some(uniform) => drawn(format, scaled, uniform[i].into()),
            None => nearest(format, scaled),
        };
        found / f64::from(factor)
    };
    elements.iter().enumerate().map(quantized).collect()
}

/// The numbers that the elements of a matrix stand for, by their definition.
pub(super) fn numbers_of(
    x: Tensor<2>,
    recipe: QuantizationRecipe,
    role: MatrixRole,
    summed: SummedDim,
) -> Tensor<2> {
    let random = RandomNumbers::new(0, "");
    let x = match recipe.scaling {
        Scaling::Nvfp4(parts)
            if parts.random_hadamard && role != MatrixRole::Weight && summed == SummedDim::Rows =>
        {
            Flex::wrap(hadamard::<Flex>(Flex::unwrap(x), random.signs()))
        }
        _ => x,
    };
    let uniform = match (recipe.scaling, role) {
        (Scaling::Nvfp4(parts), MatrixRole::Gradient) if parts.stochastic_rounding => {
            Some(random.drawn(x.dims(), summed).uniform())
        }
        _ => None,
    };
    let [rows, cols] = x.dims();
    let from = values(x.clone());
    let of_matrix = from.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let mut to = vec![f64::NAN; from.len()];
    let block_of = |index: usize| {
        let [row, col] = [index / cols, index % cols];
        let [tall, wide] = match (recipe.scaling, role, summed) {
            (Scaling::Tensor, ..) => [rows, cols],
            (Scaling::Blocks, MatrixRole::Weight, _) => [128, 128],
            (Scaling::Blocks, _, SummedDim::Rows) => [128, 1],
            (Scaling::Blocks, _, SummedDim::Cols) => [1, 128],
            (Scaling::Microscaling, _, SummedDim::Rows) => [32, 1],
            (Scaling::Microscaling, _, SummedDim::Cols) => [1, 32],
            (Scaling::Nvfp4(parts), MatrixRole::Weight, _) if parts.two_dimensional_weights => {
                [16, 16]
            }
            (Scaling::Nvfp4(_), _, SummedDim::Rows) => [16, 1],
            (Scaling::Nvfp4(_), _, SummedDim::Cols) => [1, 16],
        };
        [row / tall, col / wide]
    };
    let mut blocks = BTreeMap::<_, Vec<usize>>::new();
    for index in 0..from.len() {
        blocks.entry(block_of(index)).or_default().push(index);
    }
    for members in blocks.into_values() {
        let elements: Vec<_> = members.iter().map(|i| from[*i]).collect();
        let uniform = uniform
            .as_ref()
            .map(|all| members.iter().map(|i| all[*i]).collect());
        let format = recipe.format(role);
        let found = block(&elements, recipe.scaling, format, of_matrix, uniform);
        members.into_iter().zip(found).for_each(|(i, x)| to[i] = x);
    }
    let to: Vec<_> = to.into_iter().map(|x| x as f32).collect();
    Tensor::from_data(TensorData::new(to, [rows, cols]), &x.device())
}
