//! Shards of tokens that are gathered after they were quantised, against the whole matrix.

use super::*;
use burn::tensor::Int;

/// Ranks with the same shards as this one, which is the first of them.
#[derive(Debug)]
struct Copies(usize);

impl ShardCollectives for Copies {
    fn num_ranks(&self) -> usize {
        self.0
    }

    fn gather(&self, own: Tensor<2>) -> Tensor<2> {
        Tensor::cat(vec![own; self.0], 0)
    }

    fn gather_bytes(&self, own: Tensor<2, Int>) -> Tensor<2, Int> {
        Tensor::cat(vec![own; self.0], 0)
    }

    fn reduce_scatter(&self, partial: Tensor<2>) -> Tensor<2> {
        let rows = partial.dims()[0] / self.0;
        partial.narrow(0, 0, rows)
    }
}

/// The result, and the gradients of the input and the weight.
fn run(
    [x, dy]: [Tensor<3>; 2],
    w: &Tensor<2>,
    shards: Option<SequenceShards>,
    [attached, recomputes]: [bool; 2],
) -> [Tensor<2>; 3] {
    let x = Tensor::from_inner(x).require_grad();
    let w = Tensor::from_inner(w.clone()).require_grad();
    let main_grad = MainGrad::default();
    if attached {
        main_grad.attach();
    }
    let again = recomputes.then(|| {
        let x = x.clone().inner();
        RecomputeFn::new(move || x.clone())
    });
    let options = LinearOptions {
        main_grad: Some(main_grad.clone()),
        again,
        ..Default::default()
    };
    let quantization = LinearQuantization {
        shards,
        ..LinearQuantization::new(recipe(Scaling::Tensor, SmallFloat::E5m2))
    };
    let y = quantized_linear(x.clone(), w.clone(), None, options, quantization);
    let grads = (y.clone() * Tensor::from_inner(dy)).sum().backward();
    let rows = |x: Tensor<3>| x.flatten::<2>(0, 1);
    let dw = main_grad.take().or_else(|| w.grad(&grads)).unwrap();
    [rows(y.inner()), rows(x.grad(&grads).unwrap()), dw]
}

#[rstest]
fn gathered_shards_are_the_whole_matrix_to_the_bit(
    #[values(MatrixRole::Input, MatrixRole::Gradient)] of: MatrixRole,
    #[values((2, [3, 2, 40, 24]), (3, [1, 7, 33, 9]))] (ranks, sizes): (usize, [usize; 4]),
    #[values(false, true)] attached: bool,
    #[values(false, true)] recomputes: bool,
    #[values(DType::F32, DType::BF16)] dtype: DType,
) {
    let [s, b, inputs, outputs] = sizes;
    let tensor = |shape: [usize; 3]| constant(shape).inner().cast(dtype);
    let w = constant([inputs, outputs]).inner().cast(dtype);
    let copies = |x: Tensor<3>| Tensor::cat(vec![x; ranks], 0);
    let how = [attached, recomputes];
    let shards = SequenceShards {
        of,
        over: Arc::new(Copies(ranks)),
    };
    let own = |x: Tensor<2>| x.narrow(0, 0, s * b);
    let (found, [y, dx, dw]) = match of {
        MatrixRole::Input => {
            let [x, dy] = [tensor([s, b, inputs]), tensor([ranks * s, b, outputs])];
            let found = run([x.clone(), dy.clone()], &w, Some(shards), how);
            let [y, dx, dw] = run([copies(x), dy], &w, None, how);
            (found, [y, own(dx), dw])
        }
        _ => {
            let [x, dy] = [tensor([ranks * s, b, inputs]), tensor([s, b, outputs])];
            let found = run([x.clone(), dy.clone()], &w, Some(shards), how);
            let [y, dx, dw] = run([x, copies(dy)], &w, None, how);
            (found, [own(y), dx, dw])
        }
    };
    for (found, expected) in found.into_iter().zip([y, dx, dw]) {
        assert_eq!(found.into_data(), expected.into_data());
    }
}

#[test]
#[should_panic(expected = "gathered with one scale per matrix only")]
fn shards_of_matrices_with_blocks_are_refused() {
    let quantization = LinearQuantization {
        shards: Some(SequenceShards {
            of: MatrixRole::Input,
            over: Arc::new(Copies(2)),
        }),
        ..LinearQuantization::new(recipe(Scaling::Blocks, SmallFloat::E4m3))
    };
    let [x, w] = [constant([4, 32]).inner(), constant([32, 8]).inner()];
    quantized_linear(x, w, None, LinearOptions::default(), quantization);
}
