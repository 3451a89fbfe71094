//! Keys that earlier versions had.

use toml::{Table, Value};

/// Removed keys, and why each was removed. No value of them ever changed a number, so a run that
/// was trained with one resumes without it.
const REMOVED: &[(&str, &str)] = &[(
    "parallel.overlap_moe",
    "no step was faster with it since tokens are sent once to each rank \
     (benches/results/moe.md)",
)];

/// Why a key was removed; `None` if no version had it or this one still has it.
pub(super) fn why_removed(key: &str) -> Option<&'static str> {
    let (_, why) = REMOVED.iter().find(|(removed, _)| *removed == key)?;
    Some(why)
}

/// Drops removed keys from a configuration that an earlier version wrote.
pub(crate) fn drop_removed(config: &mut Table) {
    fn drop_key(table: &mut Table, key: &str) {
        match key.split_once('.') {
            None => drop(table.remove(key)),
            Some((section, key)) => {
                if let Some(Value::Table(section)) = table.get_mut(section) {
                    drop_key(section, key);
                }
            }
        }
    }
    for (key, _) in REMOVED {
        drop_key(config, key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::schema;

    #[test]
    fn a_removed_key_does_not_exist() {
        let keys = schema::keys();
        for (key, _) in REMOVED {
            assert!(!keys.iter().any(|known| known == key), "{key} exists");
        }
    }

    #[test]
    fn removed_keys_are_dropped_and_others_stay() {
        let mut config = "steps = 3\n[parallel]\noverlap = true\noverlap_moe = true"
            .parse()
            .unwrap();
        drop_removed(&mut config);
        assert_eq!(
            config,
            "steps = 3\n[parallel]\noverlap = true".parse().unwrap()
        );
        let before = config.clone();
        drop_removed(&mut config);
        assert_eq!(config, before);
        // A section that is no table is refused elsewhere.
        let mut config: Table = "parallel = 2".parse().unwrap();
        drop_removed(&mut config);
        assert_eq!(config, "parallel = 2".parse().unwrap());
    }
}
