//! Packs a data set whose documents have log-normal lengths, and prints what packing makes of them
//! and how long it takes, as rows of `benches/results/packing.md`:
//!
//! ```sh
//! cargo run --release -p megaburn-data --example packing -- 1000000 10000000
//! ```
//!
//! The tokens are a file without contents, so a data set takes 20 bytes of disk for each document.

use std::error::Error;
use std::f64::consts::TAU;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use megaburn_data::{DataError, IndexedDataset, PackedSamplerConfig, Samples, TokenDataset};

/// Median of the lengths of documents, and standard deviation of their logarithms.
const MEDIAN: f64 = 400.0;
const DEVIATIONS: [f64; 2] = [1.0, 1.5];
const SEQ_LENS: [usize; 2] = [2048, 8192];
const MULTIPLES: [usize; 2] = [1, 16];
/// Samples that are read to time one.
const NUM_READ: u64 = 2000;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [prefix, seq_len, multiple] = args.as_slice()
        && Path::new(prefix).with_extension("idx").exists()
    {
        return measure(Path::new(prefix), seq_len.parse()?, multiple.parse()?);
    }
    let dir = tempfile::tempdir()?;
    println!(
        "| documents | deviation | sequence | multiple | samples | padding | cut | concatenation cuts \
         | packing | CPU time | opening | peak memory | files | a sample |"
    );
    println!("|{}", "---:|".repeat(14));
    for num_documents in args {
        for deviation in DEVIATIONS {
            let prefix = dir.path().join("set");
            write(&prefix, num_documents.parse()?, deviation)?;
            for seq_len in SEQ_LENS {
                for multiple in MULTIPLES {
                    print!("| {num_documents} | {deviation} | {seq_len} | {multiple} ");
                    io::stdout().flush()?;
                    // A process of its own has no memory of earlier rows.
                    let mut row = Command::new(std::env::current_exe()?);
                    let row = row
                        .arg(&prefix)
                        .args([seq_len, multiple].map(|n| n.to_string()));
                    if !row.status()?.success() {
                        return Err("a row failed".into());
                    }
                }
            }
        }
    }
    Ok(())
}

/// Packs with a cache, opens the cache, and reads samples.
fn measure(prefix: &Path, seq_len: usize, multiple: usize) -> Result<(), Box<dyn Error>> {
    let cache = prefix.with_extension("cache");
    let open = || {
        let set = IndexedDataset::open(prefix)?;
        Ok::<_, DataError>(TokenDataset::indexed(Arc::new(set), 1 << 16))
    };
    let set = open()?;
    let config = PackedSamplerConfig::new(seq_len).with_multiple(multiple);
    let config = config.with_cache(&cache).with_shuffle(42, 0);
    let before = memory("VmRSS")?;
    let (begun, cpu_begun) = (Instant::now(), cpu_time()?);
    config.init(&set, |_| ())?;
    let (packing, cpu) = (begun.elapsed(), cpu_time()? - cpu_begun);
    let peak = memory("VmHWM")?.saturating_sub(before);
    let begun = Instant::now();
    let samples = config.init(&open()?, |event| println!("{event:?}"))?;
    let opening = begun.elapsed();
    let begun = Instant::now();
    for index in 0..NUM_READ {
        samples.sample(index)?;
    }
    let reading = begun.elapsed() / NUM_READ as u32;
    let mut num_bytes = 0;
    for entry in fs::read_dir(&cache)? {
        num_bytes += entry?.metadata()?.len();
    }
    let stats = samples.stats();
    let percent = |fraction: f64| format!("{:.2}%", 100.0 * fraction);
    println!(
        "| {} | {} | {} | {} | {:.2} s | {:.2} s | {:.0} ms | {} MB | {} MB | {} µs |",
        stats.num_samples,
        percent(stats.padding()),
        percent(stats.cut()),
        percent(stats.cut_by_concatenation()),
        packing.as_secs_f64(),
        cpu,
        opening.as_secs_f64() * 1e3,
        peak >> 10,
        num_bytes >> 20,
        reading.as_micros(),
    );
    fs::remove_dir_all(cache)?;
    Ok(())
}

/// A number of kB that Linux knows of this process.
fn memory(field: &str) -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let number = number.and_then(|number| number.trim().parse().ok());
    number.ok_or_else(|| io::Error::other(format!("/proc/self/status has no {field}")))
}

/// Seconds that a core has worked for this process.
fn cpu_time() -> io::Result<f64> {
    let nanoseconds = fs::read_to_string("/proc/self/schedstat")?;
    let nanoseconds = nanoseconds.split(' ').next().and_then(|n| n.parse().ok());
    let nanoseconds: Option<f64> = nanoseconds;
    let bad = || io::Error::other("/proc/self/schedstat has no number");
    Ok(nanoseconds.ok_or_else(bad)? / 1e9)
}

/// Writes a data set of 16-bit tokens, all of which are 0, in Megatron-LM's format.
fn write(prefix: &Path, num_documents: u64, deviation: f64) -> io::Result<()> {
    let mut draw = fastrand::Rng::with_seed(1);
    let mut length = || {
        let radius = (-2.0 * (1.0 - draw.f64()).ln()).sqrt();
        let normal = radius * (TAU * draw.f64()).cos();
        (MEDIAN * (deviation * normal).exp()).clamp(1.0, 1e8) as i32
    };
    let lengths: Vec<i32> = (0..num_documents).map(|_| length()).collect();
    let mut idx = BufWriter::new(File::create(prefix.with_extension("idx"))?);
    idx.write_all(b"MMIDIDX\0\0")?;
    idx.write_all(&1u64.to_le_bytes())?;
    // The code of unsigned integers of 16 bits.
    idx.write_all(&[8])?;
    idx.write_all(&num_documents.to_le_bytes())?;
    idx.write_all(&(num_documents + 1).to_le_bytes())?;
    for length in &lengths {
        idx.write_all(&length.to_le_bytes())?;
    }
    let mut pointer = 0u64;
    for length in &lengths {
        idx.write_all(&pointer.to_le_bytes())?;
        pointer += 2 * *length as u64;
    }
    for document in 0..=num_documents {
        idx.write_all(&document.to_le_bytes())?;
    }
    idx.flush()?;
    File::create(prefix.with_extension("bin"))?.set_len(pointer)
}
