//! The peak of a GPU, which model FLOPs utilization (MFU) is relative to.

use megaburn_collective::RankEnv;
use megaburn_optim::Dtype;

use crate::{config::TrainConfig, device::Devices};

/// Dense peaks of one kind of GPU, without sparsity.
#[derive(Debug)]
struct Peak {
    /// The words of the driver's name for it.
    words: &'static [&'static str],
    /// 10^12 FLOP/s of tensor cores in bf16 and f16; in tf32 it is half.
    half: f64,
    /// 10^12 FLOP/s in f32, without tensor cores.
    single: f64,
}

const fn peak(words: &'static [&'static str], half: f64, single: f64) -> Peak {
    Peak {
        words,
        half,
        single,
    }
}

/// The GPUs whose peaks are known; a row of more words stands before one of fewer.
///
/// Source: NVIDIA's data sheets; where they state only the rate with sparsity, half of it.
const PEAKS: [Peak; 12] = [
    peak(&["H100", "PCIe"], 756.5, 51.2),
    peak(&["H100", "NVL"], 835.5, 60.0),
    peak(&["H200", "NVL"], 835.5, 60.0),
    peak(&["H100"], 989.4, 66.9),
    peak(&["H200"], 989.4, 66.9),
    peak(&["GH200"], 989.4, 66.9),
    peak(&["B200"], 2250.0, 75.0),
    peak(&["GB200"], 2500.0, 80.0),
    peak(&["A100"], 312.0, 19.5),
    peak(&["L40S"], 362.0, 91.6),
    peak(&["A6000"], 154.8, 38.7),
    peak(&["4090"], 165.2, 82.6),
];

/// The peak of a GPU with this name in 10^12 FLOP/s, for products of matrices in `dtype`.
fn peak_of(gpu: &str, dtype: Dtype, tf32: bool) -> Option<f64> {
    let found: Vec<&str> = gpu.split([' ', '-']).collect();
    let is_named = |peak: &&Peak| peak.words.iter().all(|word| found.contains(word));
    let Peak { half, single, .. } = PEAKS.iter().find(is_named)?;
    Some(match dtype {
        Dtype::Bf16 | Dtype::F16 => *half,
        Dtype::F32 if tf32 => half / 2.0,
        Dtype::F32 => *single,
    })
}

/// The peak that a rank of this run could reach, in 10^12 FLOP/s: that of its GPU in the type of
/// the products. `None` on the CPU, on a GPU that is not in the table or that ranks share, and
/// where products are quantised, because some are and others are not.
pub(crate) fn peak_tflops(
    config: &TrainConfig,
    devices: Devices,
    env: Option<&RankEnv>,
) -> Option<f64> {
    let is_shared = env.is_some_and(|env| env.ranks_per_gpu > 1);
    if is_shared || config.precision.quantizes() {
        return None;
    }
    let train = &config.train;
    peak_of(&devices.gpu_name()?, train.dtype, train.tf32)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("NVIDIA H100 80GB HBM3", Dtype::Bf16, false, Some(989.4))]
    #[case("NVIDIA H100 80GB HBM3", Dtype::F32, true, Some(494.7))]
    #[case("NVIDIA H100 80GB HBM3", Dtype::F32, false, Some(66.9))]
    #[case("NVIDIA H100 PCIe", Dtype::F16, false, Some(756.5))]
    #[case("NVIDIA H200 NVL", Dtype::Bf16, false, Some(835.5))]
    #[case("NVIDIA GH200 480GB", Dtype::Bf16, false, Some(989.4))]
    #[case("NVIDIA GB200", Dtype::Bf16, false, Some(2500.0))]
    #[case("NVIDIA A100-SXM4-80GB", Dtype::Bf16, true, Some(312.0))]
    #[case("NVIDIA A10", Dtype::Bf16, false, None)]
    #[case("Tesla K80", Dtype::F32, false, None)]
    fn a_gpu_is_found_by_its_name(
        #[case] gpu: &str,
        #[case] dtype: Dtype,
        #[case] tf32: bool,
        #[case] expected: Option<f64>,
    ) {
        assert_eq!(peak_of(gpu, dtype, tf32), expected);
    }

    #[test]
    fn a_kind_stands_before_the_general_one() {
        for (at, peak) in PEAKS.iter().enumerate() {
            let name = peak.words.join(" ");
            let first = PEAKS.iter().position(|other| {
                other
                    .words
                    .iter()
                    .all(|word| name.split(' ').any(|own| own == *word))
            });
            assert_eq!(first, Some(at), "{name}");
            assert!(peak.half > peak.single, "{name}");
        }
    }

    #[test]
    fn there_is_no_peak_on_the_cpu() {
        let config = TrainConfig::default();
        assert_eq!(peak_tflops(&config, Devices::Cpu, None), None);
    }
}
