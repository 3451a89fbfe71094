//! The configuration of a task's run.

use megaburn::task::TaskLayers;
use rstest::rstest;

use super::model::config;

#[rstest]
#[case(
    "net.hiden=4",
    "unknown key `net.hiden` in `--set net.hiden=4`; the nearest key is `net.hidden`"
)]
#[case("nets.hidden=4", "unknown key `nets.hidden`")]
#[case(
    "trian.steps=4",
    "unknown key `trian.steps` in `--set trian.steps=4`; the nearest key is `train.steps`"
)]
#[case("points.nann=4", "unknown key `points.nann`")]
#[case(
    "train.stpes=4",
    "unknown key `train.stpes` in `--set train.stpes=4`; the nearest key is `train.steps`"
)]
#[case("data.seq_len=4", "unknown key `data.seq_len`")]
#[case(
    "net.hidden=wide",
    "`net.hidden` in `--set net.hidden=wide`: invalid type: string \"wide\", expected usize"
)]
#[case("train.steps=0", "`train.steps` is 0: it must be at least 1")]
#[case(
    "train.hidden_dropout=0.1",
    "`train.hidden_dropout` is 0.1: it must be left out: only a decoder"
)]
#[case(
    "optimizer.decoupled_lr=0.1",
    "`optimizer.decoupled_lr` is 0.1: it must be left out"
)]
#[case("parallel.ep=2", "`parallel.ep` is 2: it must be left out")]
fn a_key_that_a_task_has_no_use_for_is_refused(#[case] set: &str, #[case] message: &str) {
    let error = config(&[set]).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

#[test]
fn a_task_may_have_no_sections() {
    let layers = TaskLayers::new().with_set("train.steps=9").unwrap();
    let config = layers.clone().load::<()>("plain").unwrap();
    assert_eq!(config.run.train.steps, 9);
    assert_eq!(config.run.run.dir, "runs/plain");
    let error = layers.with_set("net.hidden=4").unwrap().load::<()>("plain");
    assert!(error.is_err());
}

#[test]
fn the_text_of_a_configuration_reads_back() {
    let first = config(&["net.hidden=6", "points.nan=3", "train.steps=9"]).unwrap();
    let text = first.to_toml();
    for part in [
        "hidden = 6",
        "nan = 3",
        "steps = 9",
        "[optimizer]",
        "runs/waves",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    for part in ["[model]", "[data]", "qk_clip", "cp_comm"] {
        assert!(!text.contains(part), "{part}: {text}");
    }
    let again = TaskLayers::new().with_text("again", &text).unwrap();
    let again = again.load::<super::model::Config>("waves").unwrap();
    assert_eq!(again.to_toml(), text);
}
