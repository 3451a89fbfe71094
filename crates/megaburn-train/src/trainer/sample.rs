use burn::{
    module::Module,
    prelude::Int,
    tensor::{Tensor, TensorData},
};
use megaburn_mesh::{PositionRng, Purpose};

use crate::{TrainError, trainer::Trainer};

impl Trainer {
    /// Text that the model writes behind the prompt, token by token; `None` on ranks that take no
    /// part (all but the first data-parallel rank's) or when none is asked for.
    ///
    /// Each token is drawn from the whole window anew. The sequence keeps the training length, its
    /// unwritten end filled with padding that no earlier position sees.
    ///
    /// # Collective
    /// The tensor-parallel group of the first data-parallel rank.
    pub(crate) fn sample(&self) -> Result<Option<String>, TrainError> {
        let generate = &self.config.generate;
        if self.groups.dp_cp.rank() != 0 || generate.tokens == 0 {
            return Ok(None);
        }
        let model = self.model().valid();
        let seq_len = self.config.data.seq_len;
        let tokenizer = self.data.tokenizer.as_ref();
        let rng = PositionRng::new(self.config.run.seed, Purpose::Sampling, "generate");
        let mut tokens = tokenizer.encode(&generate.prompt);
        for index in 0..generate.tokens {
            let window = &tokens[tokens.len().saturating_sub(seq_len)..];
            let mut ids: Vec<i64> = window.iter().map(|&token| i64::from(token)).collect();
            ids.resize(seq_len, i64::from(tokenizer.eos()));
            let data = TensorData::new(ids, [seq_len, 1]);
            let ids = Tensor::<2, Int>::from_data(data, &self.device.clone().inner());
            let logits = model.full_logits(ids).narrow(0, window.len() - 1, 1).into_data();
            let logits = logits.convert::<f32>().try_to_vec::<f32>().expect("converted to f32");
            let next = choose(&logits, generate.temperature, rng.uniform(index as u64));
            if next == tokenizer.eos() {
                break;
            }
            tokens.push(next);
        }
        Ok(Some(tokenizer.decode(&tokens)))
    }
}

/// The token at which the cumulative softmax passes `at` (in `[0, 1)`); the likeliest at
/// temperature 0.
fn choose(logits: &[f32], temperature: f64, at: f32) -> u32 {
    let likeliest = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0);
    if temperature == 0.0 {
        return likeliest as u32;
    }
    let max = f64::from(logits[likeliest]);
    let weight = |logit: &f32| ((f64::from(*logit) - max) / temperature).exp();
    let mut left = f64::from(at) * logits.iter().map(weight).sum::<f64>();
    for (token, logit) in logits.iter().enumerate() {
        left -= weight(logit);
        if left < 0.0 {
            return token as u32;
        }
    }
    likeliest as u32
}

#[cfg(test)]
mod tests {
    use super::choose;

    #[test]
    fn temperature_zero_takes_the_likeliest() {
        assert_eq!(choose(&[0.0, 3.0, 1.0], 0.0, 0.99), 1);
    }

    #[test]
    fn tokens_are_drawn_by_their_probability() {
        // Probabilities 0.25, 0.5, 0.25.
        let logits = [0.0, std::f32::consts::LN_2, 0.0];
        let drawn: Vec<u32> =
            [0.0, 0.24, 0.26, 0.74, 0.76, 0.999].map(|at| choose(&logits, 1.0, at)).into();
        assert_eq!(drawn, [0, 0, 1, 1, 2, 2]);
    }

    #[test]
    fn a_low_temperature_sharpens() {
        let logits = [0.0, 1.0];
        assert_eq!(choose(&logits, 1.0, 0.2), 0);
        assert_eq!(choose(&logits, 0.1, 0.2), 1);
    }
}
