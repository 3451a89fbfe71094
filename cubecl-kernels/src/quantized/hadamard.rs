//! The random Hadamard transform of NVFP4.

use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Tensor, TensorData};
use megaburn_autograd::IntoPrimitive;

use super::recipe::NVFP4_BLOCK as LEN;

/// Multiplies each 16 rows of a matrix by `H S / 4`: `S` negates row `i` if bit `i` of `signs` is set,
/// and `H` is the Hadamard matrix of Sylvester's order. This spreads an outlier over its 16 rows. The
/// product of two matrices that are both transformed along the rows that it sums over stays the same.
///
/// The sums are in f32 and in one order, so that every device computes the same numbers.
///
/// # Shapes
/// `x: [r, c]`; result: `[r, c]` in f32, where rows of zeros are added up to a multiple of 16
pub(super) fn hadamard<B: IntoPrimitive>(x: FloatTensor<B>, signs: u16) -> FloatTensor<B> {
    let x = B::wrap::<2>(x).cast(DType::F32);
    let [rows, cols] = x.dims();
    let padded = rows.next_multiple_of(LEN);
    if padded * cols == 0 {
        return B::unwrap(x);
    }
    let device = x.device();
    let options = (&device, DType::F32);
    let x = match padded - rows {
        0 => x,
        missing => Tensor::cat(vec![x, Tensor::zeros([missing, cols], options)], 0),
    };
    let of_row = |row| match signs >> row & 1 {
        0 => 1.0f32,
        _ => -1.0,
    };
    let signs = (0..LEN).map(of_row).collect::<Vec<_>>();
    let signs = Tensor::from_data(TensorData::new(signs, [1, LEN, 1]), options);
    let mut x = x.reshape([padded / LEN, LEN, cols]) * signs;
    let mut half = 1;
    while half < LEN {
        let pairs = x.reshape([padded / (2 * half), 2, half * cols]);
        let [a, b] = [0, 1].map(|i| pairs.clone().narrow(1, i, 1));
        x = Tensor::cat(vec![a.clone() + b.clone(), a - b], 1);
        half *= 2;
    }
    B::unwrap(x.reshape([padded, cols]) * 0.25)
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::tensor::{Device, Tensor};
    use megaburn_autograd::testing::{assert_close, normal, values};
    use rstest::rstest;

    use super::*;

    fn transformed(x: Tensor<2>, signs: u16) -> Tensor<2> {
        Flex::wrap(hadamard::<Flex>(Flex::unwrap(x), signs))
    }

    /// An element of the matrix `H` of Sylvester's order.
    fn element(row: usize, col: usize) -> f32 {
        if (row & col).count_ones().is_multiple_of(2) {
            1.0
        } else {
            -1.0
        }
    }

    #[rstest]
    fn it_is_the_product_with_the_matrix(
        #[values([32, 3], [37, 5], [1, 1])] shape: [usize; 2],
        #[values(0, 0b1011_0010_0110_1101)] signs: u16,
    ) {
        let [rows, cols] = shape;
        let x = normal(shape).inner();
        let from = values(x.clone());
        let found = values(transformed(x, signs));
        assert_eq!(found.len(), rows.next_multiple_of(16) * cols);
        for (i, found) in found.into_iter().enumerate() {
            let [row, col] = [i / cols, i % cols];
            let first = row / 16 * 16;
            let terms = (first..rows.min(first + 16)).map(|other| {
                let sign = if signs >> (other - first) & 1 == 1 {
                    -1.0
                } else {
                    1.0
                };
                from[other * cols + col] * sign * f64::from(element(row - first, other - first))
            });
            let expected = terms.sum::<f64>() / 4.0;
            assert!(
                (found - expected).abs() < 1e-6,
                "{row} {col}: {found} {expected}"
            );
        }
    }

    #[rstest]
    fn a_product_of_two_transformed_matrices_stays(#[values([32, 4], [21, 7])] shape: [usize; 2]) {
        let [a, b] = [0, 1].map(|_| normal(shape).inner());
        let [c, d] = [&a, &b].map(|x| transformed(x.clone(), 0b0110_1100_1010_0111));
        assert_close(c.transpose().matmul(d), a.transpose().matmul(b), 1e-5);
    }

    #[test]
    fn an_outlier_is_spread() {
        let mut x = [0.0f32; 16];
        x[5] = 8.0;
        let x = Tensor::from_data(TensorData::new(x.to_vec(), [16, 1]), &Device::flex());
        let found = values(transformed(x, 1 << 5));
        assert!(found.iter().all(|x| x.abs() == 2.0));
        assert_eq!(found[0], -2.0);
    }
}
