//! The rules for GPUs.

use super::{
    bytes,
    outliers::{Outlier, outliers},
};
use crate::{
    diagnosis::Observation,
    expected::{ExpectedGpu, LEAST_MEMORY, LEAST_PRODUCTS},
    facts::{GpuFacts, RankFacts, Slowdown},
};

/// Memory that others may hold before it is a finding.
const MOST_HELD: u64 = 1 << 30;
/// The temperature from which GPUs of servers slow down soon.
const HOT: u32 = 85;

pub(super) fn judge(ranks: &[RankFacts]) -> Vec<Observation> {
    let mut found = Vec::new();
    let with_gpu: Vec<(&RankFacts, &GpuFacts)> = ranks
        .iter()
        .filter_map(|rank| Some((rank, rank.gpu.as_ref()?)))
        .collect();
    if with_gpu.is_empty() {
        return found;
    }
    found.extend(models(&with_gpu));
    for rank in ranks.iter().filter(|rank| rank.gpu.is_none()) {
        found.push(Observation::finding(
            "gpus",
            format!(
                "{} has none that it can use, although other ranks have",
                rank.place()
            ),
            "see the libraries above, `nvidia-smi` on that host, and CUDA_VISIBLE_DEVICES",
        ));
    }
    for (rank, gpu) in &with_gpu {
        let place = rank.place();
        found.extend(held(&place, gpu));
        found.extend(errors(&place, rank, gpu));
        found.extend(links(&place, gpu));
        found.extend(slowdowns(&place, gpu));
    }
    let products = |gpu: &GpuFacts| gpu.products_per_second;
    let memory = |gpu: &GpuFacts| gpu.memory_bytes_per_second;
    let clock = |gpu: &GpuFacts| Some(f64::from(gpu.load.as_ref()?.clock_mhz?));
    let of_products = |kind: ExpectedGpu| kind.products_per_second;
    let of_memory = |kind: ExpectedGpu| kind.memory_bytes_per_second;
    let expected = Expected {
        peak: of_products,
        least: LEAST_PRODUCTS,
    };
    found.extend(rates(
        &with_gpu,
        "products",
        products,
        1e12,
        "TFLOP/s",
        Some(expected),
    ));
    let expected = Expected {
        peak: of_memory,
        least: LEAST_MEMORY,
    };
    found.extend(rates(
        &with_gpu,
        "gpu memory",
        memory,
        1e9,
        "GB/s",
        Some(expected),
    ));
    found.extend(rates(
        &with_gpu,
        "clocks",
        clock,
        1.0,
        "MHz under load",
        None,
    ));
    found
}

/// The peak of a kind of GPU, and the share of it that every one reaches.
struct Expected {
    peak: fn(ExpectedGpu) -> f64,
    least: f64,
}

fn models(gpus: &[(&RankFacts, &GpuFacts)]) -> Vec<Observation> {
    let mut names: Vec<(&str, usize)> = Vec::new();
    for (_, gpu) in gpus {
        match names.iter_mut().find(|(name, _)| *name == gpu.name) {
            Some((_, count)) => *count += 1,
            None => names.push((&gpu.name, 1)),
        }
    }
    let texts: Vec<String> = names
        .iter()
        .map(|(name, count)| format!("{count} x {name}"))
        .collect();
    let text = texts.join(", ");
    vec![match names.len() {
        1 => Observation::ok("gpus", text),
        _ => Observation::note(
            "gpus",
            format!("{text}: a step takes as long as on the slowest"),
        ),
    }]
}

fn held(place: &str, gpu: &GpuFacts) -> Option<Observation> {
    let held = gpu.held_bytes.filter(|held| *held > MOST_HELD)?;
    let holders: Vec<String> = gpu.holders.iter().map(u32::to_string).collect();
    let (who, fix) = match holders.is_empty() {
        true => (
            "processes that are not visible here".to_string(),
            "find them with `nvidia-smi` on the host, and end them".to_string(),
        ),
        false => (
            format!("processes {}", holders.join(", ")),
            format!("`ps -p {}` shows them; end them or wait", holders.join(",")),
        ),
    };
    let value = format!(
        "{place}: {} of {} are held by {who}",
        bytes(held),
        gpu.memory_bytes.map_or("?".into(), bytes)
    );
    Some(Observation::finding("gpu memory", value, fix))
}

fn errors(place: &str, rank: &RankFacts, gpu: &GpuFacts) -> Vec<Observation> {
    let mut found = Vec::new();
    if let Some(count) = gpu.uncorrected_errors.filter(|count| *count > 0) {
        found.push(Observation::finding(
            "ecc",
            format!("{place}: {count} errors of its memory could not be corrected"),
            "drain the host and reset the GPU (`nvidia-smi --gpu-reset`); replace the card if they \
             return",
        ));
    }
    if gpu.has_ecc == Some(false) {
        found.push(Observation::finding(
            "ecc",
            format!("{place}: ECC is off, so a flipped bit is not noticed"),
            "`nvidia-smi -e 1` and a reset of the GPU",
        ));
    }
    let xids = rank.machine.xids.as_ref();
    let of_gpu = gpu.pci_address.as_deref().and_then(|address| {
        // The kernel leaves out the function: 0000:1b:00.
        let short = address.split('.').next().unwrap_or(address).to_lowercase();
        let same = |known: &&String| short.ends_with(&known.to_lowercase());
        let known = xids?.keys().find(same)?;
        xids?.get(known)
    });
    if let Some(numbers) = of_gpu.filter(|numbers| !numbers.is_empty()) {
        let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
        found.push(Observation::finding(
            "xid",
            format!("{place}: the driver logged Xid {}", numbers.join(", ")),
            "look the numbers up in NVIDIA's list of Xid errors; 48, 63, 64, 74, 79, 94 and 95 are \
             of the hardware",
        ));
    }
    found
}

fn links(place: &str, gpu: &GpuFacts) -> Vec<Observation> {
    let mut found = Vec::new();
    let inactive: Vec<String> = (0..gpu.nvlinks.len())
        .filter(|link| !gpu.nvlinks[*link])
        .map(|link| link.to_string())
        .collect();
    let active = gpu.nvlinks.len() - inactive.len();
    let expected = ExpectedGpu::named(&gpu.name).map_or(0, |kind| kind.nvlinks);
    // A GPU that is alone in its virtual machine may have no link at all.
    if active > 0 && active < expected {
        found.push(Observation::finding(
            "nvlink",
            format!(
                "{place}: {active} of {expected} links are active; not {}",
                inactive.join(", ")
            ),
            "check nvidia-fabricmanager and `nvidia-smi nvlink -s`; reset or reseat the GPU",
        ));
    }
    if gpu.nvlink_recoveries > 0 {
        found.push(Observation::finding(
            "nvlink",
            format!(
                "{place}: links had to be recovered {} times",
                gpu.nvlink_recoveries
            ),
            "`nvidia-smi nvlink -e` shows which; reset the GPU, and have its connectors checked",
        ));
    }
    let load = gpu.load.clone().unwrap_or_default();
    let pairs = [
        ("lanes", load.pcie_lanes, gpu.max_pcie_lanes),
        ("generation", load.pcie_generation, gpu.max_pcie_generation),
    ];
    for (what, now, most) in pairs {
        if let (Some(now), Some(most)) = (now, most)
            && now < most
        {
            found.push(Observation::finding(
                "pcie",
                format!("{place}: {what} {now} instead of {most} under load"),
                "reseat the card or its riser; check the slot's settings in the BIOS",
            ));
        }
    }
    found
}

fn slowdowns(place: &str, gpu: &GpuFacts) -> Vec<Observation> {
    let mut found = Vec::new();
    let load = gpu.load.clone().unwrap_or_default();
    let fix = |slowdown: &Slowdown| match slowdown {
        Slowdown::PowerLimit | Slowdown::SyncBoost => None,
        Slowdown::ApplicationClocks => Some("`nvidia-smi -rac` and `nvidia-smi -rgc`"),
        Slowdown::Thermal | Slowdown::Hardware => {
            Some("check fans, airflow, inlet temperature and the cooler of the card")
        }
        Slowdown::PowerBrake => Some("check the server's power supplies and its power cap"),
    };
    let clock = match (load.clock_mhz, gpu.max_clock_mhz) {
        (Some(now), Some(most)) => format!(" at {now} of {most} MHz"),
        _ => String::new(),
    };
    for slowdown in &load.slowdowns {
        if let Some(fix) = fix(slowdown) {
            let value = format!("{place}: slowed by {slowdown}{clock}");
            found.push(Observation::finding("clocks", value, fix));
        }
    }
    if let Some(hot) = load.temperature_celsius.filter(|degrees| *degrees >= HOT) {
        found.push(Observation::finding(
            "temperature",
            format!("{place}: {hot} °C under load"),
            "check fans, airflow, inlet temperature and the cooler of the card",
        ));
    }
    if let (Some(limit), Some(default)) = (gpu.power_limit_watts, gpu.default_power_limit_watts)
        && limit < 0.99 * default
    {
        found.push(Observation::finding(
            "power",
            format!("{place}: limited to {limit:.0} W instead of {default:.0} W"),
            format!("`nvidia-smi -pl {default:.0}`, if the server can cool and feed it"),
        ));
    }
    found
}

/// Outliers among the GPUs' rates and those far below what is expected; or one line about all.
fn rates(
    gpus: &[(&RankFacts, &GpuFacts)],
    check: &'static str,
    rate: impl Fn(&GpuFacts) -> Option<f64>,
    unit: f64,
    name: &str,
    expected: Option<Expected>,
) -> Vec<Observation> {
    let rates: Vec<(&RankFacts, String, f64)> = gpus
        .iter()
        .filter_map(|(rank, gpu)| Some((*rank, gpu.name.clone(), rate(gpu)?)))
        .collect();
    let text = |rate: f64| format!("{:.0} {name}", rate / unit);
    let mut found: Vec<Observation> = Vec::new();
    let slow = outliers(&rates);
    let has_peak = expected.is_some();
    for outlier in &slow {
        let Outlier {
            rank,
            rate,
            median,
            of,
        } = outlier;
        found.push(Observation::finding(
            check,
            format!(
                "{}: {}, {:.0}% below the median of {of} GPUs ({})",
                rank.place(),
                text(*rate),
                outlier.percent_below(),
                text(*median)
            ),
            "see its clocks, temperature and errors; exchange it if it stays slow",
        ));
    }
    if let Some(Expected { peak, least }) = expected {
        for (rank, kind, rate) in &rates {
            let Some(peak) = ExpectedGpu::named(kind).map(peak) else {
                continue;
            };
            let is_known = slow.iter().any(|outlier| outlier.rank.rank == rank.rank);
            if *rate < least * peak && !is_known {
                found.push(Observation::finding(
                    check,
                    format!(
                        "{}: {}, {:.0}% of the peak of {}; {:.0}% is usual at least",
                        rank.place(),
                        text(*rate),
                        100.0 * rate / peak,
                        text(peak),
                        100.0 * least
                    ),
                    "end other programs on the GPU; see its clocks, temperature and power",
                ));
            }
        }
    }
    if found.is_empty() && !rates.is_empty() {
        let least = rates
            .iter()
            .map(|rate| rate.2)
            .fold(f64::INFINITY, f64::min);
        let most = rates.iter().map(|rate| rate.2).fold(0.0, f64::max);
        let range = match rates.len() {
            1 => text(least),
            _ => format!("{:.0} to {}", least / unit, text(most)),
        };
        let is_known = |rate: &(&RankFacts, String, f64)| ExpectedGpu::named(&rate.1).is_some();
        let note = match has_peak && !rates.iter().all(is_known) {
            true => " (the peak of this kind of GPU is not known here)",
            false => "",
        };
        found.push(Observation::ok(check, format!("{range}{note}")));
    }
    found
}
