//! A plot of several series of points, such as the losses of the runs of a sweep.

use plotters::prelude::*;

use super::{Chart, Drawn, INK, SIZE, font, label};
use crate::error::ReportError;

const COLOURS: [RGBColor; 8] = [
    RGBColor(37, 99, 175),
    RGBColor(214, 93, 14),
    RGBColor(15, 138, 114),
    RGBColor(123, 94, 167),
    RGBColor(181, 162, 60),
    RGBColor(192, 57, 43),
    RGBColor(90, 120, 140),
    RGBColor(60, 64, 72),
];
/// Entries that a legend has at most.
const MOST_NAMES: usize = 16;

/// Points with a name. Points that are not finite are left out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Its points, in the order in which a line connects them.
    pub points: Vec<(f64, f64)>,
    /// Whether it is the law of the series before it: a thin line in the same colour, without marks
    /// and without an entry in the legend.
    pub is_law: bool,
}

/// What a plot of series shows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SeriesPlot {
    /// The line above it.
    pub title: String,
    /// What is on the horizontal axis, and whether its scale is logarithmic.
    pub x: (String, bool),
    /// What is on the vertical axis.
    pub y: String,
    /// The series.
    pub series: Vec<Series>,
}

/// Plots series as SVG text: marks, connected by lines. Without points it is an empty frame.
///
/// # Errors
/// The plotting library fails.
pub fn series_plot(plot: &SeriesPlot) -> Result<String, ReportError> {
    let mut svg = String::new();
    let backend = SVGBackend::with_string(&mut svg, SIZE);
    draw(plot, backend).map_err(|error| ReportError::Plot {
        why: error.to_string(),
    })?;
    Ok(svg)
}

fn draw(plot: &SeriesPlot, backend: SVGBackend<'_>) -> Drawn<()> {
    let is_log = plot.x.1;
    let drawn: Vec<(&Series, Vec<(f64, f64)>)> = plot
        .series
        .iter()
        .map(|series| (series, placed(series, is_log)))
        .collect();
    let points = || drawn.iter().flat_map(|(_, points)| points.iter().copied());
    let x = range(points().map(|point| point.0));
    let y = range(points().map(|point| point.1));
    let canvas = backend.into_drawing_area();
    canvas.fill(&WHITE)?;
    let mut chart: Chart<'_, '_> = ChartBuilder::on(&canvas)
        .caption(&plot.title, font(20))
        .margin(16)
        .margin_right(28)
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(x.0..x.1, y.0..y.1)?;
    let label_of = |place: &f64| match is_log {
        true => short(place.exp()),
        false => short(*place),
    };
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(INK.mix(0.12))
        .axis_style(INK.mix(0.6))
        .label_style(font(14))
        .axis_desc_style(font(16))
        .x_desc(plot.x.0.as_str())
        .y_desc(plot.y.as_str())
        .x_labels(8)
        .x_label_formatter(&label_of)
        .y_labels(8)
        .draw()?;
    let mut number: usize = 0;
    for (series, points) in &drawn {
        if series.is_law {
            let colour = COLOURS[number.saturating_sub(1) % COLOURS.len()];
            chart.draw_series(LineSeries::new(points.clone(), colour.mix(0.8)))?;
            continue;
        }
        let colour = COLOURS[number % COLOURS.len()];
        number += 1;
        let style = colour.mix(0.7).stroke_width(2);
        chart.draw_series(LineSeries::new(points.clone(), style))?;
        let marks = points.iter().map(|at| Circle::new(*at, 4, colour.filled()));
        chart.draw_series(marks)?;
        if number <= MOST_NAMES && !series.name.is_empty() && !points.is_empty() {
            label(&mut chart, &series.name, move |(x, y)| {
                PathElement::new([(x, y), (x + 18, y)], style)
            })?;
        }
    }
    let has_name = |series: &Series| !series.is_law && !series.name.is_empty();
    if drawn
        .iter()
        .any(|(series, points)| has_name(series) && !points.is_empty())
    {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .label_font(font(14))
            .background_style(WHITE.mix(0.85))
            .margin(12)
            .draw()?;
    }
    canvas.present()?;
    Ok(())
}

/// The points where they are drawn.
fn placed(series: &Series, is_log: bool) -> Vec<(f64, f64)> {
    let place = |(x, y): &(f64, f64)| (if is_log { x.ln() } else { *x }, *y);
    let points = series.points.iter().map(place);
    points
        .filter(|(x, y)| x.is_finite() && y.is_finite())
        .collect()
}

/// A range around values, with some space on both sides.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let ends = values.fold(
        (f64::INFINITY, f64::NEG_INFINITY),
        |(least, most), value| (least.min(value), most.max(value)),
    );
    match ends {
        (least, most) if least > most => (0.0, 1.0),
        (least, most) => {
            let space = ((most - least) * 0.06).max(most.abs().max(1e-3) * 0.01);
            (least - space, most + space)
        }
    }
}

/// A number with three digits, or with an exponent.
fn short(number: f64) -> String {
    let digits = match number.abs() {
        0.0 => return "0".into(),
        size if !(0.01..100_000.0).contains(&size) => return format!("{number:.2e}"),
        size => (2.0 - size.log10().floor()).max(0.0) as usize,
    };
    let text = format!("{number:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(&[], 0)]
    #[case(&[(1.0, 2.0)], 1)]
    #[case(&[(1e-4, 2.0), (1e-3, 1.5), (f64::NAN, 1.0), (1e-2, f64::INFINITY)], 2)]
    fn any_points_can_be_drawn(#[case] points: &[(f64, f64)], #[case] marks: usize) {
        for is_log in [false, true] {
            let plot = SeriesPlot {
                title: "a <title>".into(),
                x: ("lr".into(), is_log),
                y: "loss".into(),
                series: vec![
                    Series {
                        name: "layers=2".into(),
                        points: points.to_vec(),
                        is_law: false,
                    },
                    Series {
                        name: "law".into(),
                        points: points.to_vec(),
                        is_law: true,
                    },
                ],
            };
            let svg = series_plot(&plot).unwrap();
            assert_eq!(svg.matches("<circle").count(), marks, "{svg}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            assert!(svg.contains("a &lt;title&gt;") && svg.contains("loss"));
            assert_eq!(svg.contains("layers=2"), marks > 0);
        }
    }

    #[test]
    fn labels_are_short() {
        let labels = [0.0, 0.5, 3.0, 492.749, 1000.0, 1e-4, 2.5e9].map(short);
        let expected = ["0", "0.5", "3", "493", "1000", "1.00e-4", "2.50e9"];
        assert_eq!(labels, expected);
    }
}
