//! Quantisation by its definition: the nearest of all numbers of the format.

use std::collections::BTreeMap;

use burn::tensor::{Tensor, TensorData};
use megaburn_autograd::testing::values;

use super::{MatrixRole, QuantizationRecipe, Scaling, SmallFloat, SummedDim};

/// All numbers of a format in ascending order, and whether the code of each is even.
fn numbers(format: SmallFloat) -> Vec<(f64, bool)> {
    let number = |code: u8| match format {
        SmallFloat::E5m2 => float8::F8E5M2::from_bits(code).to_f64(),
        _ => float8::F8E4M3::from_bits(code).to_f64(),
    };
    let all = (0..=255).map(|code| (number(code), code % 2 == 0));
    let mut all: Vec<_> = all.filter(|(number, _)| number.is_finite()).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}

/// The numbers that a block of elements stands for: each is the nearest of all numbers of the
/// format times the block's scale, the one with an even code of two.
fn block(elements: &[f64], scaling: Scaling, format: SmallFloat) -> Vec<f64> {
    let all = numbers(format);
    let amax = elements.iter().fold(0.0f64, |most, x| most.max(x.abs())) as f32;
    let factor = match scaling {
        Scaling::Microscaling => (format.largest() / amax).log2().floor().exp2(),
        _ => format.largest() / amax,
    };
    let nearest = |x: &f64| {
        let scaled = f64::from(*x as f32 * factor);
        let above = all.partition_point(|(number, _)| *number < scaled);
        let near = &all[above.saturating_sub(1)..(above + 1).min(all.len())];
        let distance = |(number, is_even): &(f64, bool)| ((number - scaled).abs(), !is_even);
        let is_nearer = |a: &&(f64, bool), b: &&(f64, bool)| {
            let [a, b] = [distance(a), distance(b)];
            a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))
        };
        near.iter().min_by(is_nearer).unwrap().0 / f64::from(factor)
    };
    elements.iter().map(nearest).collect()
}

/// The numbers that the elements of a matrix stand for, by their definition.
pub(super) fn numbers_of(
    x: Tensor<2>,
    recipe: QuantizationRecipe,
    role: MatrixRole,
    summed: SummedDim,
) -> Tensor<2> {
    let [rows, cols] = x.dims();
    let from = values(x.clone());
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
        };
        [row / tall, col / wide]
    };
    let mut blocks = BTreeMap::<_, Vec<usize>>::new();
    for index in 0..from.len() {
        blocks.entry(block_of(index)).or_default().push(index);
    }
    for members in blocks.into_values() {
        let elements: Vec<_> = members.iter().map(|i| from[*i]).collect();
        let found = block(&elements, recipe.scaling, recipe.format(role));
        members.into_iter().zip(found).for_each(|(i, x)| to[i] = x);
    }
    let to: Vec<_> = to.into_iter().map(|x| x as f32).collect();
    Tensor::from_data(TensorData::new(to, [rows, cols]), &x.device())
}
