//! Which layers have a part, in the notation of Megatron-LM's `--moe-layer-freq`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::require::require;
use crate::error::TrainError;

/// Which layers of a model have a part, such as experts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
#[derive(JsonSchema)]
pub enum LayerPattern {
    /// The first layer and every N-th after it.
    Every(usize),
    /// One entry per layer: whether it has the part.
    List(Vec<bool>),
}

impl LayerPattern {
    /// The layers without the part, in a model of `layers` layers.
    pub(super) fn layers_without(&self, layers: usize) -> Vec<usize> {
        let has_it = |layer: usize| match self {
            Self::Every(step) => layer.is_multiple_of(*step),
            Self::List(list) => list.get(layer).copied().unwrap_or(false),
        };
        (0..layers).filter(|&layer| !has_it(layer)).collect()
    }

    /// The pattern of a model in which the layers `without` do not have the part.
    pub(super) fn of(without: &[usize], layers: usize) -> Self {
        match without {
            [] => Self::Every(1),
            without => Self::List((0..layers).map(|layer| !without.contains(&layer)).collect()),
        }
    }

    pub(super) fn validate(&self, key: &'static str, layers: usize) -> Result<(), TrainError> {
        let is_right = match self {
            Self::Every(step) => *step > 0,
            Self::List(list) => list.len() == layers,
        };
        let rule =
            format!("an interval in layers, or a list of model.layers {layers} zeros and ones");
        require(is_right, key, String::from(self.clone()), rule)
    }
}

impl From<LayerPattern> for String {
    fn from(pattern: LayerPattern) -> Self {
        match pattern {
            LayerPattern::Every(step) => step.to_string(),
            LayerPattern::List(list) => {
                // Run-length encoded: one `[x]*n` for each run of equal entries.
                let runs = list.chunk_by(|a, b| a == b);
                let run = |run: &[bool]| format!("[{}]*{}", u8::from(run[0]), run.len());
                runs.map(run).collect::<Vec<_>>().join("+")
            }
        }
    }
}

impl TryFrom<String> for LayerPattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if let Ok(step) = text.trim().parse() {
            return Ok(Self::Every(step));
        }
        let text: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
        let mut reader = Reader { text: &text, at: 0 };
        let list = reader.sum()?;
        if reader.at == text.len() {
            Ok(Self::List(list))
        } else {
            Err(reader.expected("the end"))
        }
    }
}

/// Upper bound on the layers of a pattern, so that a typo such as `*99999` is refused.
const MOST_LAYERS: usize = 10_000;

/// Parser of sums of lists, each optionally repeated (`*n`) or in parentheses.
struct Reader<'a> {
    text: &'a [char],
    at: usize,
}

impl Reader<'_> {
    fn sum(&mut self) -> Result<Vec<bool>, String> {
        let mut list = self.product()?;
        while self.takes('+') {
            list.extend(self.product()?);
        }
        if list.len() <= MOST_LAYERS {
            Ok(list)
        } else {
            Err(format!("a list of {} layers is too long", list.len()))
        }
    }

    fn product(&mut self) -> Result<Vec<bool>, String> {
        let mut list = self.list()?;
        while self.takes('*') {
            let times = self.number()?;
            if list.len().saturating_mul(times) > MOST_LAYERS {
                return Err(format!("{} layers times {times} are too many", list.len()));
            }
            list = list.repeat(times);
        }
        Ok(list)
    }

    fn list(&mut self) -> Result<Vec<bool>, String> {
        if self.takes('(') {
            let list = self.sum()?;
            return if self.takes(')') {
                Ok(list)
            } else {
                Err(self.expected("`)`"))
            };
        }
        if !self.takes('[') {
            return Err(self.expected("a number, `[` or `(`"));
        }
        let mut list = Vec::new();
        loop {
            list.push(match self.number()? {
                0 => false,
                1 => true,
                _ => return Err(self.expected("0 or 1")),
            });
            if self.takes(']') {
                return Ok(list);
            }
            if !self.takes(',') {
                return Err(self.expected("`,` or `]`"));
            }
        }
    }

    fn number(&mut self) -> Result<usize, String> {
        let digits = self.text[self.at..]
            .iter()
            .take_while(|c| c.is_ascii_digit());
        let digits: String = digits.collect();
        let number = digits.parse().map_err(|_| self.expected("a number"))?;
        self.at += digits.len();
        Ok(number)
    }

    fn takes(&mut self, next: char) -> bool {
        let found = self.text.get(self.at) == Some(&next);
        self.at += usize::from(found);
        found
    }

    fn expected(&self, what: &str) -> String {
        let rest: String = self.text[self.at..].iter().collect();
        format!("expected {what} at `{rest}` in a pattern such as 2 or ([0]*1+[1]*60)")
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("1", 3, &[])]
    #[case("2", 5, &[1, 3])]
    #[case("([0]*1+[1]*3)", 4, &[0])]
    #[case("[0,1]*2", 4, &[0, 2])]
    #[case("([1] + [0, 1]) * 2", 6, &[1, 4])]
    #[case("[1]*0+[0]", 1, &[0])]
    fn patterns_are_megatrons(#[case] text: &str, #[case] layers: usize, #[case] dense: &[usize]) {
        let pattern = LayerPattern::try_from(text.to_string()).unwrap();
        assert_eq!(pattern.layers_without(layers), dense);
        pattern
            .validate("model.experts.layer_freq", layers)
            .unwrap();
        let again = LayerPattern::try_from(String::from(pattern.clone())).unwrap();
        assert_eq!(again.layers_without(layers), dense);
        assert_eq!(
            LayerPattern::of(dense, layers).layers_without(layers),
            dense
        );
    }

    #[rstest]
    #[case("", "expected a number, `[` or `(` at ``")]
    #[case("[2]", "expected 0 or 1")]
    #[case("[0]*", "expected a number at ``")]
    #[case("([0]", "expected `)`")]
    #[case("[0 1", "expected `,` or `]` at ``")]
    #[case("[0]x", "expected the end at `x`")]
    #[case("[0]*99999", "1 layers times 99999 are too many")]
    fn what_is_no_pattern_is_refused(#[case] text: &str, #[case] message: &str) {
        let error = LayerPattern::try_from(text.to_string()).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
}
