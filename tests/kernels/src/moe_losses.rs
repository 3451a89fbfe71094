//! Tests of the router losses, on the GPU and on the CPU.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor, TensorData},
};
use megaburn_kernels::{BalanceLoss, RouterLosses, RouterScores, router_losses, router_scores};

use super::compare::*;
use super::moe::{poison, random};

pub(super) const TESTS: &[super::Test] =
    &[("losses_and_their_gradients_are_those_of_the_cpu", losses)];

/// `[s, b, e]`: few and many tokens, experts that fill planes and ragged ones, more than the kernel
/// supports.
const SHAPES: [[usize; 3]; 6] = [
    [16, 2, 8],
    [5, 3, 7],
    [1, 1, 1],
    [2111, 2, 64],
    [33, 1, 130],
    [3, 2, 520],
];

struct Case {
    shape: [usize; 3],
    scores: RouterScores,
    /// Counts of the micro-batch, of the sequences, and of a global batch.
    counts: [Option<TensorData>; 3],
    z_loss: Option<f64>,
    counted: Option<TensorData>,
    logits: TensorData,
}

impl Case {
    fn new([s, b, e]: [usize; 3], scores: RouterScores, kind: usize) -> Self {
        let counts = |rows: usize| {
            let of = random(rows * e, 50)
                .into_iter()
                .map(|count| count as f32 + 1.0);
            TensorData::new(of.collect(), [rows, e])
        };
        let has = |bit: usize| kind & (1 << bit) != 0;
        let all = [
            has(0).then(|| counts(1)),
            has(1).then(|| counts(b)),
            has(2).then(|| counts(1)),
        ];
        let counted = (0..s * b).map(|row| f32::from(row % 3 != 1)).collect();
        Self {
            shape: [s, b, e],
            scores,
            counts: all,
            z_loss: has(3).then_some(0.3),
            counted: has(4).then(|| TensorData::new(counted, [s * b, 1])),
            logits: normal([s * b, e], DType::F32),
        }
    }

    /// Returns the sums, and the gradients of scores and of logits that exist.
    fn run(&self, device: &Device) -> Result<Vec<Vec<f32>>, String> {
        let on = |data: &TensorData| Tensor::<2>::from_data(data.clone(), (device, DType::F32));
        let loss = |counts: &Option<TensorData>, factor: f64| {
            counts.as_ref().map(|counts| BalanceLoss {
                counts: on(counts),
                factor,
            })
        };
        let [micro_batch, sequences, global_batch] = &self.counts;
        let losses = RouterLosses {
            scores: self.scores,
            micro_batch: loss(micro_batch, 0.5),
            sequences: loss(sequences, 0.25),
            global_batch: loss(global_batch, 2.0),
            z_loss: self.z_loss,
        };
        let logits = on(&self.logits);
        let scores = router_scores(logits.clone(), self.scores);
        let found = router_losses(logits, scores, self.counted.as_ref().map(on), &losses);
        let gradients = [found.gradients.of_scores, found.gradients.of_logits];
        let gradients = gradients.into_iter().flatten().map(host);
        [host(found.sums)].into_iter().chain(gradients).collect()
    }
}

fn losses() -> Result<(), String> {
    for shape in SHAPES {
        let [s, b, e] = shape;
        for scores in [RouterScores::Softmax, RouterScores::Sigmoid] {
            // Which losses are enabled, and whether all tokens count.
            for kind in [0b00001, 0b01010, 0b10100, 0b01000, 0b11111, 0b01111] {
                let case = Case::new(shape, scores, kind);
                let expected = case.run(&Device::flex())?;
                poison(&[4 * s * b * e, 4 * s * b * (e + 3), 4 * (e + 3)])?;
                let found = case.run(&Device::cuda(0))?;
                let what = format!("{:?}, {scores:?}, {kind:05b}", case.shape);
                if found.len() != expected.len() {
                    return Err(format!("{what}: other gradients than on the CPU"));
                }
                for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    close(&format!("{what}, result {at}"), found, expected, 1e-5)?;
                }
                if case.run(&Device::cuda(0))? != found {
                    return Err(format!("{what}: other bits the second time"));
                }
            }
        }
    }
    Ok(())
}
