//! The plan as text.

use std::fmt;

use megaburn_report::console::human_number;

use crate::{memory::StageMemory, plan::Plan, step::StepTime, traffic::Traffic};

/// Stages that are listed; of more, the fullest are.
const LISTED: usize = 8;

pub(crate) const GIB: f64 = (1u64 << 30) as f64;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            model,
            batch,
            layout,
            gpu,
            gpus,
            ..
        } = self;
        let recipe = match model.recipe.as_str() {
            "bf16" => String::new(),
            recipe => format!(", products by precision.recipe = \"{recipe}\""),
        };
        writeln!(
            f,
            "model    {}, {} parameters in {}: {}{recipe}",
            model.family,
            human_number(model.parameters as f64),
            model.dtype,
            model.sizes,
        )?;
        writeln!(
            f,
            "step     {} tokens: {} samples of {}, in {} micro-batches of {} on each data-parallel rank",
            batch.tokens,
            batch.samples,
            batch.tokens_per_sample,
            batch.micro_batches,
            batch.micro_batch,
        )?;
        writeln!(
            f,
            "layout   {layout} on {gpus} x {gpu}, {:.1} GiB each",
            self.capacity() / GIB
        )?;
        writeln!(f)?;
        self.write_memory(f)?;
        writeln!(f)?;
        self.write_traffic(f)?;
        writeln!(f)?;
        self.write_time(f)?;
        for note in &self.notes {
            writeln!(f, "note     {note}")?;
        }
        Ok(())
    }
}

impl Plan {
    /// Bytes of a GPU.
    pub(crate) fn capacity(&self) -> f64 {
        self.gpu.memory_bytes as f64
    }

    /// The memory of the rank that needs most.
    pub fn fullest(&self) -> StageMemory {
        let fullest = self.memory.iter().max_by_key(|memory| memory.total_bytes);
        fullest.copied().unwrap_or_default()
    }

    /// The stages that are listed, in order.
    fn listed(&self) -> Vec<usize> {
        let mut stages: Vec<usize> = (0..self.memory.len()).collect();
        stages.sort_by_key(|stage| std::cmp::Reverse(self.memory[*stage].total_bytes));
        stages.truncate(LISTED);
        stages.sort_unstable();
        stages
    }

    fn write_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: usize| format!("{:.1}", bytes as f64 / GIB);
        let head = [
            "stage",
            "parameters",
            "gradients",
            "optimizer",
            "activations",
            "buffers",
            "runtime",
            "reused",
            "total",
            "headroom",
        ];
        let row = |stage: &usize| {
            let memory = self.memory[*stage];
            vec![
                stage.to_string(),
                gib(memory.parameters_bytes),
                gib(memory.gradients_bytes),
                gib(memory.optimizer_bytes),
                gib(memory.activations_bytes),
                gib(memory.buffers_bytes),
                gib(memory.runtime_bytes),
                match gib(memory.reused_bytes) {
                    none if none == gib(0) => "-".to_string(),
                    reused => format!("-{reused}"),
                },
                gib(memory.total_bytes),
                format!("{:.1}", memory.headroom_bytes as f64 / GIB),
            ]
        };
        let rows: Vec<_> = self.listed().iter().map(row).collect();
        write_table(f, "memory", "GiB", &head, &rows)?;
        let left_out = self.memory.len() - rows.len();
        if left_out > 0 {
            writeln!(
                f,
                "         {left_out} stages with less memory are not listed"
            )?;
        }
        let fullest = self.fullest();
        let headroom = fullest.headroom_bytes as f64;
        let share = 100.0 * headroom.abs() / self.capacity();
        let stage = fullest.stage;
        if self.fits {
            let free = headroom / GIB;
            return writeln!(
                f,
                "verdict  fits: {free:.1} GiB ({share:.0}%) are left on the rank of stage {stage}"
            );
        }
        let missing = -headroom / GIB;
        writeln!(
            f,
            "verdict  does not fit: {missing:.1} GiB ({share:.0}%) are missing on the rank of stage {stage}"
        )?;
        if self.changes.is_empty() {
            return writeln!(
                f,
                "change   no change of up to four settings makes it fit on {} of these GPUs: use more GPUs",
                self.gpus
            );
        }
        for (number, change) in self.changes.iter().enumerate() {
            let title = if number == 0 { "change" } else { "" };
            writeln!(
                f,
                "{title:9}{}: {:.1} GiB, {} a step",
                change.flags(),
                change.total_bytes as f64 / GIB,
                duration(change.step_ms)
            )?;
        }
        Ok(())
    }

    fn write_traffic(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = Traffic::default().axes().map(|(name, _)| name);
        let sent = |axis: usize, traffic: &Traffic| traffic.axes()[axis].1;
        let is_used = |axis: &usize| {
            self.traffic
                .iter()
                .any(|traffic| sent(*axis, traffic) > 0.0)
        };
        let used: Vec<usize> = (0..axes.len()).filter(is_used).collect();
        if used.is_empty() {
            return writeln!(f, "traffic  none");
        }
        let names = used.iter().map(|axis| axes[*axis]);
        let head: Vec<&str> = ["stage"].into_iter().chain(names).collect();
        let row = |stage: &usize| {
            let traffic = &self.traffic[*stage];
            let sent = used
                .iter()
                .map(|axis| format!("{:.2}", sent(*axis, traffic) / GIB));
            [stage.to_string()].into_iter().chain(sent).collect()
        };
        let rows: Vec<Vec<String>> = self.listed().iter().map(row).collect();
        write_table(
            f,
            "traffic",
            "GiB that a rank sends in a step",
            &head,
            &rows,
        )
    }

    fn write_time(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = self.time;
        let parts = time.parts();
        let parts: Vec<_> = parts
            .into_iter()
            .filter(|(_, ms)| *ms > 0.0)
            .map(|(name, ms)| {
                format!(
                    "{name} {} ({:.0}%)",
                    duration(ms),
                    100.0 * ms / time.step_ms
                )
            })
            .collect();
        let (first, second) = parts.split_at(parts.len().min(4));
        writeln!(
            f,
            "time     {} a step: {}",
            duration(time.step_ms),
            first.join(", ")
        )?;
        if !second.is_empty() {
            writeln!(f, "         {}", second.join(", "))?;
        }
        if self.layout.pp > 1 {
            writeln!(
                f,
                "bubble   {:.1}% of the passes' time with schedule {}",
                100.0 * self.bubble_fraction,
                self.schedule
            )?;
        }
        writeln!(
            f,
            "speed    {:.0} tokens/s/GPU, {:.0} TFLOP/s/GPU, MFU {:.1}%",
            self.tokens_per_second_per_gpu,
            self.tflops_per_gpu,
            100.0 * self.mfu
        )?;
        let run = self.run;
        let dollars = run
            .dollars
            .map_or_else(String::new, |dollars| format!(", ${dollars:.0}"));
        writeln!(
            f,
            "run      {} tokens in {:.0} steps: {}, {} GPU hours{dollars}",
            human_number(run.tokens),
            run.steps,
            match run.days {
                days if days < 1.0 => format!("{:.1} hours", 24.0 * days),
                days => format!("{days:.1} days"),
            },
            match run.gpu_hours {
                hours if hours < 100.0 => format!("{hours:.1}"),
                hours => format!("{hours:.0}"),
            }
        )
    }
}

impl StepTime {
    /// The parts with their names; they add up to the step.
    pub(crate) fn parts(&self) -> [(&'static str, f64); 8] {
        [
            ("products", self.products_ms),
            ("attention", self.attention_ms),
            ("memory-bound", self.memory_bound_ms),
            ("optimizer", self.optimizer_ms),
            ("exposed communication", self.communication_ms),
            ("slowed by communication", self.interference_ms),
            ("bubble", self.bubble_ms),
            ("host", self.host_ms),
        ]
    }
}

/// `813 ms`, `24.1 s`.
pub(crate) fn duration(ms: f64) -> String {
    match ms {
        ms if ms < 100.0 => format!("{ms:.1} ms"),
        ms if ms < 10_000.0 => format!("{ms:.0} ms"),
        ms => format!("{:.1} s", ms / 1e3),
    }
}

/// Writes a table whose columns are right-aligned, with a title before its first line.
pub(crate) fn write_table(
    f: &mut fmt::Formatter<'_>,
    title: &str,
    unit: &str,
    head: &[&str],
    rows: &[Vec<String>],
) -> fmt::Result {
    writeln!(f, "{title:9}{unit}")?;
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].len());
        cells.max().unwrap_or(0).max(head[column].len())
    };
    let widths: Vec<_> = (0..head.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let cells = cells
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:>width$}"));
        format!("         {}", cells.collect::<Vec<_>>().join("  "))
    };
    writeln!(f, "{}", line(head.to_vec()))?;
    for row in rows {
        writeln!(f, "{}", line(row.iter().map(String::as_str).collect()))?;
    }
    Ok(())
}
