//! Encodes text files into Megatron-LM's format with this crate alone, which builds faster than the
//! `megaburn` binary.
//!
//! `preprocess INPUT --tokenizer FOLDER --out PREFIX [--workers N] [--append-eod]`

use std::{env, error::Error, path::PathBuf};

use megaburn_data::{HfTokenizer, PreprocessConfig};

fn main() -> Result<(), Box<dyn Error>> {
    let (mut inputs, mut tokenizer, mut out) = (Vec::new(), PathBuf::new(), PathBuf::new());
    let (mut num_workers, mut append_eod) = (1, false);
    let mut args = env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        match arg.as_str() {
            "--tokenizer" => tokenizer = value()?.into(),
            "--out" => out = value()?.into(),
            "--workers" => num_workers = value()?.parse()?,
            "--append-eod" => append_eod = true,
            input => inputs.push(PathBuf::from(input)),
        }
    }
    let config = PreprocessConfig::new(inputs, out)
        .with_append_eod(append_eod)
        .with_num_workers(num_workers);
    let summary = config.run(&HfTokenizer::open(tokenizer)?, |_| ())?;
    println!(
        "{} documents, {} tokens",
        summary.counts.documents, summary.counts.tokens
    );
    Ok(())
}
