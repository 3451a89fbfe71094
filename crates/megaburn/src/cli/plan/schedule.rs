//! `megaburn plan --schedule KIND`: shows a pipeline schedule without running it.

use std::io::{self, IsTerminal};

use clap::{Args, ValueEnum};
use megaburn_pipeline::{
    Costs, Links, PipelineError, Placement, Proof, Schedule, ScheduleConfig, ScheduleKind, Timing,
    draw,
};

/// Width of a terminal line, in characters.
const TERMINAL: usize = 80;

#[derive(Args)]
pub(super) struct ScheduleArgs {
    /// Without CONFIG: the schedule, one of gpipe, 1f1b, interleaved, zb-h1, zb-v or forward-only.
    #[arg(
        long,
        value_name = "KIND",
        required_unless_present = "config",
        conflicts_with = "config"
    )]
    schedule: Option<ScheduleKind>,
    /// Without CONFIG: the number of pipeline ranks.
    #[arg(
        long,
        value_name = "N",
        required_unless_present = "config",
        conflicts_with = "config"
    )]
    pp: Option<usize>,
    /// Without CONFIG: the number of stages per rank. Default: 2 for interleaved and zb-v,
    /// otherwise 1.
    #[arg(long, value_name = "V", conflicts_with = "config")]
    chunks: Option<usize>,
    /// Without CONFIG: the number of micro-batches per step.
    #[arg(
        long,
        value_name = "M",
        required_unless_present = "config",
        conflicts_with = "config"
    )]
    micro_batches: Option<usize>,
    /// Without CONFIG, for interleaved: the number of micro-batches that a chunk processes before
    /// the next chunk continues. Default: the smallest number that the schedule allows.
    #[arg(long, value_name = "G", conflicts_with = "config")]
    group: Option<usize>,
    /// Without CONFIG: how stages are assigned to ranks, in a loop, or there and back (vee). Only
    /// gpipe and forward-only support both.
    #[arg(long, value_enum, value_name = "P", conflicts_with = "config")]
    placement: Option<PlacementArg>,
}

/// The command line's names for [`Placement`].
#[derive(Clone, Copy, ValueEnum)]
enum PlacementArg {
    Loop,
    Vee,
}

impl From<PlacementArg> for Placement {
    fn from(placement: PlacementArg) -> Self {
        match placement {
            PlacementArg::Loop => Self::Loop,
            PlacementArg::Vee => Self::Vee,
        }
    }
}

impl ScheduleArgs {
    /// The report of a schedule as text, and its picture as SVG.
    ///
    /// # Errors
    /// There is no such schedule.
    pub(super) fn draw(&self) -> Result<(String, String), PipelineError> {
        // The command line requires all three where no configuration is given.
        let kind = self.schedule.unwrap_or(ScheduleKind::OneForwardOneBackward);
        let pp = self.pp.unwrap_or(1);
        let mut config = ScheduleConfig::new(kind, pp, self.micro_batches.unwrap_or(1));
        config.num_chunks = self.chunks;
        config.group_size = self.group;
        config.placement = self.placement.map(Placement::from);
        let schedule = config.build()?;
        let proof = schedule.prove()?;
        let timing = schedule.simulate(&vec![Costs::UNIT; pp], Links::PrePosted)?;
        let text = report(&config, &schedule, &proof, &timing)?;
        Ok((text, draw::svg(&schedule, &timing)))
    }
}

/// The picture and the numbers as text.
fn report(
    config: &ScheduleConfig,
    schedule: &Schedule,
    proof: &Proof,
    timing: &Timing,
) -> Result<String, PipelineError> {
    let stages = schedule.stages;
    let p = stages.num_ranks;
    let v = stages.num_chunks;
    let m = schedule.num_micro_batches;
    let group = match schedule.kind {
        ScheduleKind::Interleaved => format!(", groups of {}", config.group_size()?),
        _ => String::new(),
    };
    let of_rank = |rank| {
        let stages: Vec<String> = (0..v).map(|c| stages.stage(rank, c).to_string()).collect();
        format!("[{}]", stages.join(", "))
    };
    let ranks: Vec<String> = (0..p).map(of_rank).collect();
    let busy = timing.busy(0);
    let between = (0..p)
        .map(|rank| timing.idle_between(rank))
        .max()
        .unwrap_or(0);
    let units = match (
        schedule.kind.splits_backward(),
        schedule.kind.has_backward(),
    ) {
        (true, _) => "F forward, B data gradient, W weight gradient, 1 unit each",
        (_, true) => "F forward, 1 unit; B backward, 2 units",
        _ => "F forward, 1 unit",
    };
    let formula = match config.expected_idle(Costs::UNIT) {
        Some(idle) => format!("{:.4} by formula", idle as f64 / busy as f64),
        None => "there is no formula for these sizes".into(),
    };
    Ok(format!(
        "{}\n\
         schedule {}: p {p} ranks, v {v} chunks each, m {m} micro-batches{group}\n\
         stages   {}\n\
         passes   {units}\n\
         time     {} units, {busy} computing, {} idle ({:.1}%); {between} at most between a rank's first and last pass\n\
         bubble   {:.4} of the computing time; {formula}, which is {} for m large enough\n\
         peak     {:?} micro-batches of a chunk kept by rank; {}\n",
        // Output to a file or program has no line width.
        draw::text(
            schedule,
            timing,
            io::stdout().is_terminal().then_some(TERMINAL)
        ),
        schedule.kind,
        ranks.join(" "),
        timing.makespan(),
        timing.idle(0),
        100.0 * timing.bubble_fraction(),
        timing.bubble_ratio(),
        schedule.kind.bubble_formula(),
        proof.peak_activations,
        schedule.kind.peak_formula(),
    ))
}
