//! Reads samples of a data set for some seconds, and prints how many: one of the processes of
//! `benches/sample_reading.py`.
//!
//! ```sh
//! cargo run --release -p megaburn-data --example read_samples -- PREFIX SEQ_LEN SEED SECONDS
//! ```

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use megaburn_data::{IndexedDataset, Sampler, Samples, TokenDataset};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [prefix, seq_len, seed, seconds] = args.as_slice() else {
        return Err("give PREFIX SEQ_LEN SEED SECONDS".into());
    };
    let set = Arc::new(IndexedDataset::open(prefix)?);
    let tokens = TokenDataset::indexed(set, usize::from(u16::MAX) + 1);
    let samples = Sampler::shuffled(tokens, seq_len.parse()?, seed.parse()?)?;
    let end = Instant::now() + Duration::from_secs_f64(seconds.parse()?);
    let mut num_read = 0;
    while Instant::now() < end {
        samples.sample(num_read)?;
        num_read += 1;
    }
    println!("{num_read}");
    Ok(())
}
