//! Tests of the embedding lookup and its gradients.

use burn::{
    prelude::{Device, Int},
    tensor::{DType, Tensor, TensorData},
};
use megaburn_autograd::MainGrad;
use megaburn_kernels::{EmbeddingOptions, embedding};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[("token_vectors_and_their_gradients", embeddings)];

/// Many tokens with few distinct ids, some of another rank's shard, in one block of 256 and in
/// several.
fn embeddings() -> Result<(), String> {
    for dtype in [DType::BF16, DType::F32] {
        for ([rows, d], tokens, first) in [
            ([50, 64], [300, 3], None),
            ([40, 36], [700, 1], Some(30)),
            ([9, 5], [7, 2], Some(2)),
        ] {
            let table = normal([rows, d], dtype);
            let ids = (0..tokens[0] * tokens[1]).map(|i| (i * i + i / 7) % (rows + 20));
            let last = rows - 1;
            let ids: Vec<i64> =
                ids.map(|id| if first.is_none() { id.min(last) } else { id + 20 } as i64).collect();
            let ids = TensorData::new(ids, tokens);
            let weight = normal([tokens[0], tokens[1], d], dtype);
            let run = |device: &Device, dtype: DType, attached: bool| -> Result<_, String> {
                let main_grad = MainGrad::default();
                if attached {
                    main_grad.attach();
                }
                let options = EmbeddingOptions {
                    first,
                    main_grad: Some(main_grad.clone()),
                };
                let table: Tensor<2> = leaf(&table, device, dtype);
                let weight = Tensor::<3>::from_data(weight.clone(), (device, dtype));
                let weight = Tensor::from_inner(weight);
                let mut y = None;
                let mut grad = None;
                for _ in 0..2 {
                    let ids = Tensor::<2, Int>::from_data(ids.clone(), device);
                    let found = embedding(table.clone(), ids, options.clone());
                    let grads = (found.clone() * weight.clone()).sum().backward();
                    grad = table.grad(&grads);
                    y = Some(found.inner());
                }
                let grad = if attached { main_grad.take() } else { grad };
                Ok((
                    host(y.ok_or("no vectors")?)?,
                    host(grad.ok_or("no gradient")?)?,
                ))
            };
            for attached in [true, false] {
                let what = format!("embedding {rows}x{d} of {tokens:?} {dtype:?} {attached}");
                let (y, grad) = run(&Device::flex(), DType::F32, attached)?;
                let (found_y, found) = run(&Device::cuda(0), dtype, attached)?;
                close(&what, &found_y, &y, 0.0)?;
                let rounded = if attached || dtype == DType::F32 {
                    2e-6
                } else {
                    4e-3
                };
                close(&what, &found, &grad, rounded)?;
                let (_, again) = run(&Device::cuda(0), dtype, attached)?;
                if again != found {
                    return Err(format!("{what}: other bits the second time"));
                }
            }
        }
    }
    Ok(())
}
