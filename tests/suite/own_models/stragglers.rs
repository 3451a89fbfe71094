//! Ranks that are slower than the others are named.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use burn::{
    module::Module,
    prelude::Device,
    tensor::{Tensor, TensorData},
};
use megaburn::{
    collective::host_name,
    parallel::{ReplicatedLinear, ReplicatedLinearConfig},
    prelude::*,
    task::*,
    train::{signal::StopSignal, train_task},
};
use rstest::rstest;
use serde::{Deserialize, Serialize};
use serde_json::Value;

const HIDDEN: usize = 4;
/// The time of a rank that is not slow, in microseconds.
const DATA: u64 = 10_000;
const FORWARD: u64 = 20_000;
/// The rank that is slow, and the time that it needs in addition: half of its work, so that other
/// programs do not hide it. Unit tests of the rule have smaller differences.
const SLOW: usize = 1;
const MORE: u64 = 15_000;

/// The section `[slow]`.
#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct Config {
    slow: SlowConfig,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct SlowConfig {
    part: String,
}

/// A model whose forward pass takes this time, until the test has seen what it waits for.
#[derive(Module, Sharded, Debug)]
struct Sleeper {
    linear: ReplicatedLinear,
    #[module(skip)]
    micros: u64,
    #[module(skip)]
    seen: Arc<AtomicBool>,
}

impl TrainModel for Sleeper {
    type Batch = Tensor<3>;

    fn loss(&self, points: Tensor<3>) -> LossSum {
        sleep(self.micros, &self.seen);
        let error = self.linear.forward(points.clone()) - points.sin();
        LossSum::new(error.square().sum(), 1)
    }
}

fn sleep(micros: u64, seen: &AtomicBool) {
    if !seen.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_micros(micros));
    }
}

/// A task whose ranks sleep until a straggler is named in the metrics.
struct Sleep {
    metrics: PathBuf,
    seen: Arc<AtomicBool>,
}

/// The stragglers that the metrics name.
fn stragglers(metrics: &Path) -> Vec<Value> {
    let text = fs::read_to_string(metrics).unwrap_or_default();
    let lines = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines
        .filter(|line| line.get("straggler").is_some())
        .collect()
}

impl TrainTask for Sleep {
    type Config = Config;
    type Model = Sleeper;

    fn name(&self) -> String {
        "sleep".into()
    }

    fn model(&self, config: &Config, at: &ModelPlace<'_>) -> Result<Sleeper, TaskError> {
        let is_slow = at.groups.world.rank() == SLOW && config.slow.part == "forward";
        let linear = ReplicatedLinearConfig::new(HIDDEN, HIDDEN).with_name("linear");
        Ok(Sleeper {
            linear: linear.init(at.tp(), at.device)?,
            micros: FORWARD + if is_slow { MORE } else { 0 },
            seen: self.seen.clone(),
        })
    }

    fn data(&self, config: &Config) -> Result<TaskData<Tensor<3>>, TaskError> {
        let has_slow = config.slow.part == "data";
        let (metrics, seen) = (self.metrics.clone(), self.seen.clone());
        let points = move |samples: &MicroBatch, device: &Device| {
            // Each rank reads one sample of a step.
            let is_slow = samples
                .block
                .is_some_and(|block| block.first_sample == SLOW);
            let more = if has_slow && is_slow { MORE } else { 0 };
            if samples
                .block
                .is_some_and(|block| block.step > 40 && block.step.is_multiple_of(10))
            {
                seen.fetch_or(!stragglers(&metrics).is_empty(), Ordering::Relaxed);
            }
            sleep(DATA + more, &seen);
            let values = vec![samples[0] as f32 * 0.1; HIDDEN];
            Tensor::from_data(TensorData::new(values, [1, 1, HIDDEN]), device)
        };
        Ok(TaskData::new(BatchFn::new(16, points)))
    }
}

/// Other programs disturb a test, so the rank may be named later than after 50 steps.
#[rstest]
#[case("data", 400)]
#[case("forward", 400)]
#[case("none", 61)]
fn a_slower_rank_is_named_with_the_section(#[case] part: &str, #[case] steps: u64) {
    let dir = tempfile::tempdir().unwrap();
    let task = Sleep {
        metrics: dir.path().join("metrics.jsonl"),
        seen: Arc::default(),
    };
    let text = "run.device = \"cpu\"\nparallel.dp = 3\n[train]\nglobal_batch = 3\nmicro_batch = 1\n\
        eval_interval = 0\ncheckpoint_interval = 0\nstraggler_interval = 10\n";
    let layers = TaskLayers::new().with_text("sleep.toml", text).unwrap();
    let layers = [
        format!("run.dir={}", dir.path().display()),
        format!("slow.part={part}"),
        format!("train.steps={steps}"),
    ]
    .iter()
    .fold(layers, |layers, set| layers.with_set(set).unwrap());
    let config = layers.load("sleep").unwrap();
    train_task(&task, config, false, StopSignal::never()).unwrap();

    let named = stragglers(&task.metrics);
    assert_eq!(named.len(), usize::from(part != "none"), "{named:?}");
    for line in named {
        assert_eq!(
            (&line["rank"], &line["section"]),
            (&SLOW.into(), &part.into()),
            "{line}"
        );
        assert_eq!(line["host"], host_name().as_str());
        assert!(line["straggler"].as_u64().unwrap() >= 40 && line.get("gpu").is_none());
        assert!(
            (0.05..0.9).contains(&line["slower"].as_f64().unwrap()),
            "{line}"
        );
    }
}
