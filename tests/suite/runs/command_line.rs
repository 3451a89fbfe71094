//! Completions of shells and manual pages.

use std::fs;

use rstest::rstest;

use crate::runs::child::Ranks;

#[rstest]
#[case("bash", "complete -F _megaburn")]
#[case("zsh", "#compdef megaburn")]
#[case("fish", "complete -c megaburn")]
fn a_shell_gets_a_script_of_all_commands(#[case] shell: &str, #[case] part: &str) {
    let ended = Ranks::command(&["completions", shell]).finish().remove(0);
    for part in [part, "doctor", "sweep", "log-dir", "preprocess"] {
        assert!(ended.stdout.contains(part), "{part}");
    }
    assert!(
        !ended.stdout.contains("launch-child "),
        "hidden commands stay hidden"
    );
}

#[test]
fn an_unknown_shell_is_refused_with_those_there_are() {
    let ended = Ranks::command(&["completions", "cmd"]).wait_all().remove(0);
    assert_eq!(ended.code, Some(2));
    assert!(
        ended.stderr.contains("bash") && ended.stderr.contains("zsh"),
        "{ended:?}"
    );
}

#[test]
fn each_command_has_a_manual_page() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("share/man");
    let ended = Ranks::command(&["man", path.to_str().unwrap()])
        .finish()
        .remove(0);
    let pages = fs::read_dir(path.join("man1")).unwrap().count();
    assert!(
        ended
            .stdout
            .starts_with(&format!("wrote    {pages} pages into ")),
        "{ended:?}"
    );
    assert!(pages > 25, "{pages} pages");
    let page = |name: &str| fs::read_to_string(path.join("man1").join(name)).unwrap();
    let doctor = page("megaburn-doctor.1");
    assert!(
        doctor.contains(".TH megaburn-doctor 1") && doctor.contains("quick"),
        "{doctor}"
    );
    assert!(page("megaburn-data-preprocess.1").contains("megaburn"));
    assert!(page("megaburn.1").contains("doctor"));
    assert!(!path.join("man1/megaburn-launch-child.1").exists());
}
