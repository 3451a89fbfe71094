//! The best learning rate does not depend on the width of a model with μP, and does without.
//!
//! Source: Yang et al., "Tensor Programs V" (2022), <https://arxiv.org/abs/2203.03466>, figure 1.

use megaburn::{mesh::Layout, train::ConfigLayers};

use crate::layouts::grid::train;

const RATES: [f64; 5] = [2e-3, 4e-3, 8e-3, 16e-3, 32e-3];
/// The width for which the learning rate is found.
const NARROW: usize = 32;
const WIDE: usize = 128;

/// The index of the learning rate whose loss after 40 steps is the lowest.
fn best_rate(hidden: usize, parts: &str) -> usize {
    let loss = |rate: &f64| {
        let heads = hidden / 16;
        let text = format!(
            "[run]\nseed = 7
            [model]\nhidden = {hidden}\nffn = {}\nlayers = 2\ntied = false
            heads = {heads}\nkv_heads = {heads}\nhead_dim = 16\n{parts}
            [data]\npath = \"synthetic:markov\"\nseq_len = 16
            [train]\nsteps = 40\nglobal_batch = 8\nmicro_batch = 8
            [optimizer]\nlr = {rate}\nmin_lr = {rate}\nlr_decay_style = \"constant\"
            warmup_steps = 0\nweight_decay = 0.0",
            2 * hidden
        );
        let layers = ConfigLayers::new().with_text("width", &text).unwrap();
        let steps = train(layers.load().unwrap(), Layout::SINGLE).steps;
        steps[30..].iter().map(|step| step.loss).sum::<f64>()
    };
    let losses = RATES.each_ref().map(loss);
    println!("hidden {hidden} {parts:?}: {losses:?}");
    let best = losses.iter().copied().fold(f64::INFINITY, f64::min);
    losses.iter().position(|loss| *loss == best).unwrap()
}

#[test]
fn the_best_learning_rate_of_a_wider_model_is_the_same_with_mup_alone() {
    let narrow = best_rate(NARROW, "");
    let with = best_rate(WIDE, &format!("parts.mup_base_hidden = {NARROW}"));
    let without = best_rate(WIDE, "");
    assert!(narrow.abs_diff(with) <= 1, "{narrow} and {with}");
    assert!(without + 2 <= narrow, "{narrow} and {without}");
}
