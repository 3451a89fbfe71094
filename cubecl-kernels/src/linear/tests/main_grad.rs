//! Weights from a source, in each operation that reads one.

use burn::tensor::{DType, Int, Tensor, TensorData};
use megaburn_autograd::testing::{constant, device, leaf, values};
use megaburn_autograd::{LinearPass, MainGrad};
use rstest::rstest;

use crate::{
    CrossEntropyOptions, EmbeddingOptions, LinearOptions, embedding, linear, linear_cross_entropy,
};
use std::sync::{Arc, Mutex};

/// Runs one of the three operations that read a weight, with a graph. Returns the result and
/// the gradients of `x` and the weight.
fn of(what: &str, weight: Tensor<2>, main: &MainGrad, x: Tensor<3>) -> Vec<Vec<f64>> {
    let ids = TensorData::new((0..12).map(|i| i % 9).collect::<Vec<i64>>(), [4, 3]);
    let ids = Tensor::<2, Int>::from_data(ids, &device());
    let x = leaf(x);
    let main_grad = Some(main.clone());
    let linear_options = LinearOptions {
        out_in: true,
        main_grad: main_grad.clone(),
        ..Default::default()
    };
    let y = match what {
        "linear" => linear(x.clone(), weight.clone(), None, linear_options),
        "embedding" => {
            let options = EmbeddingOptions {
                first: None,
                main_grad,
            };
            embedding(weight.clone(), ids, options)
        }
        _ => linear_cross_entropy(
            x.clone(),
            weight.clone(),
            ids,
            linear_options,
            CrossEntropyOptions::new(9),
            5,
            |own| own,
        )
        .unsqueeze_dim(2),
    };
    let found = y.clone().inner();
    let grads = (y.clone() * y).sum().backward();
    let for_x = x.grad(&grads).map(values).unwrap_or_default();
    let for_w = main
        .take()
        .or_else(|| weight.grad(&grads))
        .expect("a gradient");
    vec![values(found), for_x, values(for_w)]
}

#[rstest]
#[case("linear", &[LinearPass::Forward, LinearPass::Backward])]
#[case("embedding", &[LinearPass::Forward])]
#[case("loss", &[LinearPass::Forward, LinearPass::Backward])]
fn a_weight_that_somebody_else_keeps_is_asked_for(
    #[case] what: &str,
    #[case] passes: &[LinearPass],
    #[values(true, false)] attached: bool,
    #[values(DType::F32, DType::BF16)] dtype: DType,
) {
    let weight = constant([9, 6]).cast(dtype);
    let x = constant([4, 3, 6]).cast(dtype);
    let main = || {
        let main = MainGrad::default();
        if attached {
            main.attach();
        }
        main
    };
    let expected = of(what, leaf(weight.clone()), &main(), x.clone());
    let kept = main();
    let weight = weight.inner();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let noted = asked.clone();
    let whole = weight.clone();
    kept.with_source(move |pass| {
        noted.lock().unwrap().push(pass);
        whole.clone()
    });
    let nothing = Tensor::<2>::full([1, 1], f32::NAN, (&device(), dtype)).expand([9, 6]);
    assert_eq!(of(what, leaf(nothing), &kept, x), expected);
    assert_eq!(*asked.lock().unwrap(), passes);
}
