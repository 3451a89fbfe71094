//! The plots of a run's loss and of the lengths of documents.

mod curve;
mod lengths;
mod series;

pub use lengths::length_plot;
pub use series::{Series, SeriesPlot, series_plot};

use std::error::Error;

use plotters::{
    coord::types::RangedCoordf64,
    element::IntoDynElement,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::{error::ReportError, metrics::MetricsRecord};
use curve::{Curve, Frame};

const SIZE: (u32, u32) = (960, 540);
const INK: RGBColor = RGBColor(60, 64, 72);
const TRAIN: RGBColor = RGBColor(37, 99, 175);
const VALIDATION: RGBColor = RGBColor(214, 93, 14);

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type Drawn<T> = Result<T, Box<dyn Error>>;

/// Plots the loss of a run as SVG text: a thin line for the steps, a bold line for their running
/// mean, and points for evaluations. Non-finite losses are gaps. A run without any loss gives an
/// empty frame with a note.
///
/// # Errors
/// The plotting library fails.
pub fn loss_plot(title: &str, records: &[MetricsRecord]) -> Result<String, ReportError> {
    let mut svg = String::new();
    draw(title, records, SVGBackend::with_string(&mut svg, SIZE)).map_err(|error| {
        ReportError::Plot {
            why: error.to_string(),
        }
    })?;
    Ok(svg)
}

fn draw(title: &str, records: &[MetricsRecord], backend: SVGBackend<'_>) -> Drawn<()> {
    let (train, validation) = Curve::of(records);
    let Frame { steps, losses } = Frame::around(&[&train, &validation]);
    let canvas = backend.into_drawing_area();
    canvas.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&canvas)
        .caption(title, font(20))
        .margin(16)
        .margin_right(28)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(steps.0..steps.1, losses.0..losses.1)?;
    axes(&mut chart)?;
    draw_train(&mut chart, &train)?;
    draw_validation(&mut chart, &validation)?;
    if train.is_empty() && validation.is_empty() {
        let middle = ((steps.0 + steps.1) / 2.0, (losses.0 + losses.1) / 2.0);
        let centred = font(18).pos(Pos::new(HPos::Center, VPos::Center));
        chart.draw_series([Text::new("no finite loss was recorded", middle, centred)])?;
    } else {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .label_font(font(15))
            .margin(12)
            .draw()?;
    }
    canvas.present()?;
    Ok(())
}

/// The font of a text of this size.
fn font(size: u32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK)
}

fn axes(chart: &mut Chart<'_, '_>) -> Drawn<()> {
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(INK.mix(0.12))
        .axis_style(INK.mix(0.6))
        .label_style(font(14))
        .axis_desc_style(font(16))
        .x_desc("step")
        .y_desc("loss (nats per token)")
        .x_labels(8)
        .x_label_formatter(&whole)
        .y_labels(8)
        .draw()?;
    Ok(())
}

/// Labels integers only, because there are no steps between two steps.
fn whole(step: &f64) -> String {
    if step.fract() == 0.0 {
        step.to_string()
    } else {
        String::new()
    }
}

fn draw_train<'a, 'b: 'a>(chart: &mut Chart<'a, 'b>, curve: &Curve) -> Drawn<()> {
    for piece in curve.pieces() {
        chart.draw_series(LineSeries::new(piece.to_vec(), TRAIN.mix(0.35)))?;
        // A line through one point would be invisible.
        if let [point] = piece {
            chart.draw_series([Circle::new(*point, 3, TRAIN.filled())])?;
        }
    }
    for piece in curve.smooth().pieces() {
        chart.draw_series(LineSeries::new(piece.to_vec(), TRAIN.stroke_width(2)))?;
    }
    if !curve.is_empty() {
        label(chart, "training", |(x, y)| {
            PathElement::new([(x, y), (x + 18, y)], TRAIN.stroke_width(2))
        })?;
    }
    Ok(())
}

fn draw_validation<'a, 'b: 'a>(chart: &mut Chart<'a, 'b>, curve: &Curve) -> Drawn<()> {
    for piece in curve.pieces() {
        chart.draw_series(LineSeries::new(piece.to_vec(), VALIDATION.mix(0.6)))?;
        chart.draw_series(
            piece
                .iter()
                .map(|point| Circle::new(*point, 4, VALIDATION.filled())),
        )?;
    }
    if !curve.is_empty() {
        label(chart, "validation", |(x, y)| {
            Circle::new((x + 9, y), 4, VALIDATION.filled())
        })?;
    }
    Ok(())
}

/// Adds an entry to the legend. Curves consist of pieces, so the entry belongs to an empty series.
fn label<'a, 'b: 'a, E>(
    chart: &mut Chart<'a, 'b>,
    text: &str,
    symbol: impl Fn((i32, i32)) -> E + 'a,
) -> Drawn<()>
where
    E: IntoDynElement<'a, SVGBackend<'b>, (i32, i32)> + 'a,
{
    chart
        .draw_series(LineSeries::new([], TRANSPARENT))?
        .label(text)
        .legend(symbol);
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::metrics::{example_eval, example_step};

    fn run(losses: &[f64], evaluations: &[f64]) -> Vec<MetricsRecord> {
        let steps = (1..)
            .zip(losses)
            .map(|(step, loss)| example_step(step, *loss).into());
        let evals = (1..)
            .zip(evaluations)
            .map(|(step, loss)| example_eval(10 * step, *loss).into());
        steps.chain(evals).collect()
    }

    // Returns the training lines, the points, and whether the plot says that it is empty.
    fn counts(svg: &str) -> (usize, usize, bool) {
        let of = |tag| svg.matches(tag).count();
        (
            of("<polyline"),
            of("<circle"),
            svg.contains("no finite loss was recorded"),
        )
    }

    #[rstest]
    #[case(&[], &[], 0, true)]
    #[case(&[f64::NAN, f64::INFINITY], &[f64::NAN], 0, true)]
    #[case(&[5.0], &[], 1, false)]
    #[case(&[], &[5.0], 2, false)]
    #[case(&[5.0, f64::NAN, 4.0, 3.0], &[3.5, f64::NAN, 3.0], 4, false)]
    #[case(&[1e300, -1e300, f64::MAX], &[], 0, false)]
    fn any_run_can_be_drawn(
        #[case] losses: &[f64],
        #[case] evaluations: &[f64],
        #[case] num_circles: usize,
        #[case] empty: bool,
    ) {
        let svg = loss_plot("a title", &run(losses, evaluations)).unwrap();
        let (_, circles, says_empty) = counts(&svg);
        assert_eq!((circles, says_empty), (num_circles, empty));
        assert!(svg.trim_end().ends_with("</svg>") && !svg.contains("NaN") && !svg.contains("inf"));
        for text in ["a title", "step", "loss (nats per token)"] {
            assert!(svg.contains(text), "{text}");
        }
    }

    #[test]
    fn the_legend_names_what_is_drawn() {
        let svg = loss_plot("", &run(&[5.0, 4.0], &[4.5])).unwrap();
        assert!(svg.contains("training") && svg.contains("validation"));
        let svg = loss_plot("", &run(&[5.0, 4.0], &[])).unwrap();
        assert!(svg.contains("training") && !svg.contains("validation"));
    }

    #[test]
    fn a_title_cannot_break_the_file() {
        let svg = loss_plot("<b> & \"q\"", &run(&[5.0, 4.0], &[])).unwrap();
        assert!(svg.contains("&lt;b&gt; &amp;"), "{svg}");
    }
}
