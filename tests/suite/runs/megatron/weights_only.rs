//! Runs that begin with the weights of Megatron-LM's, and without the state of its optimizer.

use std::{fs, path::Path};

use megaburn::{
    checkpoint::{Checkpoint, TensorSource},
    train::megatron::{FromMegatronConfig, from_megatron, to_megatron},
};
use megaburn_torch::pt::PtFile;
use rstest::rstest;

use super::{
    FIRST,
    buckets::{differences, with_tensors},
    config, fixture, import, write_changed,
};
use crate::runs::resume::train;

#[rstest]
#[case("tp2-dp2-buckets", "tp2-dp2")]
#[case("tp2-dp2", "pp2-dp2")]
#[case("pp2", "pp2")]
fn weights_alone_begin_with_new_moments(#[case] name: &str, #[case] layout: &str) {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let options = FromMegatronConfig::new().with_weights_only(true);
    let imported = from_megatron(&fixture(name), &run, &options).unwrap();
    let is_named = |note: &String| note.starts_with("the state of the optimizer is not taken");
    assert_eq!(
        imported.notes.iter().filter(|note| is_named(note)).count(),
        1
    );
    let progress = imported.progress;
    assert_eq!((progress.step, progress.skipped_steps), (FIRST, FIRST));
    assert_eq!(progress.consumed_samples, progress.skipped_samples);
    let weights = dir.path().join("weights");
    let all = import(&fixture(name), &weights).unwrap();
    assert_eq!(all.progress.consumed_samples, progress.consumed_samples);
    // The weights are the same in f32, and no moment is.
    let different = differences(&run, &weights);
    assert!(
        different.iter().all(|name| name.starts_with("exp_avg")),
        "{different:?}"
    );
    let zeros = Checkpoint::open(&run.join(format!("checkpoints/step-{FIRST:08}"))).unwrap();
    for name in &different {
        let values = zeros.read_rows(name, 0..1).unwrap();
        assert!(values.as_bytes().iter().all(|byte| *byte == 0), "{name}");
    }
    let trained = |run: &Path| train(config(run, layout, &[]), FIRST + 3, FIRST + 3);
    let resumed = trained(&run);
    // The schedule is that of the first steps of the run: its warm-up begins again.
    let first = resumed.learning_rates;
    assert_eq!(first[0], imported.config.optimizer.init_lr);
    let later = trained(&weights).learning_rates;
    assert!(first[0] < first[1] && first[1] < first[2] && first[2] < later[0]);
    assert!(
        resumed
            .losses
            .iter()
            .all(|loss| loss.is_finite() && *loss < 7.5)
    );
    assert!(fs::exists(run.join(format!("checkpoints/step-{:08}", FIRST + 3))).unwrap());
}

/// A copy of a fixture as Megatron-LM writes it with `--no-save-optim`.
fn without_optimizer(to: &Path, name: &str) {
    with_tensors(to, name, |tensor, bytes| {
        if tensor.contains("optimizer.") {
            bytes.clear();
        }
    });
    let common = to.join("common.pt");
    fs::remove_file(&common).unwrap();
    write_changed(&common, name, |entries| {
        let of_optimizer = ["optimizer".into(), "opt_param_scheduler".into()];
        entries.retain(|(name, _)| !of_optimizer.contains(name));
    });
}

#[rstest]
fn a_checkpoint_without_optimizer_begins_as_one_with_it(
    #[values("tp2-dp2", "pp2", "dp2-ep2", "tied-pp2-dp2")] name: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    without_optimizer(&at("iter"), name);
    let text = import(&at("iter"), &at("a")).unwrap_err().to_string();
    assert!(text.contains("import it with --weights-only"), "{text}");
    assert!(!at("a").exists());
    let options = FromMegatronConfig::new().with_weights_only(true);
    let mut without = from_megatron(&at("iter"), &at("a"), &options).unwrap();
    let with = from_megatron(&fixture(name), &at("b"), &options).unwrap();
    assert_eq!(without.progress, with.progress);
    without.config.run.dir = with.config.run.dir.clone();
    assert_eq!(without.config.to_toml(), with.config.to_toml());
    assert_eq!(differences(&at("a"), &at("b")), [""; 0]);
    // Back there it has an optimizer and schedules.
    let folder = to_megatron(&at("a"), &at("back"), None).unwrap().folder;
    let common = PtFile::open(folder.join("common.pt")).unwrap();
    let state = common.root().get("opt_param_scheduler").unwrap();
    assert_eq!(state.get("num_steps").unwrap().as_i64(), Some(0));
}
