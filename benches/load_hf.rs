//! Times the loading of a sharded Hugging Face checkpoint under tensor parallelism, with one
//! process per rank, and measures anonymous memory.

use std::{
    fs,
    io::{Read, Write},
    ops::Range,
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use burn::{
    prelude::Device,
    tensor::{DType, TensorData, bf16},
};
use clap::Parser;
use megaburn::{
    checkpoint::{
        CheckpointError, HfWriteOptions, HfWritten, TensorHeader, TensorSource, write_hf,
    },
    collective::{ConnectOptions, GroupOptions, ProcessGroups, RankEnv, connect, free_port},
    mesh::{Layout, PositionRng, Purpose},
    models::{
        DecoderConfig, Family,
        convert::{export, import},
        decoder::ModelOptions,
        source::ModelSource,
    },
    parallel::shard_plan,
};
use megaburn_benches::{
    Failure,
    report::{Args, Report, Table},
};

const RANKS: usize = 4;
/// The environment variable that gives a child process the model's folder.
const MODEL: &str = "MEGABURN_BENCH_MODEL";
/// The variable for the folder to convert the model into; unset if a child only loads its shard.
const OUT: &str = "MEGABURN_BENCH_OUT";

fn main() -> ExitCode {
    let result = match std::env::var(MODEL) {
        Ok(model) => child(Path::new(&model)),
        Err(_) => run(&Args::parse()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A model of TinyLlama's sizes (1.1 billion parameters), or one of 44 million if `quick`.
fn model(quick: bool) -> DecoderConfig {
    let (hidden, ffn, layers) = if quick {
        (512, 1408, 4)
    } else {
        (2048, 5632, 22)
    };
    DecoderConfig {
        vocab: 32000,
        hidden,
        ffn,
        layers,
        heads: 32,
        kv_heads: 4,
        head_dim: hidden / 32,
        max_seq_len: 2048,
        ..Family::LLAMA.template()
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    let about = "A random Llama of TinyLlama's sizes in bf16, in files of at most 500 MB with an \
                index, is loaded by four processes under tp4 into f32 parameters, with the file \
                cache warm from writing. Anonymous memory is RssAnon of /proc/self/status, \
                sampled every millisecond from the start of the process; the limit is the rank's \
                shard in f32, the largest tensor as it is stored, and 200 MB. The peer is a copy \
                of the same files by one process (std::fs::copy, not synced). Loading reads each \
                byte of a sharded tensor once over all ranks; every rank also copies into memory \
                that has not been touched before.";
    let mut report = Report::new("load_hf", about);
    let folder = tempfile::tempdir_in(std::env::current_dir()?)?;
    let hf = folder.path().join("hf");
    let config = model(args.quick);
    let written = make(&config, &hf)?;
    let largest = largest_tensor(&hf)?;

    let copies = folder.path().join("copy");
    fs::create_dir(&copies)?;
    let begin = Instant::now();
    for file in &written.files {
        fs::copy(hf.join(file), copies.join(file))?;
    }
    let copied = begin.elapsed();
    fs::remove_dir_all(&copies)?;

    let begin = Instant::now();
    let ranks = load(&hf)?;
    let whole = begin.elapsed();
    let slowest = ranks.iter().map(|rank| rank.seconds).fold(0.0, f64::max);
    let gb = |bytes: f64| format!("{:.3}", bytes / 1e9);
    let mut table = Table::new(
        "memory of each rank, GB".to_string(),
        &["rank", "shard", "peak anonymous", "allowed", "seconds"],
    );
    for (index, rank) in ranks.iter().enumerate() {
        table.row(vec![
            index.to_string(),
            gb(rank.shard),
            gb(rank.peak),
            gb(rank.shard + largest + 200e6),
            format!("{:.2}", rank.seconds),
        ]);
    }
    report.table(&table);
    let mut table = Table::new(
        "time".to_string(),
        &["what", "seconds", "GB/s of the files", "of the copy's"],
    );
    let bytes = written.num_bytes as f64;
    for (what, seconds) in [
        ("copy of the files", copied.as_secs_f64()),
        ("loading, slowest rank", slowest),
        (
            "loading, with the start of the processes",
            whole.as_secs_f64(),
        ),
    ] {
        table.row(vec![
            what.into(),
            format!("{seconds:.2}"),
            format!("{:.2}", bytes / seconds / 1e9),
            format!("{:.2}", seconds / copied.as_secs_f64()),
        ]);
    }
    report.table(&table);

    let imported = folder.path().join("imported");
    let exported = folder.path().join("exported");
    let mut table = Table::new(
        "converting, one process".to_string(),
        &["what", "peak anonymous, GB", "seconds", "of the copy's"],
    );
    for (what, from, to) in [("import", &hf, &imported), ("export", &imported, &exported)] {
        let found = spawn(
            Command::new(std::env::current_exe()?)
                .env(MODEL, from)
                .env(OUT, to),
        )?;
        let Loaded { peak, seconds, .. } = finish(found)?;
        let ratio = format!("{:.2}", seconds / copied.as_secs_f64());
        table.row(vec![what.into(), gb(peak), format!("{seconds:.2}"), ratio]);
    }
    report.table(&table);
    report.finish(args)
}

/// A source of random tensors under the model's Hugging Face names.
struct Random {
    headers: Vec<TensorHeader>,
}

impl TensorSource for Random {
    fn label(&self) -> String {
        "random".into()
    }

    fn headers(&self) -> Vec<TensorHeader> {
        self.headers.clone()
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<TensorData, CheckpointError> {
        let header = self.headers.iter().find(|header| header.name == name);
        let mut shape = header.expect("the value is given").shape.clone();
        let row: usize = shape[1..].iter().product();
        shape[0] = rows.len();
        let mut values = vec![0.0; rows.len() * row];
        let rng = PositionRng::new(0, Purpose::Init, name);
        rng.fill_uniform((rows.start * row) as u64, &mut values);
        let values: Vec<bf16> = values
            .into_iter()
            .map(|x| bf16::from_f32(x - 0.5))
            .collect();
        Ok(TensorData::new(values, shape))
    }
}

fn make(config: &DecoderConfig, to: &Path) -> Result<HfWritten, Failure> {
    let mut headers = Vec::new();
    for param in config.hf_params()? {
        for part in &param.parts {
            let mut shape = param.shape.clone();
            *shape
                .last_mut()
                .expect("a parameter has at least one dimension") = part.columns.len();
            if param.transposed {
                shape.reverse();
            }
            headers.push(TensorHeader {
                name: part.name.clone(),
                dtype: DType::BF16,
                shape,
            });
        }
    }
    headers.sort_by(|a, b| a.name.cmp(&b.name));
    let mut json = config.to_hf();
    json["dtype"] = "bfloat16".into();
    let options = HfWriteOptions {
        max_shard_bytes: 500_000_000,
        ..Default::default()
    };
    let extra = [("config.json".to_string(), json.to_string().into_bytes())];
    Ok(write_hf(to, &Random { headers }, &options, &extra)?)
}

fn largest_tensor(hf: &Path) -> Result<f64, Failure> {
    let source = ModelSource::open(hf)?;
    let dir = source.hf_dir().expect("the file was just written");
    let bytes = |header: TensorHeader| header.num_rows() * header.row_len() * header.dtype.size();
    Ok(dir.tensors().map(bytes).max().unwrap_or(0) as f64)
}

/// The measurements of a rank: bytes of its shard, peak bytes of anonymous memory, and seconds.
struct Loaded {
    shard: f64,
    peak: f64,
    seconds: f64,
}

fn load(hf: &Path) -> Result<Vec<Loaded>, Failure> {
    let port = free_port()?.to_string();
    let mut children = Vec::new();
    for rank in 0..RANKS {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .env(MODEL, hf)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string());
        command
            .env("WORLD_SIZE", RANKS.to_string())
            .env("LOCAL_WORLD_SIZE", RANKS.to_string());
        command
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port);
        children.push(spawn(&mut command)?);
    }
    children.into_iter().map(finish).collect()
}

fn spawn(command: &mut Command) -> Result<Child, Failure> {
    Ok(command.stdout(Stdio::piped()).spawn()?)
}

fn finish(mut child: Child) -> Result<Loaded, Failure> {
    let mut text = String::new();
    child
        .stdout
        .take()
        .expect("the output is piped")
        .read_to_string(&mut text)?;
    if !child.wait()?.success() {
        return Err("a child process failed".into());
    }
    let numbers: Result<Vec<f64>, _> = text.split_whitespace().map(str::parse).collect();
    let [shard, peak, seconds] = numbers?[..] else {
        return Err("a child printed too little".into());
    };
    Ok(Loaded {
        shard,
        peak,
        seconds,
    })
}

/// Runs a child process: loads its shard, or converts the model. Prints the size of the shard, the
/// peak of anonymous memory and the time.
fn child(model: &Path) -> Result<(), Failure> {
    let peak = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    let (shard, seconds) = thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                peak.fetch_max(anonymous_bytes(), Ordering::Relaxed);
                thread::sleep(Duration::from_millis(1));
            }
        });
        let loaded = match std::env::var_os(OUT) {
            Some(out) => convert(model, Path::new(&out)),
            None => load_shard(model),
        };
        done.store(true, Ordering::Relaxed);
        loaded
    })?;
    let peak = peak.load(Ordering::Relaxed);
    writeln!(std::io::stdout(), "{shard} {peak} {seconds}")?;
    Ok(())
}

fn convert(from: &Path, to: &Path) -> Result<(usize, f64), Failure> {
    let begin = Instant::now();
    if from.join("config.json").is_file() {
        import(from, to, None, false)?;
    } else {
        export(from, to, &HfWriteOptions::default())?;
    }
    Ok((0, begin.elapsed().as_secs_f64()))
}

fn load_shard(hf: &Path) -> Result<(usize, f64), Failure> {
    let env = RankEnv::from_env()?.ok_or("no rank is set")?;
    let world = connect(&ConnectOptions::new(env).with_group(GroupOptions::default()))?;
    let groups = ProcessGroups::new(
        &world,
        Layout {
            tp: RANKS,
            ..Layout::SINGLE
        },
    )?;
    let begin = Instant::now();
    let source = ModelSource::open(hf)?;
    let model = source
        .config()
        .init(&groups.tp, &ModelOptions::default(), &Device::flex())?;
    let plan = shard_plan(&model)?;
    let model = source.load(model, &plan)?;
    let seconds = begin.elapsed().as_secs_f64();
    let elements = |shape: Vec<usize>| shape.iter().product::<usize>();
    let shard = plan
        .iter()
        .map(|(_, spec)| 4 * elements(spec.shard.local_shape()))
        .sum();
    world.barrier()?;
    drop(model);
    Ok((shard, seconds))
}

/// Resident bytes of this process that are not backed by a file (`RssAnon`).
fn anonymous_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| {
        line.trim()
            .trim_end_matches("kB")
            .trim()
            .parse::<u64>()
            .ok()
    });
    kib.unwrap_or(0) * 1024
}
