//! The rules for GPUs.

use megaburn::{
    doctor::{DoctorConfig, ExpectedGpu, Slowdown},
    plan::Gpu,
};
use rstest::rstest;

use super::{FakeGpu, examine, only};

/// Four GPUs on one host, the third of which is changed.
fn with_third(change: impl Fn(&mut FakeGpu) + Sync) -> megaburn::doctor::Diagnosis {
    examine(4, |rank| {
        let mut gpu = FakeGpu::healthy(rank);
        if rank == 2 {
            change(&mut gpu);
        }
        (DoctorConfig::new().with_host("a"), Some(gpu))
    })
}

#[test]
fn healthy_gpus_have_no_findings() {
    let diagnosis = with_third(|_| {});
    assert!(diagnosis.is_well, "{diagnosis}");
    let text = diagnosis.to_string();
    assert!(text.contains("4 x NVIDIA H100 80GB HBM3"), "{text}");
    assert!(text.contains("780 to 780 TFLOP/s"), "{text}");
    assert!(
        text.contains("all ranks: 330.00 GB/s bus bandwidth"),
        "{text}"
    );
    assert!(text.ends_with("result   no findings"), "{text}");
}

#[test]
fn a_slow_gpu_is_named_with_its_distance_to_the_others() {
    let diagnosis = with_third(|gpu| gpu.products = Ok(700e12));
    let found = only(&diagnosis, "products");
    assert_eq!(
        found.value,
        "rank 2 (host a, GPU 2): 700 TFLOP/s, 10% below the median of 4 GPUs (780 TFLOP/s)"
    );
    // 4% is within the rule.
    assert!(with_third(|gpu| gpu.products = Ok(750e12)).is_well);
}

#[test]
fn gpus_that_are_all_slow_are_measured_by_their_kind() {
    let diagnosis = examine(2, |rank| {
        let gpu = FakeGpu {
            memory: Ok(2.0e12),
            ..FakeGpu::healthy(rank)
        };
        (DoctorConfig::new().with_host("a"), Some(gpu))
    });
    let found: Vec<_> = diagnosis.findings().collect();
    assert_eq!(found.len(), 2, "{diagnosis}");
    assert!(
        found[0]
            .value
            .contains("2000 GB/s, 60% of the peak of 3350 GB/s; 75% is usual"),
        "{diagnosis}"
    );
}

#[rstest]
#[case::errors("ecc", |gpu: &mut FakeGpu| gpu.facts.uncorrected_errors = Some(2), "2 errors of its memory")]
#[case::no_ecc("ecc", |gpu: &mut FakeGpu| gpu.facts.has_ecc = Some(false), "ECC is off")]
#[case::held("gpu memory", |gpu: &mut FakeGpu| {
    gpu.facts.held_bytes = Some(30 << 30);
    gpu.facts.holders = vec![4711];
}, "30.0 GiB of 80.0 GiB are held by processes 4711")]
#[case::link("nvlink", |gpu: &mut FakeGpu| gpu.facts.nvlinks[7] = false, "17 of 18 links are active; not 7")]
#[case::recovered("nvlink", |gpu: &mut FakeGpu| gpu.facts.nvlink_recoveries = 3, "recovered 3 times")]
#[case::lanes("pcie", |gpu: &mut FakeGpu| gpu.sample.pcie_lanes = Some(8), "lanes 8 instead of 16")]
#[case::hot("temperature", |gpu: &mut FakeGpu| gpu.sample.temperature_celsius = Some(91), "91 °C")]
#[case::power("power", |gpu: &mut FakeGpu| gpu.facts.power_limit_watts = Some(400.0), "400 W instead of 700 W")]
#[case::clock("clocks", |gpu: &mut FakeGpu| gpu.sample.clock_mhz = Some(1200), "1200 MHz under load, 29% below")]
#[case::thermal("clocks", |gpu: &mut FakeGpu| gpu.sample.slowdowns = vec![Slowdown::Thermal], "slowed by temperature at 1700 of 1980 MHz")]
fn what_is_wrong_with_a_gpu_is_one_finding(
    #[case] check: &str,
    #[case] change: fn(&mut FakeGpu),
    #[case] value: &str,
) {
    let diagnosis = with_third(change);
    let found = only(&diagnosis, check);
    assert!(
        found.value.starts_with("rank 2 (host a, GPU 2): "),
        "{diagnosis}"
    );
    assert!(found.value.contains(value), "{diagnosis}");
}

#[test]
fn a_slow_connection_is_measured_by_nvlink() {
    let diagnosis = examine(2, |rank| {
        let gpu = FakeGpu {
            bus_bytes_per_second: 40e9,
            ..FakeGpu::healthy(rank)
        };
        (DoctorConfig::new().with_host("a"), Some(gpu))
    });
    let found = only(&diagnosis, "bandwidth");
    assert!(
        found.value.contains("9% of NVLink's 450 GB/s"),
        "{diagnosis}"
    );
}

#[test]
fn a_host_whose_network_is_slow_is_named() {
    // Three hosts with two GPUs each; NVLink is fine, and one host's own group is slow.
    let diagnosis = examine(6, |rank| {
        let mut gpu = FakeGpu::healthy(rank % 2);
        if rank / 2 == 1 {
            gpu.bus_bytes_per_second = 260e9;
        }
        let host = ["a", "b", "c"][rank / 2];
        (DoctorConfig::new().with_host(host), Some(gpu))
    });
    let found: Vec<_> = diagnosis.findings().map(|found| &found.value).collect();
    let of_host = found
        .iter()
        .find(|value| value.starts_with("the ranks of host b"));
    assert!(
        of_host.is_some_and(|value| value.contains("below the median of 3 such groups")),
        "{diagnosis}"
    );
    assert!(
        !found
            .iter()
            .any(|value| value.starts_with("the ranks of host a")),
        "{diagnosis}"
    );
}

#[test]
fn a_rank_without_a_gpu_and_a_failing_gpu_are_named() {
    let diagnosis = examine(2, |rank| {
        let gpu = (rank == 0).then(|| FakeGpu::healthy(0));
        (DoctorConfig::new().with_host("a"), gpu)
    });
    let found = only(&diagnosis, "gpus");
    assert!(
        found.value.starts_with("rank 1 (host a) has none"),
        "{diagnosis}"
    );
    let diagnosis = with_third(|gpu| gpu.products = Err("the GPU failed: Xid 79".into()));
    assert!(
        diagnosis
            .unchecked
            .iter()
            .any(|what| what.contains("GPU 2: the GPU failed: Xid 79")),
        "{diagnosis}"
    );
}

#[test]
fn the_peaks_are_those_of_plans() {
    let names = [
        ("a100", "NVIDIA A100-SXM4-80GB"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("h200", "NVIDIA H200"),
        ("b200", "NVIDIA B200"),
    ];
    for (plan, name) in names {
        let plan: Gpu = plan.parse().unwrap();
        let expected = ExpectedGpu::named(name).unwrap();
        assert_eq!(expected.products_per_second, plan.bf16, "{name}");
        assert_eq!(
            expected.memory_bytes_per_second, plan.memory_bandwidth,
            "{name}"
        );
        assert_eq!(
            expected.nvlink_bytes_per_second,
            Some(plan.nvlink),
            "{name}"
        );
    }
}
