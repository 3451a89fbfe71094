//! Plans who writes what of the checkpoints of large models, with the code of a save and as many rank
//! threads as the layout has ranks, but without weights.

use std::{process::ExitCode, time::Instant};

use clap::Parser;
use megaburn::{
    collective::{GroupOptions, ProcessGroups, run_threads},
    mesh::Layout,
    train::{ConfigLayers, TrainError, estimate::CheckpointShare},
};
use megaburn_benches::{
    Failure,
    report::{Args, Report, Table},
};

const LLAMA_70B: &str =
    "hidden = 8192\nffn = 28672\nlayers = 80\nheads = 64\nkv_heads = 8\nvocab = 128256";
const LLAMA_405B: &str =
    "hidden = 16384\nffn = 53248\nlayers = 126\nheads = 128\nkv_heads = 8\nvocab = 128256";
const QWEN3_235B: &str =
    "family = \"qwen3_moe\"\nhidden = 4096\nffn = 12288\nlayers = 94\nheads = 64\nkv_heads = 4
head_dim = 128\nvocab = 151936\n[model.experts]\nnum = 128\ntop_k = 8\nffn = 1536";

/// Model, layout and ZeRO stage.
const CASES: [(&str, &str, &str, u8); 9] = [
    ("Llama 70B", LLAMA_70B, "tp8-dp8", 0),
    ("Llama 70B", LLAMA_70B, "tp8-dp8-sp", 1),
    ("Llama 70B", LLAMA_70B, "dp64", 3),
    ("Llama 70B", LLAMA_70B, "tp8-pp4-dp16-sp", 1),
    ("Llama 405B", LLAMA_405B, "tp8-pp16-dp8-sp", 0),
    ("Llama 405B", LLAMA_405B, "tp8-pp16-dp8-sp", 1),
    ("Llama 405B", LLAMA_405B, "tp8-dp64-sp", 3),
    ("Qwen3 235B-A22B", QWEN3_235B, "tp4-pp8-dp8-ep8-sp", 1),
    ("Qwen3 235B-A22B", QWEN3_235B, "dp64-ep32", 3),
];

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
    let about = "bf16 parameters, f32 masters and moments. A rank writes what it holds, or its equal share of \
        what several ranks hold; nothing is gathered. The largest share is compared with the mean of all \
        ranks: stages of a pipeline hold different parameters, so their shares differ.";
    let mut report = Report::new("checkpoint_plan", about);
    let head = [
        "model",
        "layout",
        "zero",
        "checkpoint, GB",
        "ranks that write",
        "held by a rank, GB",
        "written by a rank, GB: least",
        "mean",
        "most",
        "most / mean of its stage",
        "pieces of a rank",
        "planned in, s",
    ];
    let mut table = Table::new("Shares of each rank", &head);
    let cases = if args.quick { &CASES[..2] } else { &CASES[..] };
    for (name, model, layout, zero) in cases {
        table.row(case(name, model, layout, *zero)?);
    }
    report.table(&table);
    report.finish(args)
}

fn case(name: &str, model: &str, layout: &str, zero: u8) -> Result<Vec<String>, Failure> {
    let layout: Layout = layout.parse()?;
    let text = format!(
        "[model]\n{model}\n[parallel]\nzero = {zero}\n[data]\nseq_len = 8192\n[train]\ndtype = \"bf16\"
        micro_batch = 1\nglobal_batch = {}",
        layout.dp * layout.pp
    );
    let config = ConfigLayers::new()
        .with_text("checkpoint_plan.rs", &text)?
        .load()?;
    let started = Instant::now();
    let ranks = run_threads(layout.world_size(), GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let share = CheckpointShare::of_rank(&config, &groups)?;
        Ok::<_, TrainError>((groups.coords.pp, share))
    });
    let shares: Vec<_> = ranks.into_iter().collect::<Result<_, _>>()?;
    let seconds = started.elapsed().as_secs_f64();
    let written = || shares.iter().map(|(_, share)| share.written_bytes);
    let total: u64 = written().sum();
    let mean = total as f64 / shares.len() as f64;
    let off = (0..layout.pp).map(|stage| {
        let own = shares
            .iter()
            .filter(|(pp, _)| *pp == stage)
            .map(|(_, share)| share.written_bytes);
        let (most, sum, num) = own.fold((0, 0, 0), |(most, sum, num), bytes| {
            (bytes.max(most), sum + bytes, num + 1)
        });
        most as f64 * f64::from(num) / sum as f64
    });
    let gigabytes = |bytes: f64| format!("{:.2}", bytes / 1e9);
    let held = shares
        .iter()
        .map(|(_, share)| share.held_bytes)
        .max()
        .unwrap_or(0);
    Ok(vec![
        name.to_string(),
        layout.to_string(),
        zero.to_string(),
        gigabytes(total as f64),
        written().filter(|bytes| *bytes > 0).count().to_string(),
        gigabytes(held as f64),
        gigabytes(written().min().unwrap_or(0) as f64),
        gigabytes(mean),
        gigabytes(written().max().unwrap_or(0) as f64),
        format!("{:.3}", off.fold(0.0, f64::max)),
        shares
            .iter()
            .map(|(_, share)| share.num_pieces)
            .max()
            .unwrap_or(0)
            .to_string(),
        format!("{seconds:.1}"),
    ])
}
