/// How the next token is sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; below 1 it favours likely tokens. 0 takes the likeliest token and
    /// ignores the other options.
    pub temperature: f64,
    /// Sample only from the `k` likeliest tokens.
    pub top_k: Option<usize>,
    /// Sample only from the likeliest tokens whose probabilities add up to this value ("nucleus",
    /// Holtzman et al., 2020), after `top_k`.
    pub top_p: Option<f64>,
}

impl Sampling {
    /// Greedy decoding: the likeliest token; the first one of equal ones.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: None,
        top_p: None,
    };

    /// Refuses invalid options.
    ///
    /// # Errors
    /// The invalid value and its permitted range.
    pub fn validate(&self) -> Result<(), String> {
        let Self {
            temperature,
            top_k,
            top_p,
        } = *self;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            return Err(format!(
                "temperature is {temperature}: it must be 0 or more and finite"
            ));
        }
        if top_k == Some(0) {
            return Err("top-k is 0: it must be at least 1".into());
        }
        match top_p.filter(|top_p| !(*top_p > 0.0 && *top_p <= 1.0)) {
            Some(top_p) => Err(format!(
                "top-p is {top_p}: it must be greater than 0 and at most 1"
            )),
            None => Ok(()),
        }
    }

    /// Samples a token with the random number `at`, uniform in `[0, 1)`. All logits must be finite.
    pub fn choose(&self, logits: &[f32], at: f32) -> u32 {
        let Self {
            temperature,
            top_k,
            top_p,
        } = *self;
        let likeliest = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        if temperature == 0.0 {
            return (0..logits.len()).min_by(likeliest).unwrap_or(0) as u32;
        }
        let mut tokens: Vec<usize> = (0..logits.len()).collect();
        tokens.sort_unstable_by(likeliest);
        tokens.truncate(top_k.unwrap_or(usize::MAX).max(1));
        let max = f64::from(logits[tokens[0]]);
        let weight = |&token: &usize| ((f64::from(logits[token]) - max) / temperature).exp();
        let mut weights: Vec<f64> = tokens.iter().map(weight).collect();
        if let Some(top_p) = top_p {
            let mut left = top_p * weights.iter().sum::<f64>();
            let kept = weights.iter().take_while(|&&weight| {
                let keep = left > 0.0;
                left -= weight;
                keep
            });
            weights.truncate(kept.count().max(1));
        }
        // Sort by id, so that the result does not change if rounding swaps two tokens of almost
        // equal probability.
        let mut kept: Vec<(usize, f64)> = tokens.into_iter().zip(weights).collect();
        kept.sort_unstable_by_key(|(token, _)| *token);
        let mut left = f64::from(at) * kept.iter().map(|(_, weight)| weight).sum::<f64>();
        let passed = kept.iter().find(|(_, weight)| {
            left -= weight;
            left < 0.0
        });
        passed.unwrap_or(&kept[kept.len() - 1]).0 as u32
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// The frequency of each token over evenly spaced random numbers.
    fn shares(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
        const POINTS: usize = 10_000;
        let mut counts = vec![0.0; logits.len()];
        for point in 0..POINTS {
            let at = point as f32 / POINTS as f32;
            counts[sampling.choose(logits, at) as usize] += 1.0 / POINTS as f64;
        }
        counts
    }

    fn sampling(temperature: f64, top_k: Option<usize>, top_p: Option<f64>) -> Sampling {
        Sampling {
            temperature,
            top_k,
            top_p,
        }
    }

    #[test]
    fn greedy_takes_the_likeliest_and_of_equals_the_first() {
        for at in [0.0, 0.5, 0.999] {
            assert_eq!(Sampling::GREEDY.choose(&[0.0, 3.0, 1.0, 3.0], at), 1);
        }
        let one = sampling(5.0, Some(1), None);
        assert_eq!(shares(one, &[0.0, 3.0, 1.0])[0], 0.0);
        assert_eq!(shares(one, &[0.0, 3.0, 1.0])[2], 0.0);
    }

    /// The probabilities are 0.1, 0.4, 0.2 and 0.3.
    #[rstest]
    #[case::all(sampling(1.0, None, None), [0.1, 0.4, 0.2, 0.3])]
    #[case::hot(sampling(1e9, None, None), [0.25; 4])]
    #[case::cold(sampling(0.5, None, None), [1.0 / 30.0, 16.0 / 30.0, 4.0 / 30.0, 9.0 / 30.0])]
    #[case::two(sampling(1.0, Some(2), None), [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0])]
    #[case::more_than_there_are(sampling(1.0, Some(9), None), [0.1, 0.4, 0.2, 0.3])]
    #[case::nucleus(sampling(1.0, None, Some(0.65)), [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0])]
    #[case::nucleus_of_three(sampling(1.0, None, Some(0.75)), [0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0])]
    #[case::nucleus_of_one(sampling(1.0, None, Some(1e-9)), [0.0, 1.0, 0.0, 0.0])]
    #[case::nucleus_of_all(sampling(1.0, None, Some(1.0)), [0.1, 0.4, 0.2, 0.3])]
    // 4/7, the probability of the first of the two remaining tokens, is below 0.6.
    #[case::both(sampling(1.0, Some(2), Some(0.6)), [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0])]
    fn tokens_are_drawn_by_their_probability(
        #[case] sampling: Sampling,
        #[case] expected: [f64; 4],
    ) {
        let logits = [0.1f32, 0.4, 0.2, 0.3].map(f32::ln);
        for (token, (found, expected)) in shares(sampling, &logits).iter().zip(expected).enumerate()
        {
            assert!(
                (found - expected).abs() < 2e-3,
                "{token}: {found}, expected {expected}"
            );
        }
    }

    #[rstest]
    #[case(sampling(-1.0, None, None), "temperature is -1")]
    #[case(sampling(f64::NAN, None, None), "temperature is NaN")]
    #[case(sampling(1.0, Some(0), None), "top-k is 0")]
    #[case(sampling(1.0, None, Some(0.0)), "top-p is 0")]
    #[case(sampling(1.0, None, Some(1.1)), "top-p is 1.1")]
    fn what_is_no_way_to_choose_is_refused(#[case] sampling: Sampling, #[case] message: &str) {
        assert!(sampling.validate().unwrap_err().starts_with(message));
    }
}
