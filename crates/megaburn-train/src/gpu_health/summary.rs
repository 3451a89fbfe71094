//! What rank 0 reports about all GPUs.

use megaburn_doctor::GpuHealth;
use serde::Serialize;

use super::seen::Seen;

/// The health of all GPUs: a line of `metrics.jsonl`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct GpuHealthSummary {
    /// The step.
    gpu_health: u64,
    /// The highest temperature, and whose it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_temperature_celsius: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hottest_rank: Option<usize>,
    /// The lowest clock, and whose it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    min_clock_mhz: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    slowest_rank: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_power_watts: Option<f64>,
    /// The errors of the memories since their drivers were loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    corrected_errors: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uncorrected_errors: Option<u64>,
    /// What happened since the last report.
    pub(crate) events: Vec<GpuEvent>,
}

/// What happened to a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct GpuEvent {
    pub(crate) rank: usize,
    pub(crate) host: String,
    pub(crate) gpu: usize,
    pub(crate) what: String,
}

impl GpuHealthSummary {
    /// The summary of what each rank has seen.
    pub(super) fn of(step: u64, all: &[Seen]) -> Self {
        let readings = || {
            let all = all.iter().enumerate();
            all.filter_map(|(rank, seen)| Some((rank, seen.last.as_ref()?)))
        };
        let sum = |errors: fn(&GpuHealth) -> Option<u64>| {
            readings()
                .filter_map(|(_, health)| errors(health))
                .reduce(|a, b| a + b)
        };
        let hottest = readings()
            .filter_map(|(rank, health)| Some((health.temperature_celsius?, rank)))
            .max_by_key(|(temperature, _)| *temperature);
        let slowest = readings()
            .filter_map(|(rank, health)| Some((health.clock_mhz?, rank)))
            .min_by_key(|(clock, _)| *clock);
        let powers = readings().filter_map(|(_, health)| health.power_watts);
        let events = all.iter().enumerate().flat_map(|(rank, seen)| {
            seen.events.iter().map(move |event| GpuEvent {
                rank,
                host: seen.host.clone(),
                gpu: seen.gpu,
                what: event.to_string(),
            })
        });
        Self {
            gpu_health: step,
            max_temperature_celsius: hottest.map(|(temperature, _)| temperature),
            hottest_rank: hottest.map(|(_, rank)| rank),
            min_clock_mhz: slowest.map(|(clock, _)| clock),
            slowest_rank: slowest.map(|(_, rank)| rank),
            max_power_watts: powers.reduce(f64::max),
            corrected_errors: sum(|health| health.corrected_errors),
            uncorrected_errors: sum(|health| health.uncorrected_errors),
            events: events.collect(),
        }
    }

    /// Whether any GPU could be read, or anything happened.
    pub(crate) fn is_known(&self) -> bool {
        self.min_clock_mhz.is_some()
            || self.max_temperature_celsius.is_some()
            || !self.events.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use megaburn_doctor::HealthEvent;
    use serde_json::json;

    use super::*;

    #[test]
    fn extremes_and_events_of_all_ranks_are_one_line() {
        let seen = |temperature, clock, events: &[HealthEvent]| Seen {
            host: "h".into(),
            gpu: 1,
            last: Some(GpuHealth {
                temperature_celsius: Some(temperature),
                clock_mhz: Some(clock),
                corrected_errors: Some(2),
                ..GpuHealth::default()
            }),
            events: events.to_vec(),
        };
        let all = [
            seen(60, 1980, &[]),
            seen(85, 1200, &[HealthEvent::Xid(79)]),
            Seen::default(),
        ];
        let summary = GpuHealthSummary::of(100, &all);
        assert!(summary.is_known());
        let what = "the driver reported Xid 79: look it up in NVIDIA's list of Xid errors";
        let expected = json!({
            "gpu_health": 100, "max_temperature_celsius": 85, "hottest_rank": 1,
            "min_clock_mhz": 1200, "slowest_rank": 1, "corrected_errors": 4,
            "events": [{"rank": 1, "host": "h", "gpu": 1, "what": what}],
        });
        assert_eq!(serde_json::to_value(&summary).unwrap(), expected);
        assert!(!GpuHealthSummary::of(100, &[Seen::default()]).is_known());
    }
}
