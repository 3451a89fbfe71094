//! Conversion of values, and errors about invalid ones.

use toml::{Table, Value};

use super::nearest::nearest_value;
use crate::error::TrainError;

/// Turns serde's error text about a value, whose second line names the key, into one sentence.
pub(crate) fn bad_value(text: &str, origin: &str) -> TrainError {
    let (why, key) = text
        .trim_end()
        .rsplit_once("\nin ")
        .unwrap_or((text.trim_end(), ""));
    let place = if key.is_empty() {
        origin.to_string()
    } else {
        format!("{key} in {origin}")
    };
    let quoted: Vec<&str> = why.split('`').skip(1).step_by(2).collect();
    let is_unknown = ["unknown variant", "unknown family"]
        .iter()
        .any(|start| why.starts_with(start));
    let value_or_default = match quoted.split_first() {
        Some((value, known)) if is_unknown => nearest_value(value, known),
        _ => None,
    };
    let hint = value_or_default
        .map(|value_or_default| format!("; did you mean `{value_or_default}`?"))
        .unwrap_or_default();
    TrainError::Value {
        place,
        why: format!("{}{hint}", why.replace('\n', " ")),
    }
}

/// The value at a dotted path.
pub(super) fn value_at<'a>(table: &'a Table, path: &str) -> Option<&'a Value> {
    match path.split_once('.') {
        None => table.get(path),
        Some((section, path)) => value_at(table.get(section)?.as_table()?, path),
    }
}

/// Allows one method for all layers in `parallel.cp_comm`, without brackets.
pub(super) fn list_ways(layer: &mut Table) {
    let parallel = layer.get_mut("parallel").and_then(Value::as_table_mut);
    if let Some(ways) = parallel.and_then(|parallel| parallel.get_mut("cp_comm"))
        && ways.is_str()
    {
        *ways = Value::Array(vec![ways.clone()]);
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::{config::ConfigLayers, exit::Exit};

    #[rstest]
    #[case(
        "parallel.schedule=zbv",
        "`parallel.schedule` in `--set parallel.schedule=zbv`: unknown variant `zbv`, expected one of"
    )]
    #[case("parallel.schedule=zbv", "; did you mean `zb-v`?")]
    #[case("optimizer.name=adam", "; did you mean `adamw`?")]
    #[case("optimizer.learning_rate=1", "; the nearest key is `optimizer.lr`")]
    #[case(
        "parallel.cp_comm=ring",
        "`parallel.cp_comm` in `--set parallel.cp_comm=ring`: unknown cp_comm `ring`"
    )]
    fn a_bad_value_is_one_line_that_names_the_key(#[case] set: &str, #[case] message: &str) {
        let error = ConfigLayers::new().with_set(set).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(message) && !text.contains('\n'), "{text}");
        assert_eq!(error.exit(), Exit::BadInput);
    }

    #[test]
    fn one_way_for_all_layers_needs_no_brackets() {
        let config = |set| ConfigLayers::new().with_set(set).unwrap().load().unwrap();
        let listed = config(r#"parallel.cp_comm=["a2a"]"#);
        assert_eq!(config("parallel.cp_comm=a2a"), listed);
        assert_eq!(config("parallel.cp_comm=\"a2a\""), listed);
    }
}
