//! The runs of a sweep as a picture: their losses over a setting, or over tokens with a law.

use std::collections::{BTreeMap, BTreeSet};

use megaburn_report::{ReportError, Series, SeriesPlot, series_plot};

use super::{file::Sweep, law::Law, outcome::Outcome};

/// Points of the line of a law.
const LAW_POINTS: usize = 48;
/// An axis whose ends differ by this factor has a logarithmic scale.
const WIDE: f64 = 10.0;

/// Draws the finished runs.
///
/// # Errors
/// The plotting library fails.
pub(super) fn draw(
    sweep: &Sweep,
    outcomes: &[Outcome],
    law: Option<&Law>,
) -> Result<String, ReportError> {
    let finished: Vec<&Outcome> = outcomes
        .iter()
        .filter(|outcome| outcome.is_finished() && outcome.metric.is_some())
        .collect();
    let title = sweep.dir.file_name().unwrap_or_default();
    let mut title = format!("{}: {} runs", title.to_string_lossy(), finished.len());
    if let Some(Ok(_)) = law {
        title += " (thin lines: the law)";
    }
    let (x, series) = match law {
        Some(law) => (("tokens".to_string(), true), over_tokens(&finished, law)),
        None => over_a_setting(sweep, &finished),
    };
    series_plot(&SeriesPlot {
        title,
        x,
        y: "loss (nats per token)".into(),
        series,
    })
}

/// A series of each model size, and the line of the law for it.
fn over_tokens(finished: &[&Outcome], law: &Law) -> Vec<Series> {
    let mut sizes: BTreeMap<u64, Vec<(f64, f64)>> = BTreeMap::new();
    for outcome in finished {
        if let (Some(parameters), Some(tokens), Some(loss)) =
            (outcome.parameters, outcome.tokens, outcome.metric)
        {
            let points = sizes.entry(parameters).or_default();
            points.push((tokens as f64, loss));
        }
    }
    let all = sizes.values().flatten().map(|point| point.0);
    let least = all.clone().fold(f64::INFINITY, f64::min);
    let most = all.fold(0.0, f64::max);
    let mut series = Vec::new();
    for (parameters, mut points) in sizes {
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        series.push(Series {
            name: format!("{parameters} parameters"),
            points,
            is_law: false,
        });
        if let Ok((fit, _)) = law {
            let at = |number: usize| {
                let share = number as f64 / (LAW_POINTS - 1) as f64;
                let tokens = least * (most / least).powf(share);
                (tokens, fit.law.loss(parameters as f64, tokens))
            };
            series.push(Series {
                name: String::new(),
                points: (0..LAW_POINTS).map(at).collect(),
                is_law: true,
            });
        }
    }
    series
}

/// The losses over the key with the most different numbers, a series for each combination of the
/// other settings; over the numbers of the runs if there is no such key.
fn over_a_setting(sweep: &Sweep, finished: &[&Outcome]) -> ((String, bool), Vec<Series>) {
    let number = |outcome: &Outcome, key: &String| outcome.settings.get(key)?.as_f64();
    let different = |key: &String| -> Option<usize> {
        let values: Option<Vec<f64>> = finished.iter().map(|run| number(run, key)).collect();
        let values: BTreeSet<u64> = values?.into_iter().map(f64::to_bits).collect();
        Some(values.len()).filter(|count| *count > 1)
    };
    // Of equals, the first key is taken.
    let keys = sweep.keys.iter().rev();
    let counted = keys.filter_map(|key| Some((different(key)?, key)));
    let Some((_, key)) = counted.max_by_key(|(count, _)| *count) else {
        let point = |(number, run): (usize, &&Outcome)| Some((number as f64 + 1.0, run.metric?));
        let points = finished.iter().enumerate().filter_map(point).collect();
        let series = Series {
            name: String::new(),
            points,
            is_law: false,
        };
        return (("run".into(), false), vec![series]);
    };
    let mut groups: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for run in finished {
        let others = run.settings.iter().filter(|(other, _)| *other != key);
        let others = others.map(|(other, value)| format!("{other}={value}"));
        let name = others.collect::<Vec<_>>().join(" ");
        if let (Some(x), Some(y)) = (number(run, key), run.metric) {
            groups.entry(name).or_default().push((x, y));
        }
    }
    let values = || groups.values().flatten().map(|point| point.0);
    let least = values().fold(f64::INFINITY, f64::min);
    let most = values().fold(0.0, f64::max);
    let series = groups.into_iter().map(|(name, mut points)| {
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        Series {
            name,
            points,
            is_law: false,
        }
    });
    let series = series.collect();
    ((key.clone(), least > 0.0 && most / least >= WIDE), series)
}
