//! How far bf16 may be from the references of models whose rounding matters more than usual.

/// About twice the error of PyTorch's own bf16 on a fixture (`benches/peer/hf_bf16_error.py`), where
/// that is more than the usual tolerances of `megaburn verify`: of the logits, the loss, the gradients
/// and the losses of training. Norms of queries and keys, or caps, make rounding matter more there.
pub fn twice_pytorchs_error(fixture: &str) -> Option<[f64; 4]> {
    match fixture {
        "gemma2-odd" => Some([0.15, 4e-3, 0.09, 1e-2]),
        "gemma3" => Some([0.15, 7.2e-3, 0.085, 1.2e-2]),
        "gemma3-scaled" => Some([0.14, 6.1e-3, 0.19, 2.8e-2]),
        // Biases of keys cancel in the softmax, so that their gradients are rounding alone.
        "bert" => Some([0.1, 4e-3, 0.4, 1e-2]),
        "t5-relu" => Some([0.1, 4e-3, 0.4, 1e-2]),
        // Large weights, so that the softmax is nearly a choice.
        "mt5" => Some([1.9, 2.3e-2, 0.92, 7e-2]),
        _ => None,
    }
}
