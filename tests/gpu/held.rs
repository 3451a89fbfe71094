//! The memory that a model on a GPU holds for backward agrees with the formula, also if it is
//! offloaded to the host.

use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn::{
    collective::Group,
    cuda,
    models::{
        DecoderConfig, Family,
        activation_memory::{ActivationMemory, Scores, StageEnds},
        decoder::{ModelOptions, Recompute, RecomputeBlocks},
    },
};

use crate::Test;

pub(crate) const TESTS: &[Test] = &[("what_waits_for_backward_is_the_formulas", held)];

const LAYERS: usize = 10;
const TOKENS: [usize; 2] = [64, 4];

fn held() -> Result<(), String> {
    let device = Device::cuda(0).autodiff();
    let config = DecoderConfig {
        vocab: 512,
        hidden: 64,
        ffn: 128,
        layers: LAYERS,
        heads: 2,
        kv_heads: 1,
        head_dim: 32,
        max_seq_len: TOKENS[0],
        ..Family::LLAMA.template()
    };
    let blocks = |blocks, offload| Recompute {
        blocks: Some(blocks),
        offload,
        ..Recompute::default()
    };
    let ways = [
        blocks(RecomputeBlocks::Uniform(1), false),
        blocks(RecomputeBlocks::Uniform(1), true),
        blocks(RecomputeBlocks::Uniform(2), true),
        blocks(RecomputeBlocks::Block(9), true),
    ];
    for recompute in ways {
        let options = ModelOptions {
            recompute,
            fused_linear_cross_entropy: true,
            ..ModelOptions::default()
        };
        let model = config
            .init(&Group::single(0), &options, &device)
            .map_err(|e| e.to_string())?;
        let plain = device.clone().inner();
        let ids = |factor: usize| {
            let ids = (0..TOKENS[0] * TOKENS[1])
                .map(|i| (i * factor % 509) as i64)
                .collect();
            Tensor::<2, Int>::from_data(TensorData::new::<i64, _>(ids, TOKENS), &plain)
        };
        let tokens = ids(7);
        let labels = ids(11);
        let allocated = || cuda::memory::allocated(&plain).ok_or("no GPU");
        let mut held = 0;
        for _ in 0..3 {
            plain.sync().map_err(|error| error.to_string())?;
            let before = allocated()?;
            let loss = model.loss(tokens.clone(), labels.clone());
            held = allocated()?.saturating_sub(before);
            drop(loss.backward());
        }
        let of = ActivationMemory {
            element: 4,
            recompute,
            scores: Scores::Kept,
            fused_loss: true,
            ..ActivationMemory::new(config.clone(), TOKENS[0], TOKENS[1])
        };
        let formula = of.stage(
            0..LAYERS,
            StageEnds {
                first: true,
                last: true,
            },
            1,
        );
        let off = held as f64 / formula as f64 - 1.0;
        if off.abs() > 0.1 {
            return Err(format!(
                "{recompute:?}: {held} bytes held, {formula} by the formula"
            ));
        }
    }
    Ok(())
}
