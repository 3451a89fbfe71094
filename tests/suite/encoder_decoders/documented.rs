//! The commands of `docs/t5.md`.

use std::{fs, os::unix::fs::symlink, path::Path};

use crate::{encoders::corpus::Sentences, house::docs::blocks, runs::child::Ranks};
use megaburn_test_support::text::fresh_seed;

#[test]
fn the_commands_of_the_page_run_as_they_stand() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/t5.md");
    let commands: String = blocks(&fs::read_to_string(page).unwrap(), "sh").concat();
    let commands = format!("export XDG_CACHE_HOME=$PWD/cache\n{commands}");
    for command in ["data preprocess", "train", "convert export", "verify"] {
        let command = format!("target/release/megaburn {command} ");
        assert!(commands.contains(&command), "{command}");
    }
    let sentences = Sentences::new(40, fresh_seed());
    let clone = tempfile::tempdir().unwrap();
    let at = |name: &str| clone.path().join(name);
    fs::create_dir_all(at("target/release")).unwrap();
    symlink(
        env!("CARGO_BIN_EXE_megaburn-under-test"),
        at("target/release/megaburn"),
    )
    .unwrap();
    // A row of the page's length has more masked spans than the rows of other tests.
    let sentinels: String = (4..30)
        .map(|index| format!("<extra_id_{index}>\n"))
        .collect();
    let vocabulary = fs::read_to_string(sentences.path("vocab.txt")).unwrap();
    fs::write(at("vocab.txt"), vocabulary + &sentinels).unwrap();
    fs::copy(sentences.path("text.jsonl"), at("corpus.jsonl")).unwrap();
    Ranks::shell(&commands, clone.path()).finish();
    assert!(at("t5-hf/model.safetensors").is_file());
}
