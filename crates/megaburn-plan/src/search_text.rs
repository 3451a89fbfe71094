//! What a search found, as text.

use std::fmt;

use crate::{
    search::{FoundRun, HEADROOM, SearchResult},
    text::{duration, write_table},
};

const GIB: f64 = (1_u64 << 30) as f64;

impl fmt::Display for SearchResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let refused: usize = self.refused.iter().map(|kind| kind.count).sum();
        writeln!(
            f,
            "search   {} x {}: {} combinations of layout, micro-batch and schedule; {} fit, {} fit but are too \
            slow with any schedule, {} leave less than {:.0}% of the memory free, {refused} cannot be run",
            self.gpus,
            self.gpu.title,
            self.candidates,
            self.fit,
            self.slower,
            self.do_not_fit,
            100.0 * HEADROOM,
        )?;
        for kind in self.refused.iter().take(3) {
            writeln!(f, "refused  {}, such as: {}", kind.count, kind.example)?;
        }
        if self.best.is_empty() {
            return writeln!(
                f,
                "found    nothing that fits: take more GPUs, or GPUs with more memory"
            );
        }
        writeln!(f)?;
        let has_price = self.best.iter().any(|run| run.run.dollars.is_some());
        let mut head = vec![
            "",
            "layout",
            "GiB",
            "free",
            "step",
            "tok/s/GPU",
            "MFU",
            "days",
            "cost",
            "bubble",
            "most is lost in",
        ];
        if !has_price {
            head.retain(|column| *column != "cost");
        }
        let row = |(index, run): (usize, &FoundRun)| {
            let mut row = vec![
                (index + 1).to_string(),
                run.layout.to_string(),
                format!("{:.1}", run.total_bytes as f64 / GIB),
                format!("{:.1}", run.headroom_bytes as f64 / GIB),
                duration(run.step_ms),
                format!("{:.0}", run.tokens_per_second_per_gpu),
                format!("{:.1}%", 100.0 * run.mfu),
                format!("{:.1}", run.run.days),
            ];
            let dollars = run.run.dollars;
            row.extend(dollars.map(|dollars| format!("${dollars:.0}")));
            row.extend([
                format!("{:.1}%", 100.0 * run.bubble_fraction),
                format!(
                    "{} {:.0}%",
                    run.largest_loss,
                    100.0 * run.largest_loss_ms / run.step_ms
                ),
            ]);
            row
        };
        let rows: Vec<_> = self.best.iter().enumerate().map(row).collect();
        write_table(f, "found", "the fastest first", &head, &rows)?;
        writeln!(f)?;
        for (index, run) in self.best.iter().enumerate() {
            writeln!(f, "flags {:2} {}", index + 1, run.flags)?;
        }
        Ok(())
    }
}
