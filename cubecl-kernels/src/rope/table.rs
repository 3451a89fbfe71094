use std::f64::consts::TAU;

use burn::config::Config;
use burn::tensor::{Device, Tensor, TensorData};

use crate::KernelError;

/// How the frequencies of a rotary embedding are stretched for contexts longer than it was
/// trained on.
#[derive(Config, Debug, PartialEq)]
pub enum RopeScaling {
    /// The frequencies as they are.
    None,
    /// All frequencies divided by `factor`: positions are interpolated (Chen et al., 2023,
    /// arXiv:2306.15595).
    Linear {
        /// How much longer the context is than the original one.
        factor: f64,
    },
    /// Llama 3.1's: wave lengths above `original_max_position / low_freq_factor` are stretched by
    /// `factor`, those below `original_max_position / high_freq_factor` are kept, and between the
    /// two the frequencies are interpolated linearly in the number of turns (`rope_type: llama3`
    /// in Hugging Face's `modeling_rope_utils.py`, `rope_scaling` in Megatron's
    /// `rotary_pos_embedding.py`).
    Llama3 {
        /// How much longer the context is than the original one.
        factor: f64,
        /// Turns within the original context below which a frequency is stretched whole.
        low_freq_factor: f64,
        /// Turns within the original context above which a frequency is kept.
        high_freq_factor: f64,
        /// The context trained on, in positions.
        original_max_position: usize,
    },
}

/// What a [`RopeTable`] is made from.
#[derive(Config, Debug, PartialEq)]
pub struct RopeConfig {
    /// Size of a head; even.
    pub head_dim: usize,
    /// The base of the frequencies, `theta^(-2i / head_dim)`.
    #[config(default = 10000.0)]
    pub theta: f64,
    /// Stretching of the frequencies.
    #[config(default = "RopeScaling::None")]
    pub scaling: RopeScaling,
}

impl RopeConfig {
    /// The table for `positions`: a range, or the list that a context-parallel rank holds.
    ///
    /// Angles are computed in f64 on the host; the table is made on the device without automatic
    /// differentiation, whichever `device` is.
    ///
    /// # Errors
    /// An odd head size, or a parameter that is not a finite number in its range.
    pub fn init(
        &self,
        positions: impl IntoIterator<Item = usize>,
        device: &Device,
    ) -> Result<RopeTable, KernelError> {
        let frequencies = self.frequencies()?;
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in positions {
            for frequency in &frequencies {
                let (s, c) = (position as f64 * frequency).sin_cos();
                cos.push(c as f32);
                sin.push(s as f32);
            }
        }
        let device = device.clone().inner();
        let shape = [cos.len() / frequencies.len(), frequencies.len()];
        let tensor = |data| Tensor::from_data(TensorData::new(data, shape), &device);
        Ok(RopeTable { cos: tensor(cos), sin: tensor(sin) })
    }

    /// The angle per position of each pair of elements, in radians, `head_dim / 2` of them.
    ///
    /// # Errors
    /// As [`init`](Self::init).
    pub fn frequencies(&self) -> Result<Vec<f64>, KernelError> {
        let d = self.head_dim;
        if d == 0 || !d.is_multiple_of(2) {
            return Err(KernelError::RopeHeadDim { head_dim: d });
        }
        check("theta", self.theta, 0.0)?;
        self.scaling.check()?;
        Ok((0..d / 2)
            .map(|i| self.theta.powf(-2.0 * i as f64 / d as f64))
            .map(|frequency| self.scaling.apply(frequency))
            .collect())
    }
}

impl RopeScaling {
    fn check(&self) -> Result<(), KernelError> {
        match *self {
            Self::None => Ok(()),
            Self::Linear { factor } => check("scaling factor", factor, 0.0),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                check("scaling factor", factor, 0.0)?;
                check("low_freq_factor", low_freq_factor, 0.0)?;
                check("high_freq_factor", high_freq_factor, low_freq_factor)?;
                check("original_max_position", original_max_position as f64, 0.0)
            }
        }
    }

    fn apply(&self, frequency: f64) -> f64 {
        match *self {
            Self::None => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let turns = original_max_position as f64 * frequency / TAU;
                let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let kept = kept.clamp(0.0, 1.0);
                frequency * (kept + (1.0 - kept) / factor)
            }
        }
    }
}

fn check(name: &'static str, value: f64, above: f64) -> Result<(), KernelError> {
    if value.is_finite() && value > above {
        Ok(())
    } else {
        Err(KernelError::RopeParameter { name, value, above })
    }
}

/// Cosines and sines of a list of positions, f32, on a device without automatic differentiation.
#[derive(Clone, Debug)]
pub struct RopeTable {
    cos: Tensor<2>,
    sin: Tensor<2>,
}

impl RopeTable {
    /// The cosines, `[s, d / 2]`.
    pub fn cos(&self) -> &Tensor<2> {
        &self.cos
    }

    /// The sines, `[s, d / 2]`.
    pub fn sin(&self) -> &Tensor<2> {
        &self.sin
    }

    /// How many positions the table has.
    pub fn num_positions(&self) -> usize {
        self.cos.dims()[0]
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::testing::{device, values};

    #[test]
    fn linear_scaling_puts_positions_closer_together() {
        let plain = RopeConfig::new(8).frequencies().unwrap();
        let scaled = RopeConfig::new(8).with_scaling(RopeScaling::Linear { factor: 4.0 });
        let scaled = scaled.frequencies().unwrap();
        assert!(plain.iter().zip(&scaled).all(|(plain, scaled)| *plain == scaled * 4.0));
    }

    fn llama3(factor: f64, original_max_position: usize) -> RopeScaling {
        let (low_freq_factor, high_freq_factor) = (1.0, 4.0);
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position }
    }

    // Made with Python, by wave lengths as Hugging Face writes the rule:
    //   f = theta ** (-2 * i / d); wave = 2 * pi / f
    //   if wave > old / low: f /= factor
    //   elif wave >= old / high:
    //       smooth = (old / wave - low) / (high - low); f = (1 - smooth) * f / factor + smooth * f
    #[rstest]
    #[case::plain(8, RopeScaling::None, 0, &[1.0, 0.03760603093086393, 0.001414213562373095, 5.318295896944988e-05])]
    // The `llama3-scaled` fixture: one kept, three stretched whole.
    #[case::fixture(8, llama3(8.0, 32), 0, &[1.0, 0.004700753866357992, 0.00017677669529663688, 6.647869871181235e-06])]
    // Llama 3.1, head size 128: from the last kept frequency, over the band, into the stretched.
    #[case::llama31(128, llama3(8.0, 8192), 28, &[
        0.003211445994752591, 0.002166570763503359, 0.0013718935677611381, 0.0008567514129196321,
        0.0005248461609929547, 0.00031269375038406517, 0.0001785078127679964, 9.556212353964683e-05,
        7.78465527393245e-05, 6.341514345777615e-05,
    ])]
    fn frequencies_are_those_of_hugging_face(
        #[case] head_dim: usize,
        #[case] scaling: RopeScaling,
        #[case] skip: usize,
        #[case] expected: &[f64],
    ) {
        let config = RopeConfig::new(head_dim).with_theta(500_000.0).with_scaling(scaling);
        let frequencies = config.frequencies().unwrap();
        assert_eq!(frequencies.len(), head_dim / 2);
        for (a, b) in frequencies[skip..].iter().zip(expected) {
            assert!((a / b - 1.0).abs() < 1e-12, "{a} {b}");
        }
    }

    #[test]
    fn a_table_is_untracked_and_holds_any_positions() {
        let table = RopeConfig::new(4).with_theta(100.0).init([7, 0, 3], &device()).unwrap();
        assert!(!table.cos().device().is_autodiff());
        assert_eq!((table.num_positions(), table.sin().dims()), (3, [3, 2]));
        // Frequencies 1 and 0.1.
        let expected = [7.0f64, 0.7, 0.0, 0.0, 3.0, 0.3];
        for (value, angle) in values(table.cos().clone()).into_iter().zip(expected) {
            assert!((value - angle.cos()).abs() < 1e-7);
        }
        for (value, angle) in values(table.sin().clone()).into_iter().zip(expected) {
            assert!((value - angle.sin()).abs() < 1e-7);
        }
    }

    #[rstest]
    #[case(RopeConfig::new(7), "heads of size 7")]
    #[case(RopeConfig::new(0), "heads of size 0")]
    #[case(RopeConfig::new(8).with_theta(0.0), "theta is 0, it must be a finite number above 0")]
    #[case(RopeConfig::new(8).with_scaling(llama3(f64::NAN, 32)), "factor is NaN")]
    #[case(RopeConfig::new(8).with_scaling(llama3(8.0, 0)), "original_max_position is 0")]
    #[case(RopeConfig::new(8).with_scaling(RopeScaling::Linear { factor: 0.0 }), "factor is 0")]
    fn a_table_that_cannot_be_is_refused(#[case] config: RopeConfig, #[case] message: &str) {
        let error = config.init(0..2, &device()).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }

    #[test]
    fn a_band_without_width_is_refused() {
        let (factor, original_max_position) = (8.0, 32);
        let (low_freq_factor, high_freq_factor) = (4.0, 4.0);
        let scaling = RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        };
        let error = RopeConfig::new(8).with_scaling(scaling).frequencies().unwrap_err();
        assert!(
            error.to_string().contains("high_freq_factor is 4, it must be a finite number above 4")
        );
    }
}
