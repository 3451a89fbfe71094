//! The law that is fitted to the runs of a sweep.

use megaburn_report::scaling_law::{ScalingFit, ScalingPoint, fit};

use super::outcome::Outcome;

/// A law with the numbers of the runs that it was fitted to, or why there is none.
pub(super) type Law = Result<(ScalingFit, Vec<usize>), String>;

/// The law of the finished runs.
pub(super) fn law_of(outcomes: &[Outcome]) -> Law {
    let mut points = Vec::new();
    let mut of = Vec::new();
    for (number, outcome) in outcomes.iter().enumerate() {
        let sizes = outcome.parameters.zip(outcome.tokens);
        if let (true, Some((parameters, tokens)), Some(loss)) =
            (outcome.is_finished(), sizes, outcome.metric)
        {
            points.push(ScalingPoint {
                parameters: parameters as f64,
                tokens: tokens as f64,
                loss,
            });
            of.push(number);
        }
    }
    fit(&points).map(|law| (law, of))
}
