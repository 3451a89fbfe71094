//! The names of a checkpoint's objects in its folder.

use megaburn_store::UNFINISHED;

use crate::manifest::{MANIFEST, MANIFEST_HASH, rank_of_file};

const MARK_START: &str = "run-";
const MARK_END: &str = ".owner";

/// The name of the object that says that the start `start` of the run `run_id` writes the folder.
pub(crate) fn mark_of(run_id: &str, start: &str) -> String {
    format!("{MARK_START}{run_id}.{start}{MARK_END}")
}

/// The run whose mark has this name.
pub(crate) fn run_of_mark(name: &str) -> Option<&str> {
    let marked = name.strip_prefix(MARK_START)?.strip_suffix(MARK_END)?;
    let (id, start) = marked.split_once('.')?;
    let is_hex = |id: &str| !id.is_empty() && id.bytes().all(|b| b.is_ascii_hexdigit());
    (is_hex(id) && is_hex(start)).then_some(id)
}

/// The name of the object, next to the checkpoints, that says which start of a run writes them.
pub(crate) fn start_of(run_id: &str) -> String {
    format!("{MARK_START}{run_id}.start")
}

/// Whether an upload writes objects of this name, marks aside.
pub(crate) fn is_written(name: &str) -> bool {
    let is_manifest = name == MANIFEST || name == MANIFEST_HASH;
    is_manifest || rank_of_file(name).is_some() || name.starts_with(UNFINISHED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::rank_file;

    #[test]
    fn only_names_that_an_upload_gives_are_its_own() {
        for rank in [0, 7, 99_999, 123_456] {
            assert!(is_written(&rank_file(rank)));
        }
        assert!(is_written("manifest.json") && is_written("manifest.xxh3"));
        for name in [
            "rank-0.safetensors",
            "rank-000007.safetensors",
            "rank-x.safetensors",
            "a",
        ] {
            assert!(!is_written(name), "{name}");
        }
        assert_eq!(run_of_mark(&mark_of("1f0a", "2b")), Some("1f0a"));
        for name in [
            "run-.owner",
            "run-my.2b.owner",
            "run-1f",
            "1f.2b.owner",
            "run-1f.owner",
            "run-1f.2b.3c.owner",
            "run-1f.start",
        ] {
            assert_eq!(run_of_mark(name), None, "{name}");
        }
    }
}
