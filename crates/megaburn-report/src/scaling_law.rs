//! The law by which the loss falls with parameters and tokens: `L(N, D) = E + A / N^a + B / D^b`.
//!
//! Source: Hoffmann et al. 2022 (arXiv 2203.15556), section 3.3 and appendix D.2: the Huber loss
//! with `delta = 1e-3` of the difference of logarithms, from a grid of starts. They minimise it by
//! L-BFGS; here it is the Levenberg-Marquardt method with the weights of the Huber loss, which
//! needs no line search in five dimensions.

use std::fmt;

use serde::Serialize;

/// The fewest runs from which a law is fitted: it has five numbers.
pub const LEAST_RUNS: usize = 6;

/// Where the Huber loss turns from a square into a line, as in the paper.
const DELTA: f64 = 1e-3;
/// Starts that are refined: those of the grid with the smallest sum of squares.
const BEST_STARTS: usize = 24;
const MOST_STEPS: usize = 200;

/// A run: its size, what it read, and its loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ScalingPoint {
    /// The number of parameters.
    pub parameters: f64,
    /// The number of tokens that it trained on.
    pub tokens: f64,
    /// Its loss at the end, in nats per token.
    pub loss: f64,
}

/// The numbers of the law.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ScalingLaw {
    /// The loss that no model of this kind falls below.
    pub e: f64,
    /// The factor of the parameters.
    pub a: f64,
    /// The factor of the tokens.
    pub b: f64,
    /// The exponent of the parameters.
    pub alpha: f64,
    /// The exponent of the tokens.
    pub beta: f64,
}

/// A law that was fitted, and how far it is from the runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScalingFit {
    /// The law.
    pub law: ScalingLaw,
    /// For each run, the logarithm of its loss minus that of the law's loss.
    pub residuals: Vec<f64>,
    /// The sum of the Huber losses of the residuals.
    pub huber_loss: f64,
}

impl ScalingLaw {
    /// The loss of a model with this number of parameters after this number of tokens.
    pub fn loss(&self, parameters: f64, tokens: f64) -> f64 {
        self.e + self.a / parameters.powf(self.alpha) + self.b / tokens.powf(self.beta)
    }

    /// The parameters and tokens with the smallest loss for `flops` FLOPs of training, which are
    /// six for each parameter and token.
    pub fn best_for(&self, flops: f64) -> [f64; 2] {
        // Equation 4 of the paper.
        let sum = self.alpha + self.beta;
        let ratio = (self.alpha * self.a) / (self.beta * self.b);
        let parameters = ratio.powf(1.0 / sum) * (flops / 6.0).powf(self.beta / sum);
        [parameters, flops / 6.0 / parameters]
    }
}

impl fmt::Display for ScalingLaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            e,
            a,
            b,
            alpha,
            beta,
        } = self;
        write!(
            f,
            "L(N, D) = {e:.4} + {a:.4} / N^{alpha:.4} + {b:.4} / D^{beta:.4}"
        )
    }
}

/// Fits the law to runs.
///
/// # Errors
/// There are too few runs, they do not differ in both sizes, or a number is not positive.
pub fn fit(points: &[ScalingPoint]) -> Result<ScalingFit, String> {
    if points.len() < LEAST_RUNS {
        return Err(format!(
            "a scaling law needs {LEAST_RUNS} finished runs at least, and there are {}",
            points.len()
        ));
    }
    let is_positive = |x: f64| x.is_finite() && x > 0.0;
    if let Some(bad) = points.iter().find(|p| {
        ![p.parameters, p.tokens, p.loss]
            .into_iter()
            .all(is_positive)
    }) {
        return Err(format!("a scaling law needs positive numbers, not {bad:?}"));
    }
    for (what, of) in [
        ("parameters", (|p| p.parameters) as fn(&ScalingPoint) -> f64),
        ("tokens", |p| p.tokens),
    ] {
        if points.iter().all(|point| of(point) == of(&points[0])) {
            return Err(format!(
                "all runs have the same number of {what}: a scaling law needs at least two"
            ));
        }
    }
    let logs: Vec<[f64; 3]> = points
        .iter()
        .map(|p| [p.parameters.ln(), p.tokens.ln(), p.loss.ln()])
        .collect();
    let mut starts = grid();
    let rank = |theta: &Theta| objective(theta, &logs, f64::INFINITY);
    starts.sort_by(|one, other| rank(one).total_cmp(&rank(other)));
    let refined = starts.iter().take(BEST_STARTS).map(|start| {
        let near = minimise(*start, &logs, f64::INFINITY);
        minimise(near, &logs, DELTA)
    });
    let best = refined.min_by(|one, other| {
        objective(one, &logs, DELTA).total_cmp(&objective(other, &logs, DELTA))
    });
    let theta = best.ok_or("there is no start")?;
    let [a, b, e, alpha, beta] = theta;
    Ok(ScalingFit {
        law: ScalingLaw {
            e: e.exp(),
            a: a.exp(),
            b: b.exp(),
            alpha,
            beta,
        },
        residuals: logs.iter().map(|log| residual(&theta, log)).collect(),
        huber_loss: objective(&theta, &logs, DELTA),
    })
}

/// `ln A`, `ln B`, `ln E`, `alpha` and `beta`.
type Theta = [f64; 5];

/// The starts of the paper.
fn grid() -> Vec<Theta> {
    let mut starts = Vec::new();
    for alpha in [0.0, 0.5, 1.0, 1.5, 2.0] {
        for beta in [0.0, 0.5, 1.0, 1.5, 2.0] {
            for e in [-1.0, -0.5, 0.0, 0.5, 1.0] {
                for a in [0.0, 5.0, 10.0, 15.0, 20.0, 25.0] {
                    for b in [0.0, 5.0, 10.0, 15.0, 20.0, 25.0] {
                        starts.push([a, b, e, alpha, beta]);
                    }
                }
            }
        }
    }
    starts
}

/// The logarithms of the three terms, and the logarithm of their sum.
fn terms([a, b, e, alpha, beta]: &Theta, [n, d, _]: &[f64; 3]) -> ([f64; 3], f64) {
    let terms = [a - alpha * n, b - beta * d, *e];
    let most = terms.into_iter().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = terms.iter().map(|term| (term - most).exp()).sum();
    (terms, most + sum.ln())
}

fn residual(theta: &Theta, log: &[f64; 3]) -> f64 {
    log[2] - terms(theta, log).1
}

/// The sum of the Huber losses; of half the squares with an infinite `delta`.
fn objective(theta: &Theta, logs: &[[f64; 3]], delta: f64) -> f64 {
    let loss = |log| {
        let r = residual(theta, log).abs();
        if r <= delta {
            r * r / 2.0
        } else {
            delta * (r - delta / 2.0)
        }
    };
    let sum: f64 = logs.iter().map(loss).sum();
    if sum.is_nan() { f64::INFINITY } else { sum }
}

/// The Levenberg-Marquardt method: steps of Gauss and Newton that are damped until they help.
fn minimise(mut theta: Theta, logs: &[[f64; 3]], delta: f64) -> Theta {
    let mut damping = 1e-3;
    let mut now = objective(&theta, logs, delta);
    for _ in 0..MOST_STEPS {
        let (mut normal, mut slope) = ([[0.0; 5]; 5], [0.0; 5]);
        for log in logs {
            let ([ta, tb, te], sum) = terms(&theta, log);
            let r = log[2] - sum;
            let weight = if r.abs() <= delta {
                1.0
            } else {
                delta / r.abs()
            };
            let [pa, pb, pe] = [ta, tb, te].map(|term| (term - sum).exp());
            // The derivatives of the predicted logarithm.
            let row = [pa, pb, pe, -log[0] * pa, -log[1] * pb];
            for i in 0..5 {
                slope[i] += weight * row[i] * r;
                for j in 0..5 {
                    normal[i][j] += weight * row[i] * row[j];
                }
            }
        }
        let mut damped = normal;
        for i in 0..5 {
            damped[i][i] += damping * normal[i][i].max(1e-12);
        }
        let step = solve(damped, slope);
        let next = std::array::from_fn(|i| theta[i] + step[i]);
        let then = objective(&next, logs, delta);
        if then < now {
            let gain = (now - then) / now.max(f64::MIN_POSITIVE);
            (theta, now) = (next, then);
            damping = (damping / 5.0).max(1e-12);
            if gain < 1e-14 {
                break;
            }
        } else {
            damping *= 8.0;
            if damping > 1e12 {
                break;
            }
        }
    }
    theta
}

/// Solves a positive definite system by elimination; zero where it is singular.
fn solve(mut matrix: [[f64; 5]; 5], mut right: [f64; 5]) -> [f64; 5] {
    for pivot in 0..5 {
        let best = (pivot..5).max_by(|one, other| {
            matrix[*one][pivot]
                .abs()
                .total_cmp(&matrix[*other][pivot].abs())
        });
        let best = best.unwrap_or(pivot);
        matrix.swap(pivot, best);
        right.swap(pivot, best);
        let top = matrix[pivot];
        if top[pivot] == 0.0 {
            return [0.0; 5];
        }
        for row in pivot + 1..5 {
            let factor = matrix[row][pivot] / top[pivot];
            for col in pivot..5 {
                matrix[row][col] -= factor * top[col];
            }
            right[row] -= factor * right[pivot];
        }
    }
    let mut found = [0.0; 5];
    for row in (0..5).rev() {
        let rest: f64 = (row + 1..5).map(|col| matrix[row][col] * found[col]).sum();
        found[row] = (right[row] - rest) / matrix[row][row];
    }
    found
}
