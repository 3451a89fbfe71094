//! Formats numbers and durations for people.

use std::time::Duration;

use indicatif::BinaryBytes;

use crate::metrics::StepMetrics;

/// A duration in at most two units: `350 ms`, `12.3 s`, `1 m 20 s`, `2 h 05 m`, `3 d 4 h`.
pub fn human_duration(duration: Duration) -> String {
    if duration < Duration::from_millis(1000) {
        return format!("{} ms", duration.as_millis());
    }
    if duration < Duration::from_millis(59_950) {
        return format!("{:.1} s", duration.as_secs_f64());
    }
    let seconds = duration.as_secs() + u64::from(duration.subsec_millis() >= 500);
    let minutes = seconds / 60;
    let hours = seconds / 3600;
    match (hours, hours / 24) {
        (0, _) => format!("{minutes} m {:02} s", seconds % 60),
        (_, 0) => format!("{hours} h {:02} m", minutes % 60),
        (_, days) => format!("{days} d {} h", hours % 24),
    }
}

/// A number with three significant digits: `3.00e-5`, `0.0123`, `12.3`, `1.02k`, `45.6M`.
pub fn human_number(value: f64) -> String {
    const UNITS: [&str; 6] = ["", "k", "M", "G", "T", "P"];
    if !value.is_finite() || value == 0.0 {
        return value.to_string();
    }
    let rounded = format!("{value:.2e}");
    if value.abs() < 1e-4 {
        return rounded;
    }
    // Round before choosing the unit, so that 999.6 becomes 1.00k and not 1000.
    let mut value: f64 = rounded.parse().expect("the text was printed from a number");
    let mut unit = 0;
    while value.abs() >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    let decimals = (2 - value.abs().log10().floor() as i32).max(0) as usize;
    format!("{value:.decimals$}{}", UNITS[unit])
}

/// The line of a step.
/// `unit` is what a loss is a mean over.
pub(super) fn step_line(metrics: &StepMetrics, steps: u64, left: Duration, unit: &str) -> String {
    let StepMetrics {
        step,
        loss,
        grad_norm,
        lr,
        tokens_per_second,
        tflops,
        memory_bytes,
        ..
    } = *metrics;
    let scale = metrics
        .loss_scale
        .map(|scale| format!("  loss scale {}", human_number(scale)));
    let zeros = metrics
        .num_zeros
        .map(|zeros| format!("  zeros {}", human_number(zeros as f64)));
    let params = metrics
        .params_norm
        .map(|norm| format!("  params norm {}", human_number(norm)));
    let logit = metrics
        .max_attention_logit
        .map(|logit| format!("  max logit {}", human_number(logit)));
    let padding = metrics
        .padding
        .map(|padding| format!("  padding {:.1}%", 100.0 * padding));
    let means = metrics.task.iter();
    let means: String = means
        .map(|(name, mean)| format!("  {name} {}", human_number(*mean)))
        .collect();
    let skipped = if metrics.skipped { "  skipped" } else { "" };
    let width = steps.to_string().len();
    let rest = if left.is_zero() {
        "done".into()
    } else {
        format!("{} left", human_duration(left))
    };
    format!(
        "step {step:>width$}/{steps}  loss {loss:.4}  grad norm {}{}{}{}  lr {lr:.2e}{}{}{means}{skipped}  {} {unit}/s  {} TFLOP/s  {}  {rest}",
        human_number(grad_norm),
        zeros.unwrap_or_default(),
        params.unwrap_or_default(),
        logit.unwrap_or_default(),
        scale.unwrap_or_default(),
        padding.unwrap_or_default(),
        human_number(tokens_per_second),
        human_number(tflops),
        BinaryBytes(memory_bytes),
    )
}

/// The text next to the progress bar.
pub(super) fn brief(metrics: &StepMetrics, unit: &str) -> String {
    let StepMetrics {
        loss,
        tokens_per_second,
        ..
    } = *metrics;
    format!(
        "loss {loss:.4}  {} {unit}/s",
        human_number(tokens_per_second)
    )
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::metrics::example_step;

    #[rstest]
    #[case(0, "0 ms")]
    #[case(999, "999 ms")]
    #[case(1_000, "1.0 s")]
    #[case(59_949, "59.9 s")]
    #[case(59_960, "1 m 00 s")]
    #[case(80_400, "1 m 20 s")]
    #[case(3_599_600, "1 h 00 m")]
    #[case(7_500_000, "2 h 05 m")]
    #[case(86_400_000, "1 d 0 h")]
    #[case(273_600_000, "3 d 4 h")]
    fn durations_read_well(#[case] millis: u64, #[case] text: &str) {
        assert_eq!(human_duration(Duration::from_millis(millis)), text);
    }

    #[rstest]
    #[case(0.0, "0")]
    #[case(0.01234, "0.0123")]
    #[case(1.0, "1.00")]
    #[case(12.345, "12.3")]
    #[case(-123.45, "-123")]
    #[case(999.4, "999")]
    #[case(999.6, "1.00k")]
    #[case(12_345.6, "12.3k")]
    #[case(45_600_000.0, "45.6M")]
    #[case(0.99996, "1.00")]
    #[case(99_960.0, "100k")]
    #[case(1e-4, "0.000100")]
    #[case(1.234e-30, "1.23e-30")]
    #[case(5e18, "5000P")]
    #[case(f64::NAN, "NaN")]
    #[case(f64::INFINITY, "inf")]
    fn numbers_have_three_digits_that_count(#[case] value: f64, #[case] text: &str) {
        assert_eq!(human_number(value), text);
    }

    #[test]
    fn a_line_has_the_metrics_of_a_task_in_its_unit() {
        let metrics = StepMetrics {
            task: [("accuracy".to_string(), 0.75)].into(),
            ..example_step(3, 5.5)
        };
        let line = step_line(&metrics, 9, Duration::ZERO, "items");
        assert!(line.contains("  accuracy 0.750  12.3k items/s  "), "{line}");
        assert_eq!(brief(&metrics, "items"), "loss 5.5000  12.3k items/s");
    }

    #[test]
    fn the_last_step_is_done() {
        let line = step_line(&example_step(300, f64::NAN), 300, Duration::ZERO, "tokens");
        assert!(
            line.starts_with("step 300/300  loss NaN  ") && line.ends_with("MiB  done"),
            "{line}"
        );
    }

    #[test]
    fn a_skipped_step_says_so_with_its_scale() {
        let metrics = StepMetrics {
            grad_norm: f64::INFINITY,
            loss_scale: Some(65536.0),
            skipped: true,
            ..example_step(7, 5.5)
        };
        let line = step_line(&metrics, 9, Duration::ZERO, "tokens");
        assert!(
            line.contains("norm inf  lr 3.00e-4  loss scale 65.5k  skipped  12.3k"),
            "{line}"
        );
    }

    #[test]
    fn what_was_asked_for_is_shown() {
        let metrics = StepMetrics {
            num_zeros: Some(521_040_000),
            params_norm: Some(123.4),
            max_attention_logit: Some(31.25),
            padding: Some(0.0312),
            ..example_step(1, 5.5)
        };
        let line = step_line(&metrics, 10, Duration::ZERO, "tokens");
        assert!(
            line.contains(
                "norm 1.25  zeros 521M  params norm 123  max logit 31.2  lr 3.00e-4  padding 3.1%  12.3k"
            ),
            "{line}"
        );
    }

    #[test]
    fn a_step_is_one_line() {
        assert_eq!(
            step_line(
                &example_step(7, 5.5),
                300,
                Duration::from_secs(80),
                "tokens"
            ),
            "step   7/300  loss 5.5000  grad norm 1.25  lr 3.00e-4  12.3k tokens/s  0.0123 TFLOP/s  123.00 MiB  1 m 20 s left"
        );
    }
}
