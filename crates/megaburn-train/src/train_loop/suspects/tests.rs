use std::{
    fs, mem,
    path::{Path, PathBuf},
    sync::Arc,
};

use burn::prelude::Device;
use megaburn_collective::{GroupOptions, Phase, ProcessGroups, RankFailure, run_threads};
use megaburn_models::Decoder;
use megaburn_report::metrics::{EvalMetrics, StepMetrics};
use rstest::rstest;

use crate::{
    config::{ConfigLayers, TrainConfig},
    data::RunData,
    device::Devices,
    error::TrainError,
    monitor::Monitor,
    rank_run::RankRun,
    report::{Reporter, describe_decoder},
    resumed::Resumed,
    run_folder::RunShare,
    run_trainer::{RunTrainer, StopCheck},
    signal::StopSignal,
    stop::Stops,
    stored_checkpoints::StoredCheckpoints,
    train_loop::Ended,
    trainer::{
        Trainer,
        testing::{CONFIG, poison},
    },
    trainer_core::{Record, TrainerCore},
};

const PARAM: &str = "blocks.1.mlp.down.weight";
const NO_STORE: &str = "train.checkpoint_store=";
const STEP_3: &str = "step-00000003";
const CHANGED: &str = "the memory of rank 1 failed";

/// When the memory of rank 1 fails.
#[derive(Clone, Copy)]
enum Fails {
    Never,
    /// Before the update of this step.
    Before(u64),
    /// After the update of this step, before the ranks compare their state.
    After(u64),
}

/// A trainer whose memory fails once.
struct Failing {
    trainer: Trainer,
    fails: Fails,
}

impl Failing {
    fn fail(&mut self) {
        if self.trainer.core.groups.world.rank() == 1 {
            // What the last update left stays remembered: the program did not change it.
            let remembered = mem::take(&mut self.trainer.core.unchanged);
            poison(&mut self.trainer, PARAM, 0.5);
            self.trainer.core.unchanged = remembered;
        }
    }
}

impl RunTrainer for Failing {
    type Model = Decoder;

    fn try_step(&mut self) -> Result<StepMetrics, TrainError> {
        let next = self.trainer.core.progress.step + 1;
        if matches!(self.fails, Fails::Before(step) if step == next) {
            self.fail();
        }
        let metrics = self.trainer.try_step()?;
        if matches!(self.fails, Fails::After(step) if step == next) {
            self.fail();
        }
        Ok(metrics)
    }

    fn core(&self) -> &TrainerCore<Decoder> {
        self.trainer.core()
    }

    fn core_mut(&mut self) -> &mut TrainerCore<Decoder> {
        self.trainer.core_mut()
    }

    fn record(&self) -> Record {
        self.trainer.record()
    }

    fn resume_with(&mut self, stored: &StoredCheckpoints) -> Result<Option<Resumed>, TrainError> {
        self.trainer.resume_with(stored)
    }

    fn diagnosed(&mut self, error: TrainError) -> TrainError {
        self.trainer.diagnosed(error)
    }

    fn valid_names(&self) -> Vec<Option<&str>> {
        self.trainer.valid_names()
    }

    fn tests(&self) -> bool {
        self.trainer.tests()
    }

    fn evaluate_unless(
        &self,
        stop: &mut StopCheck<'_>,
    ) -> Result<Option<Vec<EvalMetrics>>, TrainError> {
        self.trainer.evaluate_unless(stop)
    }

    fn test_unless(
        &self,
        stop: &mut StopCheck<'_>,
    ) -> Result<Option<Vec<EvalMetrics>>, TrainError> {
        self.trainer.test_unless(stop)
    }

    fn sample(&self) -> Result<Option<String>, TrainError> {
        Ok(None)
    }

    fn announce(&self, report: &mut Reporter<'_>) {
        self.trainer.announce(report);
    }

    fn comment(&self, metrics: &StepMetrics, report: &mut Reporter<'_>) {
        self.trainer.comment(metrics, report);
    }
}

/// A run of two data-parallel ranks in a folder, with some keys set.
struct FailingRun {
    dir: tempfile::TempDir,
    sets: Vec<String>,
}

impl FailingRun {
    fn new(sets: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("text.txt");
        fs::write(text, "It was the best of times. ".repeat(100)).unwrap();
        let sets = sets.iter().map(|set| set.to_string()).collect();
        Self { dir, sets }
    }

    fn checkpoints(&self) -> PathBuf {
        self.dir.path().join("run/checkpoints")
    }

    fn store(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    fn config(&self) -> TrainConfig {
        let layers = ConfigLayers::new().with_text("tests.rs", CONFIG).unwrap();
        let text = self.dir.path().join("text.txt");
        let layers = layers.with_data(&text.to_string_lossy()).unwrap();
        let own = [
            format!("run.dir={}", self.dir.path().join("run").display()),
            format!("train.checkpoint_store=file://{}", self.store().display()),
            "train.steps=9".to_string(),
            "train.eval_interval=0".to_string(),
            "train.checkpoint_interval=3".to_string(),
        ];
        let sets = own.iter().chain(&self.sets);
        let layers = sets.fold(layers.with_layout("dp2").unwrap(), |layers, set| {
            layers.with_set(set).unwrap()
        });
        layers.load().unwrap()
    }

    /// Starts the run. Returns how each rank ended.
    fn start(&self, fails: Fails) -> Vec<Result<Ended, RankFailure<TrainError>>> {
        let config = Arc::new(self.config());
        let data = Arc::new(RunData::load(&config).unwrap());
        let stops = Stops::new(&config, StopSignal::never());
        let layout = config.layout(None).unwrap();
        run_threads(2, GroupOptions::default(), |world| {
            let groups = ProcessGroups::new(&world, layout)?;
            let monitor = Monitor::start(&world, config.train.step_timeout(), stops.requests())?;
            let run = RunShare::take(&world, &config)?;
            let device = Device::flex().autodiff();
            let trainer = Trainer::new(config.clone(), groups.clone(), device, data.clone())?;
            RankRun {
                config: &config,
                devices: Devices::Cpu,
                fresh: false,
                stops: &stops,
                groups: &groups,
                run,
                trainer: Failing { trainer, fails },
                pulse: world.pulse(),
                starting: Some(world.phase(Phase::Start)),
                hangs: &monitor.hangs,
            }
            .train(Some(&*data), |failing, folder, _| {
                let devices = Devices::Cpu;
                describe_decoder(
                    &config,
                    folder.path(),
                    devices,
                    &failing.trainer,
                    &data,
                    None,
                )
            })
        })
    }

    /// The complete checkpoints in a folder, without what follows `.suspect` in their names.
    fn names(folder: &Path) -> Vec<String> {
        let Ok(entries) = fs::read_dir(folder) else {
            return Vec::new();
        };
        let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
        let entries = entries.map(Result::unwrap);
        let complete = entries.filter(|entry| entry.path().join("manifest.json").is_file());
        let names = complete.map(name);
        let names = names.filter(|name| name.starts_with("step-"));
        let mut names: Vec<String> = names
            .map(|name| match name.split_once(".suspect-") {
                Some((step, _)) => format!("{step}.suspect"),
                None => name,
            })
            .collect();
        names.sort();
        names
    }

    /// Ends the run, which may have failed before, and compares it with one that never did.
    fn expect_end_of_undisturbed(&self) {
        let sets: Vec<&str> = self.sets.iter().map(String::as_str).collect();
        let undisturbed = Self::new(&sets);
        for run in [self, &undisturbed] {
            for ended in run.start(Fails::Never) {
                assert_eq!(ended.unwrap(), Ended::Finished);
            }
        }
        let weights = |run: &Self, file: &str| {
            fs::read(run.checkpoints().join("step-00000009").join(file)).unwrap()
        };
        for file in ["rank-00000.safetensors", "rank-00001.safetensors"] {
            assert!(weights(self, file) == weights(&undisturbed, file), "{file}");
        }
        let has_store = !sets.contains(&NO_STORE);
        let stored = Self::names(&self.store());
        let last = stored.last().map(String::as_str);
        assert_eq!(last, has_store.then_some("step-00000009"));
    }
}

#[rstest]
// After the comparison of step 6, whose checkpoint is on disk, or has only begun.
#[case(Fails::Before(7), false, CHANGED, &[STEP_3, "step-00000006.suspect"], &[STEP_3])]
#[case(Fails::Before(7), true, CHANGED, &[STEP_3], &[STEP_3])]
// Between two comparisons: the next save compares first.
#[case(Fails::After(5), true, "after step 6 ranks 0 and 1", &[STEP_3], &[STEP_3])]
// The first checkpoint of the run is suspect, so the run starts anew.
#[case(Fails::Before(4), false, CHANGED, &["step-00000003.suspect"], &[])]
#[case(Fails::Before(4), true, CHANGED, &[], &[])]
#[case(Fails::After(1), false, "after step 3 ranks 0 and 1", &[], &[])]
fn a_run_continues_from_a_checkpoint_from_before_its_memory_failed(
    #[case] fails: Fails,
    #[case] is_async: bool,
    #[case] why: &str,
    #[case] local: &[&str],
    #[case] stored: &[&str],
) {
    let set = format!("train.async_save={is_async}");
    let sets = ["train.check_replicas_interval=100", &set];
    let run = FailingRun::new(&sets);
    for ended in run.start(fails) {
        let error = ended.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    assert_eq!(FailingRun::names(&run.checkpoints()), local);
    assert_eq!(FailingRun::names(&run.store()), stored);
    run.expect_end_of_undisturbed();
}

/// A start that saves more often than it keeps, before its first comparison at an interval.
#[test]
fn a_start_can_continue_however_often_it_has_saved() {
    let run = FailingRun::new(&[
        "train.check_replicas_interval=1000",
        "train.checkpoint_interval=1",
        NO_STORE,
    ]);
    run.start(Fails::After(4));
    let names = FailingRun::names(&run.checkpoints());
    assert_eq!(names, ["step-00000002", "step-00000003"]);
    run.start(Fails::Before(7));
    let names = FailingRun::names(&run.checkpoints());
    assert_eq!(names, ["step-00000005", "step-00000006.suspect"]);
    run.expect_end_of_undisturbed();
}

/// The run could have continued from another checkpoint, which was deleted: from an earlier one, or
/// from a later one that it saved after it had started again.
#[rstest]
#[case(Fails::Before(7), false, "step-00000003")]
#[case(Fails::Before(4), true, "step-00000006")]
fn a_run_that_has_lost_all_but_a_suspect_checkpoint_is_refused(
    #[case] fails: Fails,
    #[case] continues: bool,
    #[case] lost: &str,
) {
    let run = FailingRun::new(&[
        "train.check_replicas_interval=100",
        "train.keep_checkpoints=9",
    ]);
    run.start(fails);
    if continues {
        run.start(Fails::Never);
    }
    assert!(
        FailingRun::names(&run.checkpoints())
            .iter()
            .any(|name| name == lost)
    );
    fs::remove_dir_all(run.store()).unwrap();
    for name in FailingRun::names(&run.checkpoints()) {
        if !name.ends_with(".suspect") {
            fs::remove_dir_all(run.checkpoints().join(name)).unwrap();
        }
    }
    for ended in run.start(Fails::Never) {
        let error = ended.unwrap_err().to_string();
        assert!(
            error.contains("is left of the run, and it may hold wrong values"),
            "{error}"
        );
    }
}
