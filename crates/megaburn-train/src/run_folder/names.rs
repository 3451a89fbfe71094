//! The names that a run owns in its folder. Everything else there is somebody's own.

use megaburn_models::assets::ASSETS;

/// Says that the folder is a run's, and which run's.
pub(crate) const MARKER: &str = "run.json";
/// Locked by the run that is going on.
pub(crate) const LOCK: &str = ".lock";
/// The resolved configuration.
pub(crate) const CONFIG: &str = "config.toml";
/// The resolved configuration, where `config.toml` is the user's.
pub(crate) const RESOLVED_CONFIG: &str = "config.resolved.toml";
/// One line a step, an evaluation or a start.
pub(crate) const METRICS: &str = "metrics.jsonl";
/// Lines that stood in `metrics.jsonl` and are no JSON objects.
pub(crate) const OTHER_LINES: &str = "metrics.other-lines.txt";
/// Whether the run is going on, stopped or finished.
pub(crate) const STATE: &str = "state.json";
/// The picture of the loss.
pub(crate) const PICTURE: &str = "loss.svg";
/// The folder of checkpoints.
pub(crate) const CHECKPOINTS: &str = "checkpoints";

/// How the name of a folder begins that holds what `--fresh` has set aside.
pub(super) const ASIDE: &str = "before-";
/// How its name ends while it is filled.
pub(super) const MOVING: &str = ".moving";

/// The files and folders that a run makes under exactly these names.
const OWNED: [&str; 10] = [
    MARKER,
    LOCK,
    CONFIG,
    RESOLVED_CONFIG,
    METRICS,
    OTHER_LINES,
    STATE,
    PICTURE,
    CHECKPOINTS,
    ASSETS,
];

/// Whether a run writes under this name.
pub(super) fn is_owned(name: &str) -> bool {
    OWNED.contains(&name)
}

/// Whether the name is that of a file that a kill has left half-written: `NAME.tmp-PID-TIME` of an owned
/// NAME. Returns NAME.
pub(super) fn leftover_of(name: &str) -> Option<&str> {
    let (owned, rest) = name.split_once(".tmp-").filter(|(owned, _)| is_owned(owned))?;
    let is_hex = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_hexdigit());
    rest.split_once('-').filter(|(pid, time)| is_hex(pid) && is_hex(time)).map(|_| owned)
}

/// Whether the name is that of a committed checkpoint.
pub(super) fn is_checkpoint(name: &str) -> bool {
    let digits = name.strip_prefix("step-");
    digits.is_some_and(|digits| digits.len() >= 8 && digits.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_leftovers_of_owned_names_are_leftovers() {
        assert_eq!(leftover_of("config.toml.tmp-1f-2a"), Some(CONFIG));
        let others = ["config.toml", "notes.tmp-1-2", "my.config.toml.tmp-1-2", "run.json~"];
        for name in others.into_iter().chain(["config.toml.tmp-mine", "config.toml.tmp-1-"]) {
            assert_eq!(leftover_of(name), None, "{name}");
        }
    }
}
