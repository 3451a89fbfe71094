//! Compares one rank of megaburn with the same Llama in plain Burn modules, on the CPU.
//!
//! The two models hold the same weights and see the same batch; their losses are compared before
//! anything is timed. Steps alternate, so that other load on the machine affects both equally.

use std::process::ExitCode;

use clap::Parser;
use megaburn::collective::ProcessGroups;
use megaburn_benches::{
    Failure,
    llama::{Clip, Megaburn, batch, default_model, global_batch},
    plain::PlainBurn,
    report::{Args, Report, Table},
    timing::{Times, millis, pool},
};

/// The most that a step of megaburn may take, relative to plain Burn, at parallel degree 1.
const LIMIT: f64 = 1.10;
const WARM_UP: usize = 3;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    let rounds = if args.quick { 5 } else { 40 };
    let (config, seq_len) = default_model();
    let about = format!(
        "One rank of megaburn (A) against the same Llama of plain Burn modules (B) on Flex: hidden \
         {}, ffn {}, {} layers, {} heads over {} key/value heads, vocabulary {}, tied; {} samples \
         of {seq_len} tokens; f32. {rounds} of each, alternating, after {WARM_UP} to warm up. The \
         step's median ratio is at most {LIMIT:.2} by contract.",
        config.hidden,
        config.ffn,
        config.layers,
        config.heads,
        config.kv_heads,
        config.vocab,
        global_batch(),
    );
    let mut report = Report::new("plain_burn", about);
    let head = [
        "",
        "A median ms",
        "B median ms",
        "A / B",
        "A min ms",
        "B min ms",
        "min A / B",
        "A tok/s",
    ];
    for threads in [2, 1] {
        let mut table = Table::new(format!("{threads} rayon thread(s)"), &head);
        for row in pool(threads).install(|| compare(rounds))? {
            table.row(row);
        }
        report.table(&table);
    }
    report.finish(args)
}

/// Returns one row each for the forward pass, the training step, and the step with clipping.
/// megaburn clips by one norm over all parameters, as its trainer does; Burn clips each parameter
/// by its own norm, as its optimizer offers.
fn compare(rounds: usize) -> Result<Vec<Vec<String>>, Failure> {
    let mut rows = Vec::new();
    for (name, clip) in [("step", Clip::No), ("step with clipping", Clip::ToOne)] {
        let (config, seq_len) = default_model();
        let mut ours = Megaburn::new(&config, seq_len, ProcessGroups::single(1234))?;
        let mut plain = PlainBurn::new(ours.model(), batch(seq_len, 0..global_batch()), clip);
        check_losses(&ours, &plain)?;
        let tokens = seq_len * global_batch();
        if clip == Clip::No {
            let [a, b] = alternate(rounds, || _ = ours.forward(), || _ = plain.forward());
            rows.push(row("forward", &a, &b, tokens));
        }
        let mut failure = None;
        let [a, b] = alternate(
            rounds,
            || failure = ours.step(clip).err().or(failure.take()),
            || plain.step(),
        );
        if let Some(failure) = failure {
            return Err(failure);
        }
        rows.push(row(name, &a, &b, tokens));
    }
    Ok(rows)
}

fn check_losses(ours: &Megaburn, plain: &PlainBurn) -> Result<(), Failure> {
    let [a, b] = [ours.forward(), plain.forward()];
    if (a - b).abs() < 1e-4 {
        return Ok(());
    }
    Err(format!("the models differ: megaburn's loss is {a}, plain Burn's {b}").into())
}

fn alternate(rounds: usize, mut a: impl FnMut(), mut b: impl FnMut()) -> [Times; 2] {
    let mut times = [Times::default(), Times::default()];
    for _ in 0..WARM_UP {
        a();
        b();
    }
    for _ in 0..rounds {
        times[0].measure(&mut a);
        times[1].measure(&mut b);
    }
    times
}

fn row(name: &str, a: &Times, b: &Times, tokens: usize) -> Vec<String> {
    let ratio = |a: f64, b: f64| format!("{:.3}", a / b);
    vec![
        name.to_string(),
        millis(a.median()),
        millis(b.median()),
        ratio(a.median(), b.median()),
        millis(a.min()),
        millis(b.min()),
        ratio(a.min(), b.min()),
        format!("{:.0}", tokens as f64 / a.median()),
    ]
}
