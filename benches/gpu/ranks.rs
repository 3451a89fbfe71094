//! Runs of some steps on the GPUs of a launcher's ranks.

use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use burn::prelude::Device;
use megaburn::{
    collective::{ConnectOptions, Group, ProcessGroups, RankEnv, ReduceOp, connect},
    cuda,
    launch::tie_to_launcher,
    mesh::{PositionRng, Purpose},
    train::{ConfigLayers, RunData, TrainConfig, Trainer},
};

use crate::Failure;

/// Llama-3-8B but for its depth.
const CONFIG: &str = r#"
[model]
hidden = 4096
ffn = 14336
heads = 32
kv_heads = 8
vocab = 128256
rope_theta = 500000.0
tied = false
[train]
micro_batch = 1
dtype = "bf16"
[optimizer]
lr = 1e-5
min_lr = 1e-5
warmup_steps = 0
"#;

/// One rank, its GPU, and a text to train on.
pub(super) struct GpuRank {
    pub(super) world: Group,
    device: Device,
    file: PathBuf,
    _folder: tempfile::TempDir,
}

/// What was seen of a run of some steps: of the slowest rank, and of the one with most memory in use.
pub(super) struct Found {
    pub(super) seconds: f64,
    pub(super) tflops: f64,
    /// Of a rank, as far as the loss is about them.
    pub(super) tokens_per_second: f64,
    /// Reserved, in bytes.
    pub(super) memory: u64,
    /// The most that tensors took of it, if that was asked for.
    pub(super) tensors: Option<u64>,
    /// Of this rank.
    pub(super) params: usize,
    pub(super) loss: f64,
    /// This rank's time of each step that was timed, in seconds.
    pub(super) each: Vec<f64>,
}

/// How many steps a run makes.
#[derive(Clone, Copy)]
pub(super) struct Steps {
    /// Nobody measures these: kernels are compiled and products chosen.
    pub(super) warmup: usize,
    pub(super) timed: usize,
}

impl Steps {
    pub(super) fn of(timed: usize) -> Self {
        Self { warmup: 4, timed }
    }

    pub(super) fn num(self) -> usize {
        self.warmup + self.timed
    }
}

impl GpuRank {
    /// As torchrun's environment names say, with so many tokens of text a rank: sentences, or documents with a
    /// long tail of up to so many tokens.
    ///
    /// # Errors
    /// There are no such names, or no such GPU.
    /// # Collective
    /// All ranks.
    pub(super) fn start(
        name: &str,
        tokens: usize,
        longest: Option<usize>,
    ) -> Result<Self, Failure> {
        tie_to_launcher()?;
        let gpus = cuda::start()?;
        let env = RankEnv::from_env()?;
        let env = env.ok_or_else(|| {
            format!("start it with `megaburn launch --nproc N -- {name}`, or torchrun")
        })?;
        let device = Device::cuda(
            env.gpu(gpus)
                .ok_or("more ranks than GPUs on this host (CUDA_VISIBLE_DEVICES)")?,
        );
        let world = connect(&ConnectOptions::new(env))?;
        let folder = tempfile::tempdir()?;
        let tokens = tokens * world.size();
        let (name, text) = match longest {
            None => (
                "text.txt",
                "The quick brown fox jumps over the lazy dog. ".repeat(tokens / 40),
            ),
            Some(longest) => ("text.jsonl", long_tail(tokens, longest)),
        };
        let file = folder.path().join(name);
        fs::write(&file, text)?;
        Ok(Self {
            world,
            device,
            file,
            _folder: folder,
        })
    }

    /// Of so many layers and tokens under a layout, with `KEY=VALUE` settings.
    ///
    /// # Errors
    /// There is no such configuration.
    pub(super) fn config(
        &self,
        layout: &str,
        layers: usize,
        seq_len: usize,
        settings: &[&str],
    ) -> Result<TrainConfig, Failure> {
        let sizes = [
            format!("model.layers={layers}"),
            format!("data.seq_len={seq_len}"),
        ];
        let mut config = ConfigLayers::new().with_text("ranks.rs", CONFIG)?;
        for setting in sizes
            .iter()
            .map(String::as_str)
            .chain(settings.iter().copied())
        {
            config = config.with_set(setting)?;
        }
        Ok(config
            .with_data(&self.file.to_string_lossy())?
            .with_layout(layout)?
            .load()?)
    }

    /// Makes some steps, and a few before that nobody measures.
    ///
    /// # Errors
    /// A step fails.
    /// # Collective
    /// All ranks of the world, each in a `group` of the layout's size.
    pub(super) fn steps(
        &self,
        config: TrainConfig,
        group: &Group,
        steps: Steps,
        watch: bool,
    ) -> Result<Found, Failure> {
        let layout = config.layout(None)?;
        let data = Arc::new(RunData::load(&config)?);
        let groups = ProcessGroups::new(group, layout)?;
        let device = self.device.clone().autodiff();
        let mut trainer = Trainer::new(Arc::new(config), groups, device.clone(), data)?;
        let mut times = Vec::new();
        let mut rates = [const { Vec::new() }; 2];
        let mut last = None;
        let all = || -> Result<(), Failure> {
            for step in 0..steps.warmup + steps.timed {
                let started = Instant::now();
                let done = trainer.step()?;
                if step >= steps.warmup {
                    let seconds = started.elapsed().as_secs_f64();
                    let tokens = done.tokens as f64;
                    times.push(seconds);
                    // Steps of documents differ in both.
                    rates[0].push(done.tflops * (tokens / done.tokens_per_second) / seconds);
                    rates[1].push(tokens / group.size() as f64 / seconds);
                }
                last = Some(done);
            }
            Ok(())
        };
        let tensors = most_allocated(watch.then(|| device.clone().inner()), all)?;
        let params = trainer.plan().num_global();
        // The next run's memory is its own.
        drop(trainer);
        device.inner().memory_cleanup();
        let median = |mut all: Vec<f64>| {
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        let last = last.ok_or("no step was made")?;
        let [tflops, tokens_per_second] = rates.map(median);
        let memory = [last.memory_bytes as f64, tensors as f64];
        let mine = [
            median(times.clone()),
            memory[0],
            memory[1],
            -tflops,
            -tokens_per_second,
        ];
        let slowest = self.world.all_reduce(mine.into(), ReduceOp::Max)?;
        let slowest = slowest
            .as_slice::<f64>()
            .map_err(|error| format!("{error:?}"))?;
        let [reserved, tensors] = [slowest[1], slowest[2]].map(|bytes| bytes as u64);
        let tensors = watch.then_some(tensors);
        Ok(Found {
            seconds: slowest[0],
            tflops: -slowest[3],
            tokens_per_second: -slowest[4],
            memory: reserved,
            tensors,
            params,
            loss: last.loss,
            each: times,
        })
    }
}

/// Documents of random letters whose lengths are log-normal: half have less than 1000, and 8% of them, longer than
/// 8000, about half of all letters. (Where `longest` cuts off nothing.)
fn long_tail(tokens: usize, longest: usize) -> String {
    let rng = PositionRng::new(1, Purpose::Sampling, "documents");
    let mut text = String::new();
    let mut index = 0;
    while text.len() < tokens {
        let mut normal = [0.0];
        rng.fill_normal(index, &mut normal);
        let len = (1000.0 * (1.5 * normal[0]).exp()) as usize;
        let letters = rng.with_stream(index);
        let letter = |at| char::from(b'a' + letters.below(at, 26) as u8);
        let letters: String = (0..len.clamp(1, longest) as u64).map(letter).collect();
        text += &format!("{{\"text\": \"{letters}\"}}\n");
        index += 1;
    }
    text
}

/// The most bytes that tensors on a device were seen to take while `work` ran, if one is given.
fn most_allocated(
    device: Option<Device>,
    work: impl FnOnce() -> Result<(), Failure>,
) -> Result<u64, Failure> {
    /// Ends the watch, also where the work panics.
    struct Done<'a>(&'a AtomicBool);
    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watch = || {
            let mut most = 0;
            while !is_done.load(Ordering::Relaxed) {
                most = most.max(
                    device
                        .as_ref()
                        .and_then(cuda::memory::allocated)
                        .unwrap_or(0),
                );
                thread::sleep(Duration::from_micros(200));
            }
            most
        };
        let watch = device.is_some().then(|| scope.spawn(watch));
        let done = {
            let _done = Done(&is_done);
            work()
        };
        let most = watch.map_or(Ok(0), thread::ScopedJoinHandle::join);
        done?;
        most.map_err(|_| "the watch of memory panicked".into())
    })
}

/// Bytes as GiB.
pub(super) fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
