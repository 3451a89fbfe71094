use std::f64::consts::LN_2;

use serde::Serialize;

/// The loss of a model on a data set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SetLoss {
    /// The name of the data set.
    pub name: String,
    /// The number of tokens that were predicted.
    pub tokens: u64,
    /// The mean loss, in nats per token.
    pub loss: f64,
    /// `exp(loss)`.
    pub perplexity: f64,
    /// The mean loss in nats per byte of text, if the bytes of the data set are known.
    pub loss_per_byte: Option<f64>,
    /// The same in bits.
    pub bits_per_byte: Option<f64>,
}

impl SetLoss {
    pub(crate) fn new(name: String, tokens: f64, loss: f64, bytes_per_token: Option<f64>) -> Self {
        let loss_per_byte = bytes_per_token
            .filter(|bytes| *bytes > 0.0)
            .map(|bytes| loss / bytes);
        Self {
            name,
            tokens: tokens as u64,
            loss,
            perplexity: loss.exp(),
            loss_per_byte,
            bits_per_byte: loss_per_byte.map(|nats| nats / LN_2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_given_per_token_and_per_byte() {
        let set = SetLoss::new("a".into(), 100.0, LN_2 * 3.0, Some(4.0));
        assert!((set.perplexity - 8.0).abs() < 1e-12);
        assert!((set.bits_per_byte.unwrap() - 0.75).abs() < 1e-12);
        let unknown = SetLoss::new("a".into(), 1.0, 1.0, None);
        assert_eq!((unknown.loss_per_byte, unknown.bits_per_byte), (None, None));
    }
}
