//! The plot of the lengths of documents.

use plotters::prelude::*;

use super::{Drawn, INK, SIZE, TRAIN, font};
use crate::{console::human_number, error::ReportError};

/// Plots numbers of documents by length as SVG text: a bar per range `(first, last, count)` of
/// lengths in tokens, on a logarithmic axis. The bounds of ranges are powers of two.
///
/// # Errors
/// The plotting library fails.
pub fn length_plot(title: &str, ranges: &[(u64, u64, u64)]) -> Result<String, ReportError> {
    let mut svg = String::new();
    draw(title, ranges, SVGBackend::with_string(&mut svg, SIZE)).map_err(|error| {
        ReportError::LengthPlot {
            why: error.to_string(),
        }
    })?;
    Ok(svg)
}

fn draw(title: &str, ranges: &[(u64, u64, u64)], backend: SVGBackend<'_>) -> Drawn<()> {
    let canvas = backend.into_drawing_area();
    canvas.fill(&WHITE)?;
    let place = |range: Option<&(u64, u64, u64)>| range.map_or(0.0, |(_, last, _)| end(*last));
    let (first, last) = (place(ranges.first()), place(ranges.last()));
    let most = ranges.iter().map(|(_, _, count)| *count).max().unwrap_or(0);
    let mut chart = ChartBuilder::on(&canvas)
        .caption(title, font(20))
        .margin(16)
        .margin_right(28)
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(first - 1.0..last.max(first), 0.0..most.max(1) as f64 * 1.05)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(INK.mix(0.12))
        .axis_style(INK.mix(0.6))
        .label_style(font(14))
        .axis_desc_style(font(16))
        .x_desc("tokens per document")
        .y_desc("documents")
        .x_labels(ranges.len().clamp(2, 24) + 1)
        .x_label_formatter(&bound)
        .y_labels(8)
        .y_label_formatter(&count)
        .draw()?;
    chart.draw_series(ranges.iter().map(|range| bar(*range)))?;
    canvas.present()?;
    Ok(())
}

type Bar = Rectangle<(f64, f64)>;

fn bar((_, last, count): (u64, u64, u64)) -> Bar {
    let right = end(last);
    let corners = [(right - 0.94, 0.0), (right - 0.06, count as f64)];
    Rectangle::new(corners, TRAIN.mix(0.75).filled())
}

/// Where the range that ends with a length ends on the axis: the logarithm of the next length.
fn end(last: u64) -> f64 {
    (last as f64 + 1.0).log2()
}

/// Labels the bounds of ranges. Empty documents have the range before the one of one token.
fn bound(place: &f64) -> String {
    match *place {
        place if place.fract() != 0.0 => String::new(),
        place if place < 0.0 => "0".into(),
        place if place < 10.0 => place.exp2().to_string(),
        place => format!("{}k", (place - 10.0).exp2()),
    }
}

/// Labels numbers of documents; none between two of them.
fn count(documents: &f64) -> String {
    match *documents {
        count if count >= 1000.0 => human_number(count),
        count if count.fract() == 0.0 => count.to_string(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(&[])]
    #[case(&[(0, 0, 3)])]
    #[case(&[(1, 1, 1)])]
    #[case(&[(0, 0, 2), (1, 1, 0), (2, 3, 7), (4, 7, 1_000_000)])]
    #[case(&[(1 << 62, (1 << 63) - 1, 1), (1 << 63, u64::MAX, u64::MAX)])]
    fn any_lengths_can_be_drawn(#[case] ranges: &[(u64, u64, u64)]) {
        let svg = length_plot("<lengths>", ranges).unwrap();
        assert!(svg.trim_end().ends_with("</svg>") && !svg.contains("NaN") && !svg.contains("inf"));
        for text in ["&lt;lengths&gt;", "tokens per document", "documents"] {
            assert!(svg.contains(text), "{text}");
        }
        // The background is a rectangle too.
        let bars = svg.matches("<rect").count() - 1;
        assert_eq!(bars, ranges.len(), "{svg}");
    }

    #[test]
    fn labels_are_lengths_and_whole_documents() {
        assert_eq!(
            [0.0, 2.5, 20.0, 1500.0].map(|at| count(&at)),
            ["0", "", "20", "1.50k"]
        );
        assert_eq!(
            [-1.0, 0.0, 0.5, 3.0, 11.0].map(|at| bound(&at)),
            ["0", "1", "", "8", "2k"]
        );
    }
}
