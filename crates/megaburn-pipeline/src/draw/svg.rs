use std::fmt::Write;

use super::{chunk_name, label};
use crate::{action::Op, schedule::Schedule, simulate::Timing};

const HEIGHT: f64 = 30.0;
const GAP: f64 = 6.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 48.0;
/// The largest total width of a rank's passes.
const WIDEST: f64 = 1600.0;
/// The largest width of one unit of time.
const WIDEST_UNIT: f64 = 30.0;
/// The approximate width of a letter.
const LETTER: f64 = 7.0;

/// Colours of forward, backward (of the input) and weights, from the first chunk to the last.
const COLOURS: [[&str; 4]; 3] = [
    ["#2563af", "#5b8fcb", "#8fb5df", "#bcd3ec"],
    ["#0f8a72", "#43a892", "#7cc4b3", "#b0dcd2"],
    ["#c2570c", "#d87f42", "#e8a67a", "#f3ccb2"],
];

/// Draws a schedule as an SVG file: one row per rank, time to the right. Each pass is a box in the
/// colour of its kind and chunk; colours repeat from the fifth chunk on. Boxes have the same labels
/// as in [`text`](super::text()), if they fit.
pub fn svg(schedule: &Schedule, timing: &Timing) -> String {
    let makespan = timing.makespan().max(1) as f64;
    let unit = (WIDEST / makespan).min(WIDEST_UNIT);
    let num_ranks = timing.ranks.len();
    let bottom = TOP + num_ranks as f64 * (HEIGHT + GAP);
    // The title and the legend need some width, however short the schedule is.
    let width = (LEFT + makespan * unit + 24.0).max(560.0);
    let height = bottom + 44.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"28\" font-size=\"16\" fill=\"#3c4048\">{}</text>\n",
        title(schedule, timing)
    );
    for (rank, spans) in timing.ranks.iter().enumerate() {
        let y = TOP + rank as f64 * (HEIGHT + GAP);
        let middle = y + HEIGHT / 2.0 + 4.0;
        put_text(
            &mut svg,
            "start",
            12.0,
            middle,
            "#3c4048",
            &format!("rank {rank}"),
        );
        let idle = makespan * unit;
        put_rect(&mut svg, LEFT, y, idle, "#eceef1");
        for span in spans.iter().filter(|span| span.end > span.start) {
            let x = LEFT + span.start as f64 * unit;
            let width = (span.end - span.start) as f64 * unit;
            put_rect(
                &mut svg,
                x,
                y,
                width,
                colour(span.action.op, span.action.chunk),
            );
            let label = label(schedule, span);
            if label.len() as f64 * LETTER < width {
                let ink = if span.action.chunk % 4 < 2 {
                    "#ffffff"
                } else {
                    "#20242a"
                };
                put_text(&mut svg, "middle", x + width / 2.0, middle, ink, &label);
            }
        }
    }
    legend(&mut svg, schedule, bottom + 12.0);
    svg.push_str("</svg>\n");
    svg
}

fn title(schedule: &Schedule, timing: &Timing) -> String {
    format!(
        "{}: {} ranks, {} chunks each, {} micro-batches; idle {:.1}%",
        schedule.kind,
        schedule.stages.num_ranks,
        schedule.stages.num_chunks,
        schedule.num_micro_batches,
        100.0 * timing.bubble_fraction()
    )
}

fn colour(op: Op, chunk: usize) -> &'static str {
    let kind = match op {
        Op::Forward => 0,
        Op::BackwardWeight => 2,
        _ => 1,
    };
    COLOURS[kind][chunk % 4]
}

fn legend(svg: &mut String, schedule: &Schedule, y: f64) {
    let kind = schedule.kind;
    let mut kinds = vec![(Op::Forward, "forward")];
    match kind.splits_backward() {
        true => kinds.extend([
            (Op::BackwardInput, "input"),
            (Op::BackwardWeight, "weights"),
        ]),
        false if kind.has_backward() => kinds.push((Op::Backward, "backward")),
        false => {}
    }
    let mut x = LEFT;
    for (op, name) in kinds {
        for chunk in 0..schedule.stages.num_chunks.min(4) {
            put_rect(svg, x, y, 14.0, colour(op, chunk));
            x += 16.0;
        }
        put_text(
            svg,
            "start",
            x + 4.0,
            y + HEIGHT / 2.0 + 4.0,
            "#3c4048",
            name,
        );
        x += 80.0;
    }
    if schedule.stages.num_chunks > 1 {
        let last = chunk_name(schedule.stages.num_chunks - 1);
        let text = format!("chunks a to {last}");
        put_text(svg, "start", x, y + HEIGHT / 2.0 + 4.0, "#3c4048", &text);
    }
}

fn put_rect(svg: &mut String, x: f64, y: f64, width: f64, fill: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{HEIGHT}\" fill=\"{fill}\" \
         stroke=\"#ffffff\" stroke-width=\"0.5\"/>"
    );
}

fn put_text(svg: &mut String, anchor: &str, x: f64, y: f64, fill: &str, text: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"{x:.2}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{fill}\">{text}</text>"
    );
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{
        config::ScheduleConfig,
        kind::ScheduleKind,
        simulate::{Costs, Links},
    };

    #[rstest]
    #[case(ScheduleKind::OneForwardOneBackward, 4, 8)]
    #[case(ScheduleKind::Interleaved, 8, 24)]
    #[case(ScheduleKind::ZbV, 1, 1)]
    #[case(ScheduleKind::ForwardOnly, 2, 3)]
    fn every_pass_is_a_box(
        #[case] kind: ScheduleKind,
        #[case] num_ranks: usize,
        #[case] num_micro_batches: usize,
    ) {
        let schedule = ScheduleConfig::new(kind, num_ranks, num_micro_batches)
            .build()
            .unwrap();
        let timing = schedule
            .simulate(&vec![Costs::UNIT; num_ranks], Links::PrePosted)
            .unwrap();
        let picture = svg(&schedule, &timing);
        let passes: usize = timing.ranks.iter().map(Vec::len).sum();
        let legend = match (kind.splits_backward(), kind.has_backward()) {
            (true, _) => 3,
            (_, true) => 2,
            _ => 1,
        } * schedule.stages.num_chunks;
        // The other boxes are the background and one row per rank.
        assert_eq!(
            picture.matches("<rect ").count(),
            passes + legend + 1 + num_ranks
        );
        assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
        assert!(!picture.contains("NaN") && !picture.contains("inf"));
        assert!(picture.contains(&format!("{kind}: {num_ranks} ranks")));
    }

    #[test]
    fn passes_that_take_nanoseconds_fit_too() {
        let schedule = ScheduleConfig::new(ScheduleKind::ZbH1, 2, 3)
            .build()
            .unwrap();
        let costs = Costs {
            forward: 4_000_000,
            backward_input: 5_000_000,
            ..Costs::UNIT
        };
        let timing = schedule.simulate(&[costs; 2], Links::PrePosted).unwrap();
        let picture = svg(&schedule, &timing);
        assert!(
            picture.contains("width=\"1688\"") && picture.contains(">F2</text>"),
            "{picture}"
        );
    }
}
