//! The health of a GPU while a run trains, and what of it deserves a warning.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Deserialize, Serialize};

use crate::facts::Slowdown;

/// A slowdown is reported after this many readings in a row, and again after as many without it.
const IN_A_ROW: u32 = 3;

/// The readings of a GPU at a moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuHealth {
    /// Its clock in MHz.
    pub clock_mhz: Option<u32>,
    /// Its temperature.
    pub temperature_celsius: Option<u32>,
    /// The power that it draws.
    pub power_watts: Option<f64>,
    /// Why its clock is not higher.
    pub slowdowns: BTreeSet<Slowdown>,
    /// Errors of its memory that were corrected, since the driver was loaded.
    pub corrected_errors: Option<u64>,
    /// Errors of its memory that were not.
    pub uncorrected_errors: Option<u64>,
    /// The Xid errors since the last reading.
    pub xids: Vec<u64>,
}

/// What happened to a GPU that deserves a warning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthEvent {
    /// The driver reported an Xid error.
    Xid(u64),
    /// This many more errors of the memory were not corrected.
    UncorrectedErrors(u64),
    /// The hardware has lowered its clock for several readings.
    Slowdown(Slowdown),
}

impl fmt::Display for HealthEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Xid(number) => write!(
                f,
                "the driver reported Xid {number}: look it up in NVIDIA's list of Xid errors"
            ),
            Self::UncorrectedErrors(errors) => write!(
                f,
                "{errors} new errors of its memory were not corrected (ECC): leave that GPU out"
            ),
            Self::Slowdown(slowdown) => {
                write!(
                    f,
                    "its clock is lowered ({slowdown}): `megaburn doctor` says more"
                )
            }
        }
    }
}

/// Finds what deserves a warning in the readings of one GPU.
#[derive(Debug, Default)]
pub struct HealthWatch {
    uncorrected: Option<u64>,
    /// How often each slowdown was seen in a row.
    seen: BTreeMap<Slowdown, u32>,
    /// The slowdowns that were reported, and how often they were not seen in a row since.
    reported: BTreeMap<Slowdown, u32>,
}

impl HealthWatch {
    /// Adds a reading. Errors that the first reading finds are older than the run.
    pub fn observe(&mut self, now: &GpuHealth) -> Vec<HealthEvent> {
        let mut events: Vec<_> = now.xids.iter().copied().map(HealthEvent::Xid).collect();
        if let Some(errors) = now.uncorrected_errors {
            let before = self.uncorrected.replace(errors).unwrap_or(errors);
            let new = errors.saturating_sub(before);
            events.extend((new > 0).then_some(HealthEvent::UncorrectedErrors(new)));
        }
        for slowdown in [Slowdown::Thermal, Slowdown::PowerBrake, Slowdown::Hardware] {
            if self.begins(slowdown, now.slowdowns.contains(&slowdown)) {
                events.push(HealthEvent::Slowdown(slowdown));
            }
        }
        events
    }

    /// Whether a slowdown that is there or not is to be reported now.
    fn begins(&mut self, slowdown: Slowdown, is_there: bool) -> bool {
        let seen = self.seen.entry(slowdown).or_default();
        *seen = if is_there { *seen + 1 } else { 0 };
        let lasts = *seen >= IN_A_ROW;
        match self.reported.get_mut(&slowdown) {
            Some(absent) if is_there => *absent = 0,
            Some(absent) => {
                *absent += 1;
                if *absent >= IN_A_ROW {
                    self.reported.remove(&slowdown);
                }
            }
            None if lasts => {
                self.reported.insert(slowdown, 0);
                return true;
            }
            None => {}
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slow(slowdowns: &[Slowdown]) -> GpuHealth {
        GpuHealth {
            slowdowns: slowdowns.iter().copied().collect(),
            ..GpuHealth::default()
        }
    }

    #[test]
    fn new_errors_are_reported_and_old_ones_are_not() {
        let mut watch = HealthWatch::default();
        let errors = |errors, xids: &[u64]| GpuHealth {
            uncorrected_errors: Some(errors),
            corrected_errors: Some(1000 * errors),
            xids: xids.to_vec(),
            ..GpuHealth::default()
        };
        assert_eq!(watch.observe(&errors(4, &[])), []);
        assert_eq!(watch.observe(&errors(4, &[])), []);
        let found = watch.observe(&errors(6, &[94, 79]));
        let expected = [
            HealthEvent::Xid(94),
            HealthEvent::Xid(79),
            HealthEvent::UncorrectedErrors(2),
        ];
        assert_eq!(found, expected);
        // A driver that was loaded anew counts from zero.
        assert_eq!(watch.observe(&errors(0, &[])), []);
        assert_eq!(
            watch.observe(&errors(1, &[])),
            [HealthEvent::UncorrectedErrors(1)]
        );
    }

    #[test]
    fn a_slowdown_of_the_hardware_is_reported_once_while_it_lasts() {
        let mut watch = HealthWatch::default();
        let usual = [Slowdown::PowerLimit, Slowdown::ApplicationClocks];
        let hot = [Slowdown::PowerLimit, Slowdown::Thermal];
        let mut reports = |readings: &[&[Slowdown]]| -> Vec<usize> {
            let events = readings
                .iter()
                .map(|reading| watch.observe(&slow(reading)).len());
            events.collect()
        };
        assert_eq!(reports(&[&usual[..]; 9]), [0; 9]);
        // Now and then is not a slowdown that lasts.
        assert_eq!(reports(&[&hot, &hot, &usual, &hot, &usual]), [0; 5]);
        assert_eq!(
            reports(&[&hot, &hot, &hot, &hot, &usual, &hot, &hot]),
            [0, 0, 1, 0, 0, 0, 0]
        );
        assert_eq!(
            reports(&[&usual, &usual, &usual, &hot, &hot, &hot]),
            [0, 0, 0, 0, 0, 1]
        );
    }
}
