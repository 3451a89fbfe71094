//! Positive numbers on the command line, with the suffixes that counts of tokens have.

use std::str::FromStr;

/// A positive number, such as `2.5`, `300B` or `15T`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::cli) struct Quantity(f64);

const SUFFIXES: [(char, f64); 5] = [('k', 1e3), ('M', 1e6), ('B', 1e9), ('G', 1e9), ('T', 1e12)];

impl FromStr for Quantity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let suffix = SUFFIXES
            .into_iter()
            .find(|(suffix, _)| text.ends_with(*suffix));
        let (number, unit) = match suffix {
            Some((suffix, unit)) => (text.strip_suffix(suffix).unwrap_or(text), unit),
            None => (text, 1.0),
        };
        let value = number.parse::<f64>().map(|number| number * unit);
        match value {
            Ok(value) if value.is_finite() && value > 0.0 => Ok(Self(value)),
            _ => Err("write a positive number, such as 2.5, 300B or 15T".into()),
        }
    }
}

impl From<Quantity> for f64 {
    fn from(quantity: Quantity) -> Self {
        quantity.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_suffixes() {
        for (text, value) in [
            ("2.5", 2.5),
            ("300B", 3e11),
            ("15T", 1.5e13),
            ("1e9", 1e9),
            ("7k", 7e3),
        ] {
            assert_eq!(text.parse(), Ok(Quantity(value)), "{text}");
        }
        for text in ["", "-1", "0", "T", "nan", "1TT", "ten"] {
            assert!(text.parse::<Quantity>().is_err(), "{text}");
        }
    }
}
