//! A rank that hangs, or calls another collective than the others, is found in what all ranks report.

use std::{
    fs,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use burn::{
    module::Module,
    prelude::Device,
    tensor::{Tensor, TensorData},
};
use megaburn::{
    collective::ReduceOp,
    parallel::{ReplicatedLinear, ReplicatedLinearConfig},
    prelude::*,
    task::*,
    train::{
        hang::{HangAnalysis, HangLine, What, read_hang},
        signal::StopSignal,
        train_task,
    },
};
use serde::{Deserialize, Serialize};

const HIDDEN: usize = 4;
/// The rank that hangs or differs, and the step in which it does.
const FAULTY: usize = 1;
const STEP: u64 = 2;
/// The longest that a rank hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// The section `[fault]`.
#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct Config {
    fault: FaultConfig,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct FaultConfig {
    kind: String,
}

/// A model that reduces its batch over all ranks; one rank may call another collective.
#[derive(Module, Sharded, Debug)]
struct Meeting {
    linear: ReplicatedLinear,
    #[module(skip)]
    world: Group,
    #[module(skip)]
    kind: String,
}

impl TrainModel for Meeting {
    type Batch = (Tensor<3>, bool);

    fn loss(&self, (points, is_faulty): (Tensor<3>, bool)) -> LossSum {
        let one = || TensorData::from([1.0_f32]);
        // A failure is noticed in the next collective.
        let _ = match is_faulty && self.kind == "collective" {
            true => self.world.all_gather(one()),
            false => self.world.all_reduce(one(), ReduceOp::Sum),
        };
        let error = self.linear.forward(points.clone()) - points.sin();
        LossSum::new(error.square().sum(), 1)
    }
}

/// A task in which a rank hangs until all ranks have reported.
struct Faults {
    reports: PathBuf,
}

impl TrainTask for Faults {
    type Config = Config;
    type Model = Meeting;

    fn name(&self) -> String {
        "faults".into()
    }

    fn model(&self, config: &Config, at: &ModelPlace<'_>) -> Result<Meeting, TaskError> {
        let linear = ReplicatedLinearConfig::new(HIDDEN, HIDDEN).with_name("linear");
        Ok(Meeting {
            linear: linear.init(at.tp(), at.device)?,
            world: at.groups.world.clone(),
            kind: config.fault.kind.clone(),
        })
    }

    fn data(&self, config: &Config) -> Result<TaskData<(Tensor<3>, bool)>, TaskError> {
        let hangs = config.fault.kind == "data";
        let reports = self.reports.clone();
        let points = move |samples: &MicroBatch, device: &Device| {
            // Each rank reads one sample of a step.
            let is_faulty = samples
                .block
                .is_some_and(|block| block.step == STEP && block.first_sample == FAULTY);
            let begin = Instant::now();
            let lines = || {
                fs::read_to_string(&reports)
                    .unwrap_or_default()
                    .lines()
                    .count()
            };
            while hangs && is_faulty && lines() < 3 && begin.elapsed() < PATIENCE {
                thread::sleep(Duration::from_millis(5));
            }
            let values = vec![samples[0] as f32 * 0.1; HIDDEN];
            let values = TensorData::new(values, [1, 1, HIDDEN]);
            (Tensor::from_data(values, device), is_faulty)
        };
        Ok(TaskData::new(BatchFn::new(16, points)))
    }
}

/// The error of a run of three ranks, and what they report.
fn hang(kind: &str) -> (String, Vec<HangLine>) {
    let dir = tempfile::tempdir().unwrap();
    let reports = dir.path().join("hangs.jsonl");
    let text = "run.device = \"cpu\"\nparallel.dp = 3\n[train]\nsteps = 9\nglobal_batch = 3\n\
        micro_batch = 1\neval_interval = 0\ncheckpoint_interval = 0\ntimeout_seconds = 0.5\n\
        data_timeout_seconds = 0.7\n";
    let layers = TaskLayers::new().with_text("faults.toml", text).unwrap();
    let sets = [
        format!("run.dir={}", dir.path().display()),
        format!("fault.kind={kind}"),
    ];
    let layers = sets
        .iter()
        .fold(layers, |layers, set| layers.with_set(set).unwrap());
    let config = layers.load("faults").unwrap();
    let task = Faults { reports };
    let error = train_task(&task, config, false, StopSignal::never()).unwrap_err();
    (
        error.to_string(),
        read_hang(&[dir.path().to_path_buf()]).unwrap(),
    )
}

#[test]
fn a_rank_that_hangs_in_its_data_is_named_with_its_place() {
    let (error, lines) = hang("data");
    for part in ["rank 1 is in `data`", "train.data_timeout_seconds"] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(lines.len(), 3);
    let report = &lines[FAULTY].report;
    assert_eq!(report.sections, ["step", "data"]);
    assert!(
        report.phases == ["data"] && report.section_seconds > 0.4,
        "{report:?}"
    );
    assert!(
        lines[0]
            .threads
            .iter()
            .any(|thread| thread.name == "rank-1")
    );
    let analysis = HangAnalysis::of(lines);
    assert_eq!(
        (&analysis.look_at[..], analysis.silent.len()),
        (&[FAULTY][..], 0)
    );
    let What::NotEntered {
        absent, waiting, ..
    } = &analysis.findings[0].what
    else {
        panic!("{analysis:?}")
    };
    assert_eq!((&absent[..], &waiting[..]), (&[FAULTY][..], &[0, 2][..]));
    let text = analysis.to_string();
    let named = "look at  rank 1, which waits for no other: process ";
    assert!(
        text.contains(named) && text.contains("in `step/data` for "),
        "{text}"
    );
}

#[test]
fn a_rank_that_calls_another_collective_is_named_with_both_calls() {
    let (error, lines) = hang("collective");
    assert!(error.contains("ranks disagree: "), "{error}");
    let analysis = HangAnalysis::of(lines);
    let What::Differ(calls) = &analysis.findings[0].what else {
        panic!("{analysis:?}")
    };
    let [(_, most), (other, who)] = &calls[..] else {
        panic!("{calls:?}")
    };
    assert_eq!((&most[..], &who[..]), (&[0, 2][..], &[FAULTY][..]));
    assert_eq!(other.op.to_string(), "all_gather");
    let text = analysis.to_string();
    let found = "first    in world, ranks made different calls: ranks 0, 2 all_reduce(sum) #";
    assert!(
        text.contains(found) && text.contains("rank 1 all_gather #"),
        "{text}"
    );
}
