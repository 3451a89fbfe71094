use crate::metrics::MetricsRecord;

/// More points than this are not visible in the plot and only make the file larger.
const MAX_POINTS: usize = 2000;

/// Losses over steps, as `(step, loss)`. A non-finite loss is NaN.
#[derive(Debug, Default)]
pub(super) struct Curve(Vec<(f64, f64)>);

impl Curve {
    /// The curves of the training loss and of the validation loss, which is that of the first data
    /// set that was evaluated.
    pub(super) fn of(records: &[MetricsRecord]) -> (Self, Self) {
        let mut train = Vec::new();
        let mut validation = Vec::new();
        let first = records.iter().find_map(|record| match record {
            MetricsRecord::Eval(metrics) => Some(&metrics.data),
            MetricsRecord::Step(_) => None,
        });
        for record in records {
            let (points, loss) = match record {
                MetricsRecord::Step(metrics) => (&mut train, metrics.loss),
                MetricsRecord::Eval(metrics) if Some(&metrics.data) != first => continue,
                MetricsRecord::Eval(metrics) => (&mut validation, metrics.eval_loss),
            };
            points.push((
                record.step() as f64,
                if loss.is_finite() { loss } else { f64::NAN },
            ));
        }
        (Self(thinned(&train)), Self(thinned(&validation)))
    }

    /// The contiguous pieces of finite losses.
    pub(super) fn pieces(&self) -> impl Iterator<Item = &[(f64, f64)]> {
        self.0
            .split(|(_, loss)| loss.is_nan())
            .filter(|piece| !piece.is_empty())
    }

    /// Whether there is no finite loss.
    pub(super) fn is_empty(&self) -> bool {
        self.pieces().next().is_none()
    }

    /// The running mean over a window around each point, at most a thirtieth of the curve. At the
    /// steep start the window shrinks on both sides equally, so that the mean does not lag behind
    /// the loss; at the flat end it is cut off on one side only, so that the last points are not
    /// noisy.
    pub(super) fn smooth(&self) -> Self {
        let count = self.0.len();
        let smoothed = self.0.iter().enumerate().map(|(index, &(step, loss))| {
            if loss.is_nan() {
                return (step, loss);
            }
            let reach = (count / 60).min(index);
            (
                step,
                mean(&self.0[index - reach..=(index + reach).min(count - 1)]),
            )
        });
        Self(smoothed.collect())
    }
}

/// The mean of the finite losses; NaN if there are none.
fn mean(points: &[(f64, f64)]) -> f64 {
    let finite = points
        .iter()
        .map(|(_, loss)| *loss)
        .filter(|loss| loss.is_finite());
    let (sum, count) = finite.fold((0.0, 0), |(sum, count), loss| (sum + loss, count + 1));
    sum / f64::from(count)
}

fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= MAX_POINTS {
        return points.to_vec();
    }
    let size = points.len().div_ceil(MAX_POINTS);
    points
        .chunks(size)
        .map(|chunk| (chunk[chunk.len() / 2].0, mean(chunk)))
        .collect()
}

/// The ranges of the axes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Frame {
    pub(super) steps: (f64, f64),
    pub(super) losses: (f64, f64),
}

impl Frame {
    /// The smallest frame around the curves, with a margin above and below. It is never empty.
    pub(super) fn around(curves: &[&Curve]) -> Self {
        let points = || curves.iter().flat_map(|curve| &curve.0);
        let last = points().map(|(step, _)| *step).fold(1.0, f64::max);
        let losses = || {
            points()
                .map(|(_, loss)| *loss)
                .filter(|loss| loss.is_finite())
        };
        let low = losses().fold(f64::INFINITY, f64::min);
        let high = losses().fold(f64::NEG_INFINITY, f64::max);
        if low > high {
            return Self {
                steps: (0.0, last),
                losses: (0.0, 1.0),
            };
        }
        // Halve first, because the difference of two huge losses would overflow.
        let air = ((high / 2.0 - low / 2.0) * 0.1).max(low.abs().max(1.0) * 0.02);
        Self {
            steps: (0.0, last),
            losses: (
                (low - air).max(f64::MIN / 4.0),
                (high + air).min(f64::MAX / 4.0),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(losses: &[f64]) -> Curve {
        Curve(
            losses
                .iter()
                .enumerate()
                .map(|(i, loss)| (i as f64 + 1.0, *loss))
                .collect(),
        )
    }

    #[test]
    fn a_loss_that_is_not_finite_is_a_gap() {
        let lengths = |losses: &[f64]| {
            curve(losses)
                .pieces()
                .map(<[(f64, f64)]>::len)
                .collect::<Vec<_>>()
        };
        let nan = f64::NAN;
        assert_eq!(lengths(&[]), [] as [usize; 0]);
        assert_eq!(lengths(&[nan, nan]), [] as [usize; 0]);
        assert_eq!(lengths(&[nan, 1.0, 2.0, nan, nan, 3.0]), [2, 1]);
    }

    #[test]
    fn smoothing_keeps_a_straight_line_and_calms_noise() {
        let line: Vec<f64> = (0..600).map(f64::from).collect();
        let smooth = curve(&line).smooth();
        let follows = |i: usize| (smooth.0[i].1 - line[i]).abs() < 1e-9;
        assert!((0..590).all(follows) && (590..600).all(|i| smooth.0[i].1 <= line[i]));
        let noise: Vec<f64> = (0..600).map(|i| f64::from(i % 2)).collect();
        let smooth = curve(&noise).smooth();
        assert!(
            smooth.0[20..]
                .iter()
                .all(|(_, mean)| (mean - 0.5).abs() < 0.05)
        );
        assert_eq!(smooth.0.len(), 600);
    }

    #[test]
    fn smoothing_steps_over_gaps() {
        let mut losses = vec![2.0; 300];
        losses[100] = f64::NAN;
        let smooth = curve(&losses).smooth();
        assert!(smooth.0[100].1.is_nan());
        assert!(
            smooth
                .0
                .iter()
                .enumerate()
                .all(|(i, (_, loss))| i == 100 || *loss == 2.0)
        );
    }

    #[test]
    fn a_long_run_is_thinned_to_means() {
        let losses: Vec<f64> = (0..10_001).map(|i| f64::from(i % 2)).collect();
        let points = thinned(&curve(&losses).0);
        assert!(points.len() <= MAX_POINTS && points.len() > MAX_POINTS / 2);
        assert!(
            points[..points.len() - 1]
                .iter()
                .all(|(_, loss)| (loss - 0.5).abs() < 0.1)
        );
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }

    #[test]
    fn a_frame_always_has_an_extent() {
        for losses in [
            &[][..],
            &[f64::NAN],
            &[3.0],
            &[0.0, 0.0],
            &[1e9],
            &[f64::MAX, f64::MIN],
        ] {
            let Frame {
                steps,
                losses: (low, high),
            } = Frame::around(&[&curve(losses)]);
            assert!(
                steps.0 < steps.1 && low < high && (high - low).is_finite(),
                "{losses:?}"
            );
        }
    }

    #[test]
    fn a_frame_holds_every_curve() {
        let frame = Frame::around(&[&curve(&[5.0, f64::NAN, 4.0]), &curve(&[3.0])]);
        assert_eq!(frame.steps, (0.0, 3.0));
        assert!(frame.losses.0 < 3.0 && frame.losses.0 > 2.7);
        assert!(frame.losses.1 > 5.0 && frame.losses.1 < 5.3);
    }
}
