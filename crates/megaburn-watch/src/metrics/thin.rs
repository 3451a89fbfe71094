//! Fewer points that look the same.

use serde::Serialize;

/// A measurement: a step, the tokens and seconds of training up to its end, and the value. A number
/// that is not finite is written as null.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) step: u64,
    pub(super) tokens: f64,
    pub(super) seconds: f64,
    pub(super) value: f64,
}

/// The points of a measurement, column by column.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Series {
    step: Vec<u64>,
    tokens: Vec<f64>,
    seconds: Vec<f64>,
    value: Vec<f64>,
    /// For each point of a series that is thinned out, the mean of the group that it is of.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mean: Vec<f64>,
}

impl Series {
    fn push(&mut self, point: &Point) {
        self.step.push(point.step);
        self.tokens.push(point.tokens);
        // To the millisecond.
        self.seconds.push((point.seconds * 1e3).round() / 1e3);
        self.value.push(point.value);
    }
}

/// Thins points out to about `most`: of each of `most / 4` equal groups the first, the smallest,
/// the largest and the last stay, so that no extreme is lost. The first that is not finite stays
/// too.
pub(super) fn thin(points: &[Point], most: usize) -> Series {
    let mut series = Series::default();
    if points.len() <= most {
        points.iter().for_each(|point| series.push(point));
        return series;
    }
    let group = points.len().div_ceil((most / 4).max(1));
    for group in points.chunks(group) {
        let finite = group
            .iter()
            .map(|point| point.value)
            .filter(|value| value.is_finite());
        let (sum, count) =
            finite.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
        for at in kept(group) {
            series.push(&group[at]);
            series.mean.push(sum / count);
        }
    }
    series
}

/// The places of the points of a group that stay, in order.
fn kept(points: &[Point]) -> Vec<usize> {
    let mut kept = vec![0, points.len() - 1];
    let finite = |at: &usize| points[*at].value.is_finite();
    let by_value = |a: &usize, b: &usize| points[*a].value.total_cmp(&points[*b].value);
    kept.extend((0..points.len()).filter(finite).min_by(by_value));
    kept.extend((0..points.len()).filter(finite).max_by(by_value));
    kept.extend(points.iter().position(|point| !point.value.is_finite()));
    kept.sort_unstable();
    kept.dedup();
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(step: u64, value: f64) -> Point {
        Point {
            step,
            tokens: step as f64,
            seconds: 0.25 * step as f64,
            value,
        }
    }

    #[test]
    fn few_points_stay_as_they_are() {
        let points: Vec<_> = (1..=8).map(|step| point(step, 1.0)).collect();
        assert_eq!(thin(&points, 8).step, [1, 2, 3, 4, 5, 6, 7, 8]);
    }

    #[test]
    fn of_many_points_the_extremes_stay() {
        let value = |step: u64| match step {
            777 => 50.0,
            5555 => -50.0,
            8000 => f64::NAN,
            step => (step as f64).sin(),
        };
        let points: Vec<_> = (1..=10_000).map(|step| point(step, value(step))).collect();
        let series = thin(&points, 400);
        assert!(
            (200..=501).contains(&series.step.len()),
            "{}",
            series.step.len()
        );
        assert!(series.step.is_sorted());
        for step in [1, 777, 5555, 8000, 10_000] {
            assert!(series.step.contains(&step), "{step}");
        }
        assert_eq!(series.mean.len(), series.step.len());
        assert!(
            (series.mean[0] - 0.0).abs() < 0.2,
            "the mean of a hundred sines"
        );
        let text = serde_json::to_string(&series).unwrap();
        assert!(text.contains("50.0") && text.contains("null"));
    }
}
