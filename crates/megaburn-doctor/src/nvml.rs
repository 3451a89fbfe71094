//! Readings of a GPU through NVML, while a run trains.

use std::{
    thread,
    time::{Duration, Instant},
};

use nvml_wrapper::{
    Device, Nvml,
    bitmasks::{device::ThrottleReasons, event::EventTypes},
    enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor},
    enums::event::XidError,
    error::NvmlError,
};

use crate::{facts::Slowdown, health::GpuHealth};

/// How often the watch asks whether it is over.
const TICK: Duration = Duration::from_millis(500);

/// Reads the GPU at this PCI address every `interval`, and at once after an Xid error, until
/// `is_over` says so.
///
/// # Errors
/// NVML cannot be used, or does not know the GPU.
pub fn watch_health(
    address: &str,
    interval: Duration,
    is_over: impl Fn() -> bool,
    mut observe: impl FnMut(GpuHealth),
) -> Result<(), String> {
    let text = |error: NvmlError| error.to_string();
    let nvml = Nvml::init().map_err(text)?;
    let gpu = nvml.device_by_pci_bus_id(address).map_err(text)?;
    // Without the right to receive events there are no Xid errors.
    let events = nvml.create_event_set().ok();
    let events = events.and_then(|set| {
        gpu.register_events(EventTypes::CRITICAL_XID_ERROR, set)
            .ok()
    });
    let mut read: Option<Instant> = None;
    let mut xids = Vec::new();
    while !is_over() {
        match &events {
            Some(events) => match events.wait(TICK.as_millis() as u32) {
                Ok(event) => xids.extend(match event.event_data {
                    Some(XidError::Value(number)) => Some(number),
                    Some(XidError::Unknown) | None => None,
                }),
                Err(NvmlError::Timeout) => {}
                Err(_) => thread::sleep(TICK),
            },
            None => thread::sleep(TICK),
        }
        let is_due = read.is_none_or(|read| read.elapsed() >= interval);
        if is_due || !xids.is_empty() {
            read = Some(Instant::now());
            observe(health_of(&gpu, std::mem::take(&mut xids)));
        }
    }
    Ok(())
}

fn health_of(gpu: &Device<'_>, xids: Vec<u64>) -> GpuHealth {
    let errors = |kind| gpu.total_ecc_errors(kind, EccCounter::Volatile).ok();
    GpuHealth {
        clock_mhz: gpu.clock_info(Clock::SM).ok(),
        temperature_celsius: gpu.temperature(TemperatureSensor::Gpu).ok(),
        power_watts: gpu.power_usage().ok().map(|power| f64::from(power) / 1e3),
        slowdowns: slowdowns(gpu).into_iter().collect(),
        corrected_errors: errors(MemoryError::Corrected),
        uncorrected_errors: errors(MemoryError::Uncorrected),
        xids,
    }
}

/// Why the clock of a GPU is not higher.
pub(crate) fn slowdowns(gpu: &Device<'_>) -> Vec<Slowdown> {
    let reasons = gpu
        .current_throttle_reasons()
        .unwrap_or(ThrottleReasons::NONE);
    let known = [
        (ThrottleReasons::SW_POWER_CAP, Slowdown::PowerLimit),
        (
            ThrottleReasons::APPLICATIONS_CLOCKS_SETTING,
            Slowdown::ApplicationClocks,
        ),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, Slowdown::Thermal),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, Slowdown::Thermal),
        (
            ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN,
            Slowdown::PowerBrake,
        ),
        (ThrottleReasons::HW_SLOWDOWN, Slowdown::Hardware),
        (ThrottleReasons::SYNC_BOOST, Slowdown::SyncBoost),
    ];
    let there = known
        .into_iter()
        .filter(|(flag, _)| reasons.contains(*flag));
    there.map(|(_, slowdown)| slowdown).collect()
}
