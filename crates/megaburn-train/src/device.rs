//! The devices that ranks compute on.

use burn::prelude::Device;
use megaburn_collective::RankEnv;
use megaburn_kernels::AttentionKernel;
use megaburn_mesh::Layout;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;

/// `run.device`: what the ranks compute on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum DeviceChoice {
    /// GPUs, if the program was built with feature `cuda` and the machine has any; otherwise the
    /// CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// NVIDIA GPUs, one per rank.
    Cuda,
}

/// The devices of the ranks on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Devices {
    /// The CPU, which all ranks share.
    Cpu,
    /// NVIDIA GPUs, one per rank; each rank is a process.
    Cuda {
        /// Number of GPUs that this process may use.
        gpus: usize,
    },
}

impl DeviceChoice {
    /// The devices that this choice selects on this machine. If they are GPUs, this also prepares
    /// the process for them: call it before any tensor is on a GPU.
    ///
    /// # Errors
    /// GPUs were requested, but there are none, or something that they need is missing.
    pub fn find(self) -> Result<Devices, TrainError> {
        match self {
            Self::Cpu => Ok(Devices::Cpu),
            Self::Auto | Self::Cuda if cuda::num_gpus() == 0 && shares_gpu()? => {
                Err(TrainError::NoGpuToShare)
            }
            Self::Auto if cuda::num_gpus() == 0 => Ok(Devices::Cpu),
            Self::Auto | Self::Cuda => Ok(Devices::Cuda {
                gpus: cuda::start()?,
            }),
        }
    }
}

/// Whether the launcher assigned this rank a GPU together with other ranks.
fn shares_gpu() -> Result<bool, TrainError> {
    Ok(RankEnv::from_env()?.is_some_and(|env| env.ranks_per_gpu > 1))
}

impl Devices {
    /// Whether the ranks of `layout` still have to be started as processes, because no launcher
    /// did.
    pub fn need_processes(self, layout: &Layout, env: Option<&RankEnv>) -> bool {
        self != Self::Cpu && env.is_none() && layout.world_size() > 1
    }

    /// Refuses a layout with more ranks than GPUs on one host.
    ///
    /// # Errors
    /// [`TrainError::TooFewGpus`].
    pub fn hold(self, layout: &Layout) -> Result<(), TrainError> {
        let ranks = layout.world_size();
        match self {
            Self::Cuda { gpus } if ranks > gpus => Err(TrainError::TooFewGpus {
                layout: layout.to_string(),
                ranks,
                gpus,
            }),
            _ => Ok(()),
        }
    }

    /// The device of this process's ranks, without autodiff.
    ///
    /// # Errors
    /// There is no GPU left for this rank, or several ranks share this process.
    pub fn of_this_process(
        self,
        layout: &Layout,
        env: Option<&RankEnv>,
    ) -> Result<Device, TrainError> {
        let Self::Cuda { gpus } = self else {
            return Ok(Device::flex());
        };
        if self.need_processes(layout, env) {
            let ranks = layout.world_size();
            return Err(TrainError::GpuThreads {
                layout: layout.to_string(),
                ranks,
            });
        }
        cuda::device(match env {
            None => 0,
            Some(env) => env.gpu(gpus).ok_or(TrainError::NoGpuForRank {
                local_rank: env.local_rank,
                ranks: env.local_world_size,
                gpus,
            })?,
        })
    }

    /// Finds the libraries that a choice of attention needs in addition to those of every run.
    ///
    /// # Errors
    /// A library is missing; the error says where it was searched for and how to install it.
    pub(crate) fn find_libraries_of(self, attention: AttentionKernel) -> Result<(), TrainError> {
        match attention {
            AttentionKernel::Cudnn => cuda::find_cudnn().map(drop),
            _ => Ok(()),
        }
    }

    /// The name of the first GPU that this process may use, as the driver has it; `None` on the CPU.
    pub(crate) fn gpu_name(self) -> Option<String> {
        (self != Self::Cpu).then(cuda::name)
    }

    /// The console's description of the GPUs of `ranks` ranks; `None` on the CPU.
    pub(crate) fn describe(self, ranks: usize, env: &Option<RankEnv>) -> Option<String> {
        let Self::Cuda { gpus } = self else {
            return None;
        };
        let name = cuda::name();
        let together = env.as_ref().map_or(1, |env| env.ranks_per_gpu);
        Some(match ranks {
            _ if together > 1 => format!("{name}, one per {together} ranks"),
            ranks if ranks < gpus => format!("{name}, {ranks} of the {gpus} on this host"),
            1 => name,
            _ => format!("{name}, one per rank"),
        })
    }
}

/// The version and the path of cuDNN, or why it cannot be used.
pub(crate) fn find_cudnn() -> Result<String, String> {
    cuda::find_cudnn().map_err(|error| match error {
        TrainError::Cuda { why } => why,
        other => other.to_string(),
    })
}

/// Configures the GEMMs of this rank's GPU: whether f32 matrices may be rounded to tf32, and
/// whether algorithms are timed.
pub(crate) fn choose_gemm(device: &Device, tf32: bool, tune: bool) {
    cuda::choose_gemm(device, tf32, tune);
}

#[cfg(feature = "cuda")]
mod cuda {
    use burn::prelude::Device;
    use megaburn_cuda::gemm::{GemmOptions, set_options};

    use crate::error::TrainError;

    pub(super) use megaburn_cuda::libraries::num_gpus;

    pub(super) fn choose_gemm(device: &Device, tf32: bool, tune: bool) {
        let options = GemmOptions {
            tf32,
            tune,
            ..GemmOptions::default()
        };
        set_options(device, options);
    }

    pub(super) fn start() -> Result<usize, TrainError> {
        megaburn_cuda::start().map_err(|error| TrainError::Cuda {
            why: error.to_string(),
        })
    }

    pub(super) fn device(index: usize) -> Result<Device, TrainError> {
        Ok(Device::cuda(index))
    }

    /// The version and path of cuDNN.
    pub(super) fn find_cudnn() -> Result<String, TrainError> {
        let found = megaburn_cuda::cudnn::found().map(|found| found.to_string());
        found.map_err(|error| TrainError::Cuda {
            why: error.to_string(),
        })
    }

    pub(super) fn name() -> String {
        megaburn_cuda::libraries::gpu_name(0).unwrap_or_else(|| "GPU".into())
    }
}

#[cfg(not(feature = "cuda"))]
mod cuda {
    use burn::prelude::Device;

    use crate::error::TrainError;

    pub(super) fn num_gpus() -> usize {
        0
    }

    pub(super) fn choose_gemm(_: &Device, _: bool, _: bool) {}

    pub(super) fn start() -> Result<usize, TrainError> {
        Err(TrainError::Cuda {
            why: "this program was built without the feature `cuda`: build it with `cargo build \
                 --release --features cuda`, or choose --device cpu"
                .into(),
        })
    }

    pub(super) fn find_cudnn() -> Result<String, TrainError> {
        start().map(|_| String::new())
    }

    pub(super) fn device(_: usize) -> Result<Device, TrainError> {
        start().map(|_| Device::flex())
    }

    pub(super) fn name() -> String {
        "GPU".into()
    }
}

#[cfg(test)]
mod tests {
    use megaburn_collective::JobToken;

    use super::*;

    fn env(local_rank: usize, local_world_size: usize) -> RankEnv {
        RankEnv {
            rank: local_rank,
            world_size: local_world_size,
            local_rank,
            local_world_size,
            is_local_world_known: true,
            ranks_per_gpu: 1,
            master_addr: "localhost".into(),
            master_port: 1,
            job_token: JobToken::default(),
        }
    }

    #[test]
    fn more_ranks_than_gpus_are_refused_with_both_numbers() {
        let layout = "tp4".parse().unwrap();
        let gpus = Devices::Cuda { gpus: 2 };
        let error = gpus
            .of_this_process(&layout, Some(&env(3, 4)))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("local rank 3") && error.contains("4 ranks"),
            "{error}"
        );
        assert!(
            error.contains("has 2 GPUs") && error.contains("--ranks-per-gpu 2"),
            "{error}"
        );
    }

    #[test]
    fn several_gpus_in_one_process_are_refused_by_name() {
        let layout = "tp2".parse().unwrap();
        let error = Devices::Cuda { gpus: 4 }
            .of_this_process(&layout, None)
            .unwrap_err();
        assert!(
            error.to_string().contains("`megaburn launch --nproc 2`"),
            "{error}"
        );
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_program_without_the_feature_says_how_to_build_one_with_it() {
        assert_eq!(DeviceChoice::Auto.find().unwrap(), Devices::Cpu);
        let error = DeviceChoice::Cuda.find().unwrap_err().to_string();
        assert!(error.contains("--features cuda"), "{error}");
    }
}
