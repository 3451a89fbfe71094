//! `megaburn doctor`: examines the hosts and GPUs of a job before it trains.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Args;
use megaburn_collective::{ConnectOptions, Group, GroupOptions, RankEnv, connect, free_port};
use megaburn_doctor::{Diagnosis, DoctorConfig};
use megaburn_train::{ConfigLayers, Exit, TrainError};
use serde_json::json;

use super::{
    device::{DeviceArg, launch_silently},
    exit_code, print,
};

#[derive(Args)]
pub(super) struct DoctorArgs {
    /// A folder that all ranks must share, such as that of the runs. It is looked at, and a file of
    /// each rank is written, read and removed in it.
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    folder: Option<PathBuf>,
    /// A TOML file of settings, as for `megaburn train --config`: examines its `run.dir`.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print one JSON object instead of text. The names of its numbers end in their units.
    #[arg(long)]
    json: bool,
    /// Measure rates for a third of the time.
    #[arg(long)]
    quick: bool,
    /// How long ranks may take to meet.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
    /// What to examine. Default: GPUs if there are any and the program was built for them, otherwise
    /// the CPU.
    #[arg(long, value_enum)]
    device: Option<DeviceArg>,
}

impl DoctorArgs {
    /// Prints what was found. Exits with 0 if there are no findings, with 1 if there are, and with 2
    /// if the arguments cannot be used. All ranks exit alike.
    pub(super) fn run(self) -> Result<ExitCode, TrainError> {
        let folder = match &self.config {
            Some(file) => Some(PathBuf::from(
                ConfigLayers::new().with_file(file)?.load()?.run.dir,
            )),
            None => self.folder.clone(),
        };
        let env = RankEnv::from_env()?;
        let gpus = gpu::visible(self.device);
        if env.is_none() && gpus > 1 {
            let outcome = launch_silently(gpus, std::env::args_os().skip(1))?;
            return Ok(exit_code(outcome.exit_code()));
        }
        let rank = env.as_ref().map_or(0, |env| env.rank);
        match self.examine(env, folder.as_deref()) {
            Ok(is_well) => Ok(code(is_well)),
            Err(why) => {
                // Every rank knows something else about a failure; rank 0 prints for programs.
                if rank == 0 {
                    self.print(&Diagnosis::of_failure(&why))?;
                } else {
                    print::error(why);
                }
                Ok(code(false))
            }
        }
    }

    /// Whether there are no findings.
    fn examine(&self, env: Option<RankEnv>, folder: Option<&Path>) -> Result<bool, String> {
        let mut config = DoctorConfig::new().with_quick(self.quick);
        if let Some(folder) = folder {
            config = config.with_folder(folder);
        } else {
            config = config.with_unchecked("the shared folder: name it by --folder or --config");
        }
        let (config, gpu) = gpu::prepare(config, self.device, env.as_ref());
        let start = Instant::now();
        let (world, met) = match env {
            Some(env) => {
                let address = format!("{}:{}", env.master_addr, env.master_port);
                let ranks = env.world_size;
                let timeout = Duration::from_secs(self.timeout);
                let options = ConnectOptions::new(env)
                    .with_rendezvous_timeout(timeout)
                    .with_group(GroupOptions {
                        timeout: timeout.max(Duration::from_secs(30)),
                        ..GroupOptions::default()
                    });
                let world = connect(&options).map_err(|error| error.to_string())?;
                world.meet_all().map_err(|error| error.to_string())?;
                let taken = start.elapsed().as_secs_f64();
                let met = format!(
                    "{ranks} ranks met at {address}, and each connected to all others, in {taken:.2} s"
                );
                (world, met)
            }
            None => {
                let port = free_port().map_err(|error| format!("no port is free: {error}"))?;
                let met = format!("port {port} of this host can be used");
                (Group::single(0), met)
            }
        };
        let config = config.with_rendezvous(Some(met));
        let examined = config.examine(&world, gpu::under_test(&gpu));
        let examined = examined.map_err(|error| error.to_string())?;
        if let Some(diagnosis) = &examined.diagnosis {
            self.print(diagnosis).map_err(|error| error.to_string())?;
        }
        // A launcher ends all ranks when one exits with an error, so rank 0 prints first.
        world.barrier().map_err(|error| error.to_string())?;
        Ok(examined.is_well)
    }

    fn print(&self, diagnosis: &Diagnosis) -> Result<(), TrainError> {
        match self.json {
            true => print::result(json!(diagnosis)),
            false => print::result(diagnosis),
        }
    }
}

fn code(is_well: bool) -> ExitCode {
    match is_well {
        true => Exit::Done.into(),
        false => Exit::Failed.into(),
    }
}

/// The GPU of a rank.
#[cfg(feature = "cuda")]
mod gpu {
    use std::path::Path;

    use megaburn_collective::RankEnv;
    use megaburn_cuda::libraries::num_gpus;
    use megaburn_doctor::{CudaGpu, DoctorConfig, GpuUnderTest, library_facts};

    use super::DeviceArg;

    /// The number of GPUs to examine.
    pub(super) fn visible(device: Option<DeviceArg>) -> usize {
        match device {
            Some(DeviceArg::Cpu) => 0,
            _ => num_gpus(),
        }
    }

    /// Whether this host should have GPUs.
    fn is_expected(device: Option<DeviceArg>) -> bool {
        let has_device_files = ["/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia"]
            .iter()
            .any(|path| Path::new(path).exists());
        device == Some(DeviceArg::Cuda) || (device.is_none() && has_device_files)
    }

    pub(super) fn prepare(
        config: DoctorConfig,
        device: Option<DeviceArg>,
        env: Option<&RankEnv>,
    ) -> (DoctorConfig, Option<CudaGpu>) {
        let gpus = visible(device);
        if gpus == 0 && !is_expected(device) {
            let why = "GPUs: the driver shows none, or --device cpu was chosen";
            return (config.with_unchecked(why), None);
        }
        // Before anything is computed, for what the libraries say about themselves.
        let config = config.with_libraries(library_facts());
        if let Err(error) = megaburn_cuda::start() {
            return (
                config.with_unchecked(format!("work on GPUs: {error}")),
                None,
            );
        }
        let index = env.map_or(Some(0), |env| env.gpu(gpus));
        let Some(index) = index else {
            let why = format!(
                "the GPU of a rank: more ranks than the {gpus} GPUs of a host (CUDA_VISIBLE_DEVICES)"
            );
            return (config.with_unchecked(why), None);
        };
        (config, Some(CudaGpu::new(index)))
    }

    pub(super) fn under_test(gpu: &Option<CudaGpu>) -> Option<&dyn GpuUnderTest> {
        gpu.as_ref().map(|gpu| gpu as &dyn GpuUnderTest)
    }
}

/// A program without support of GPUs.
#[cfg(not(feature = "cuda"))]
mod gpu {
    use megaburn_collective::RankEnv;
    use megaburn_doctor::{DoctorConfig, GpuUnderTest, LibraryFacts};

    use super::DeviceArg;

    pub(super) fn visible(_: Option<DeviceArg>) -> usize {
        0
    }

    pub(super) fn prepare(
        config: DoctorConfig,
        device: Option<DeviceArg>,
        _: Option<&RankEnv>,
    ) -> (DoctorConfig, ()) {
        let why = "GPUs and NVIDIA's libraries: this program was built without the feature `cuda`";
        let config = config.with_unchecked(why);
        if device != Some(DeviceArg::Cuda) {
            return (config, ());
        }
        let library = LibraryFacts {
            name: "CUDA".into(),
            error: Some("build the program with `--features cuda`, or choose --device cpu".into()),
            ..LibraryFacts::default()
        };
        (config.with_libraries(vec![library]), ())
    }

    pub(super) fn under_test(_: &()) -> Option<&'static dyn GpuUnderTest> {
        None
    }
}
