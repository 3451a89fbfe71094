//! The keys of a configuration, one by one.

use std::collections::BTreeMap;

use toml::{Table, Value};

/// Each key of a configuration by its dotted path, with its value as TOML.
pub(crate) fn keys(table: &Table) -> BTreeMap<String, String> {
    let mut keys = BTreeMap::new();
    add(&mut keys, "", table);
    keys
}

fn add(keys: &mut BTreeMap<String, String>, path: &str, table: &Table) {
    for (name, value) in table {
        let path = if path.is_empty() {
            name.clone()
        } else {
            format!("{path}.{name}")
        };
        match value {
            Value::Table(table) if !table.is_empty() => add(keys, &path, table),
            // Each table of a list, such as `[[data.sources]]`.
            Value::Array(items) if !items.is_empty() && items.iter().all(Value::is_table) => {
                for (number, item) in items.iter().enumerate() {
                    let item = item.as_table().into_iter();
                    item.for_each(|item| add(keys, &format!("{path}[{number}]"), item));
                }
            }
            value => drop(keys.insert(path, value.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_and_lists_of_tables_are_opened() {
        let text = "[train]\nsteps = 3\nbatch_ramp = {}\n[[data.sources]]\npath = \"a\"\nweights = [1.5]\n";
        let keys = keys(&text.parse().unwrap());
        let found: Vec<_> = keys
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        assert_eq!(
            found,
            [
                "data.sources[0].path=\"a\"",
                "data.sources[0].weights=[1.5]",
                "train.batch_ramp={}",
                "train.steps=3"
            ]
        );
    }
}
