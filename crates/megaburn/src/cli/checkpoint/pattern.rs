//! Patterns of tensors' names.

use std::str::FromStr;

use glob::Pattern;
use megaburn_checkpoint::{Selection, TensorSource};
use megaburn_train::TrainError;

/// A pattern of full names: `*` stands for any text, `?` for any character, `[ab]` for one of some.
#[derive(Clone, Debug)]
pub(super) struct TensorPattern(Pattern);

impl FromStr for TensorPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let pattern = Pattern::new(text).map_err(|error| error.to_string())?;
        Ok(Self(pattern))
    }
}

impl TensorPattern {
    /// The pattern of all names.
    pub(super) fn all() -> Self {
        Self(Pattern::new("*").expect("`*` is a pattern"))
    }

    pub(super) fn matches(&self, name: &str) -> bool {
        self.0.matches(name)
    }

    /// The tensors of a source whose names match.
    ///
    /// # Errors
    /// No name matches, which is most probably a typing error.
    pub(super) fn select<'a>(
        &self,
        source: &'a dyn TensorSource,
    ) -> Result<Selection<'a>, TrainError> {
        let found = Selection::new(source, |name| self.matches(name));
        let headers = source.headers();
        match headers.first() {
            Some(first) if found.headers().is_empty() => Err(self.without_match(&first.name)),
            _ => Ok(found),
        }
    }

    /// The error that no name matches, of which `name` is one.
    pub(super) fn without_match(&self, name: &str) -> TrainError {
        TrainError::Invalid {
            key: "PATTERN",
            value: format!("`{}`", self.0),
            rule: format!("one that matches the full name of a tensor, as `*` or `{name}` do"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_part_of_a_name() {
        let pattern: TensorPattern = "model.layers.*.weight".parse().unwrap();
        assert!(pattern.matches("model.layers.0.mlp.weight"));
        assert!(!pattern.matches("exp_avg.model.layers.0.weight"));
        assert!(TensorPattern::all().matches("a.b"));
        "model.[0".parse::<TensorPattern>().unwrap_err();
        let error = pattern.without_match("model.norm.weight").to_string();
        assert!(error.contains("is `model.layers.*.weight`"), "{error}");
        assert!(error.contains("`model.norm.weight`"), "{error}");
    }
}
