use super::label;
use crate::{
    schedule::Schedule,
    simulate::{Span, Timing},
};

/// Draws a schedule as text: one line per rank and one column per unit of time, so it suits costs
/// of a few units per pass. Lines of more than `longest` characters are broken, at the same time
/// for all ranks.
///
/// `F3` is the forward of micro-batch 3, `B` a backward (or the gradient of the input), `W` the
/// gradient of the weights; a letter after the number is the chunk. `=` continues the pass to its
/// left, `.` is idle.
pub fn text(schedule: &Schedule, timing: &Timing, longest: Option<usize>) -> String {
    let spans = timing.ranks.iter().flatten();
    let width = spans
        .map(|span| label(schedule, span).len())
        .max()
        .unwrap_or(1);
    let makespan = timing.makespan() as usize;
    let rank_width = (timing.ranks.len().max(1) - 1).to_string().len();
    let rank = |(rank, spans): (usize, &Vec<Span>)| {
        let mut cells = vec![".".to_string(); makespan];
        for span in spans {
            let columns = &mut cells[span.start as usize..span.end as usize];
            columns.fill("=".into());
            // A pass that takes no time has no column.
            if let Some(first) = columns.first_mut() {
                *first = label(schedule, span);
            }
        }
        let cells = cells.iter().map(|cell| format!("{cell:width$}")).collect();
        (format!("rank {rank:rank_width$} | "), cells)
    };
    let ranks: Vec<(String, Vec<String>)> = timing.ranks.iter().enumerate().map(rank).collect();
    let margin = ranks.first().map_or(0, |(name, _)| name.len());
    let whole = makespan.max(1);
    let columns = longest.map_or(whole, |longest| {
        (longest + 1).saturating_sub(margin) / (width + 1)
    });
    let block = |start: usize| {
        let end = whole.min(start + columns.max(1));
        let line = |(name, cells): &(String, Vec<String>)| {
            let cells = cells.get(start..end).unwrap_or_default();
            format!("{name}{}", cells.join(" ")).trim_end().to_string() + "\n"
        };
        ranks.iter().map(line).collect::<String>()
    };
    let blocks: Vec<String> = (0..whole).step_by(columns.max(1)).map(block).collect();
    blocks.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::ScheduleConfig,
        kind::ScheduleKind,
        simulate::{Costs, Links},
    };

    fn drawn(
        kind: ScheduleKind,
        num_ranks: usize,
        num_micro_batches: usize,
        costs: Costs,
    ) -> String {
        let schedule = ScheduleConfig::new(kind, num_ranks, num_micro_batches)
            .build()
            .unwrap();
        let timing = schedule
            .simulate(&vec![costs; num_ranks], Links::PrePosted)
            .unwrap();
        text(&schedule, &timing, None)
    }

    #[test]
    fn long_lines_are_broken_at_the_same_time_on_all_ranks() {
        let kind = ScheduleKind::OneForwardOneBackward;
        let schedule = ScheduleConfig::new(kind, 3, 4).build().unwrap();
        let timing = schedule
            .simulate(&[Costs::UNIT; 3], Links::PrePosted)
            .unwrap();
        let expected = "\
rank 0 | F0 F1 F2 .  .  .  .  B0 =
rank 1 | .  F0 F1 .  .  B0 =  F2 B1
rank 2 | .  .  F0 B0 =  F1 B1 =  F2

rank 0 | F3 B1 =  .  B2 =  .  B3 =
rank 1 | =  F3 B2 =  .  B3 =  .  .
rank 2 | B2 =  F3 B3 =  .  .  .  .
";
        assert_eq!(text(&schedule, &timing, Some(36)), expected);
        let whole = drawn(kind, 3, 4, Costs::UNIT);
        assert_eq!(text(&schedule, &timing, Some(1000)), whole);
        assert_eq!(
            text(&schedule, &timing, Some(0)).lines().count(),
            18 * 3 + 17
        );
    }

    /// Megatron-LM's figure 4 of arXiv 2104.04473, smaller.
    #[test]
    fn one_forward_one_backward_is_the_papers() {
        let found = drawn(ScheduleKind::OneForwardOneBackward, 3, 4, Costs::UNIT);
        let expected = "\
rank 0 | F0 F1 F2 .  .  .  .  B0 =  F3 B1 =  .  B2 =  .  B3 =
rank 1 | .  F0 F1 .  .  B0 =  F2 B1 =  F3 B2 =  .  B3 =  .  .
rank 2 | .  .  F0 B0 =  F1 B1 =  F2 B2 =  F3 B3 =  .  .  .  .
";
        assert_eq!(found, expected);
    }

    #[test]
    fn zb_h1_is_the_papers() {
        let found = drawn(ScheduleKind::ZbH1, 3, 4, Costs::UNIT);
        let expected = "\
rank 0 | F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
rank 1 | .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
rank 2 | .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
";
        assert_eq!(found, expected);
    }

    #[test]
    fn zb_v_is_the_papers() {
        let found = drawn(ScheduleKind::ZbV, 2, 4, Costs::UNIT);
        let expected = "\
rank 0 | F0a F1a F2a F0b B0b W0b F1b B1b W1b F3a B0a W0a F2b B2b W2b B1a W1a F3b B3b W3b B2a W2a B3a W3a .
rank 1 | .   F0a F0b F1a F1b B0b W0b F2a B0a W0a F2b B1b W1b F3a B1a W1a F3b B2b W2b B2a B3b B3a W2a W3b W3a
";
        assert_eq!(found, expected);
    }

    #[test]
    fn what_takes_no_time_is_not_drawn() {
        let costs = Costs {
            backward_input: 0,
            backward_weight: 0,
            ..Costs::UNIT
        };
        let found = drawn(ScheduleKind::GPipe, 2, 2, costs);
        assert_eq!(found, "rank 0 | F0 F1 .\nrank 1 | .  F0 F1\n");
    }
}
