//! Runs a few training steps on the GPUs of a launcher's ranks.

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

/// Llama-3-8B except for its depth.
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

/// The measurements of a run: times and rates of the slowest rank, memory of the fullest.
pub(super) struct Found {
    pub(super) seconds: f64,
    pub(super) tflops: f64,
    /// Tokens per second per rank, counting only tokens in the loss.
    pub(super) tokens_per_second: f64,
    /// Bytes reserved on the GPU.
    pub(super) memory: u64,
    /// The most bytes that tensors occupied, if this was watched.
    pub(super) tensors: Option<u64>,
    /// Parameters of this rank's shard plan, counted unsharded.
    pub(super) params: usize,
    pub(super) loss: f64,
    /// This rank's time of each timed step, in seconds.
    pub(super) each: Vec<f64>,
}

/// The number of steps of a run.
#[derive(Clone, Copy)]
pub(super) struct Steps {
    /// Steps that are not timed, in which kernels are compiled and GEMMs tuned.
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
    /// Starts the rank that torchrun's environment variables name, with `tokens` tokens of text per
    /// rank: sentences or, given `longest`, documents with a long tail of lengths up to it.
    ///
    /// # Errors
    /// The variables or the GPU are missing.
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

    /// The configuration of a model with these layers and this sequence length under a layout, with
    /// `KEY=VALUE` settings.
    ///
    /// # Errors
    /// The configuration is invalid.
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

    /// Runs the warm-up steps and the timed steps. `watch` polls the memory of tensors.
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
                    // Steps over documents differ in FLOPs and tokens, so each has its own rates.
                    // The trainer's TFLOP/s are rescaled from its step time to the one measured
                    // here.
                    rates[0].push(done.tflops * (tokens / done.tokens_per_second) / seconds);
                    rates[1].push(tokens / group.size() as f64 / seconds);
                }
                last = Some(done);
            }
            Ok(())
        };
        let tensors = most_allocated(watch.then(|| device.clone().inner()), all)?;
        let params = trainer.plan().num_global();
        // Release this run's memory, so that it does not count in the next run.
        drop(trainer);
        device.inner().memory_cleanup();
        let median = |mut all: Vec<f64>| {
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        let last = last.ok_or("no step was made")?;
        let [tflops, tokens_per_second] = rates.map(median);
        let memory = [last.memory_bytes as f64, tensors as f64];
        // Rates are negated, so that the maximum over ranks is the lowest rate.
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

/// Documents of random letters with log-normal lengths: half are shorter than 1000 letters, and the
/// 8% that are longer than 8000 hold about half of all letters (unless `longest` cuts them off).
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

/// The most bytes that tensors on `device` occupied while `work` ran; 0 without a device.
fn most_allocated(
    device: Option<Device>,
    work: impl FnOnce() -> Result<(), Failure>,
) -> Result<u64, Failure> {
    /// Ends the watch when dropped, so also if the work panics.
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
        most.map_err(|_| "the memory watcher panicked".into())
    })
}

/// Bytes as GiB.
pub(super) fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
