//! `megaburn verify`: compares layouts with Transformers, or two models tensor by tensor.

mod text;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, ValueEnum};
use megaburn_checkpoint::{Checkpoint, HfDir, TensorSource, compare};
use megaburn_collective::RankEnv;
use megaburn_mesh::{Layout, MeshError};
use megaburn_models::{
    ModelError,
    source::{ModelSource, open_tensors},
};
use megaburn_train::{
    Exit, TrainError,
    config::{CpComm, Dtype},
    device::{DeviceChoice, Devices},
};
use megaburn_verify::{
    ActivationReport, Reference, Report, Tolerances, verify, verify_activations,
};
use serde_json::json;

use super::{
    begin,
    device::{DeviceArg, launch_silently},
    fail, print,
};
use text::{difference, line, tensor_json};

#[derive(Args)]
pub(super) struct VerifyArgs {
    /// A Hugging Face model with `reference.safetensors` and `reference.json`; or two models
    /// (folders of Hugging Face or torchtitan, checkpoints, runs) to compare tensor by tensor.
    #[arg(required = true, num_args = 1..=2, value_name = "DIR")]
    dirs: Vec<PathBuf>,
    /// A layout to compare. Repeatable. Default: tp1.
    #[arg(long, value_name = "L")]
    layout: Vec<String>,
    /// How ranks that share sequences (cp) exchange keys and values: auto, p2p, all_gather, a2a,
    /// a2aN+p2p.
    #[arg(long, value_name = "WAY", default_value = "auto", value_parser = cp_comm)]
    cp_comm: CpComm,
    /// Compare the output of each block and its gradient with one rank's, and name the first that
    /// differs; also with the hidden states of Transformers, if the reference has them. A difference
    /// is relative, and counts from --tol-grad on.
    #[arg(long)]
    activations: bool,
    /// Print only JSON on stdout: one object per line, for each layout or tensor.
    #[arg(long)]
    json: bool,
    /// Element type of parameters and activations; the reference is f32.
    #[arg(long, value_enum, default_value_t = DtypeArg::F32)]
    dtype: DtypeArg,
    /// Largest absolute difference of logits. Default: 1e-4, in bf16 0.1.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    tol_logits: Option<f64>,
    /// Largest absolute difference of the loss. Default: 1e-5, in bf16 4e-3.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    tol_loss: Option<f64>,
    /// Largest relative distance of a parameter's gradient. Default: 1e-3, in bf16 0.08.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    tol_grad: Option<f64>,
    /// Largest absolute difference of the loss at a training step. Default: 1e-4, in bf16 1e-2.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    tol_train: Option<f64>,
    /// The device that the ranks compute on.
    #[arg(long, value_enum, default_value_t = DeviceArg::Cpu)]
    device: DeviceArg,
}

fn cp_comm(text: &str) -> Result<CpComm, String> {
    CpComm::try_from(text.to_string())
}

/// The types that a model can compute in, under both of their usual names.
#[derive(Clone, Copy, ValueEnum)]
enum DtypeArg {
    #[value(alias = "float32")]
    F32,
    #[value(alias = "bfloat16")]
    Bf16,
}

impl From<DtypeArg> for Dtype {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            DtypeArg::F32 => Self::F32,
            DtypeArg::Bf16 => Self::Bf16,
        }
    }
}

impl VerifyArgs {
    /// Compares and prints. Exits with 0 if everything matches, 1 if not, and 2 for bad input.
    pub(super) fn run(self) -> ExitCode {
        begin(|| {
            let same = match &self.dirs[..] {
                [a, b] => self.compare(a, b),
                _ => self.layouts(),
            };
            Ok(match same {
                Ok(true) => Exit::Done.into(),
                Ok(false) => Exit::Failed.into(),
                // A full disk is not bad input.
                Err(error @ TrainError::Write { .. }) => return Err(error),
                Err(error) => fail(&error.to_string(), Exit::BadInput),
            })
        })
    }

    /// Whether every layout is within tolerance.
    fn layouts(&self) -> Result<bool, TrainError> {
        let dtype = Dtype::from(self.dtype);
        let mut tolerances = Tolerances::of(dtype);
        for (key, given, tolerance) in [
            ("--tol-logits", self.tol_logits, &mut tolerances.logits),
            ("--tol-loss", self.tol_loss, &mut tolerances.loss),
            ("--tol-grad", self.tol_grad, &mut tolerances.grad),
            ("--tol-train", self.tol_train, &mut tolerances.train),
        ] {
            *tolerance = given.unwrap_or(*tolerance);
            if tolerance.is_nan() || *tolerance < 0.0 {
                let value = tolerance.to_string();
                let rule = "0 or more".into();
                return Err(TrainError::Invalid { key, value, rule });
            }
        }
        let devices = DeviceChoice::from(self.device).find()?;
        let env = RankEnv::from_env()?;
        let is_first = env.as_ref().is_none_or(|env| env.rank == 0);
        let reference = Reference::open(&self.dirs[0])?.with_cp_comm(self.cp_comm);
        let texts = if self.layout.is_empty() {
            vec!["tp1".to_string()]
        } else {
            self.layout.clone()
        };
        // A text that is not a layout is bad input; refuse it before anything is computed.
        let mut layouts = Vec::new();
        for text in &texts {
            match text.parse::<Layout>() {
                Err(error @ MeshError::Syntax { .. }) => return Err(error.into()),
                layout => layouts.push(layout),
            }
        }
        let mut ok = true;
        let run = |layout: &Layout| {
            let env = env.clone();
            match self.activations {
                false => {
                    Compared::Model(verify(&reference, layout, dtype, &tolerances, devices, env))
                }
                true => Compared::Blocks(verify_activations(
                    &reference,
                    layout,
                    dtype,
                    &tolerances,
                    devices,
                    env,
                )),
            }
        };
        let refused = |text: &str, why: String| match self.activations {
            false => Compared::Model(Report::refused(&reference, text, why)),
            true => Compared::Blocks(ActivationReport::refused(&reference, text, why)),
        };
        for (text, layout) in texts.iter().zip(layouts) {
            let report = match layout {
                Ok(layout) if devices.need_processes(&layout, env.as_ref()) => {
                    match self.as_processes(text, &layout, devices) {
                        Ok(fine) => {
                            ok &= fine;
                            continue;
                        }
                        Err(error) => refused(text, error.to_string()),
                    }
                }
                Ok(layout) => run(&layout),
                Err(error) => refused(text, error.to_string()),
            };
            if !is_first {
                // The first rank prints. If another rank fails, the first rank has ended, too.
                ok &= report.error().is_none();
                continue;
            }
            ok &= report.is_ok();
            print::result(report.text(self.json))?
        }
        Ok(ok)
    }

    /// Whether one layout is within tolerance, with one process per rank; rank 0 prints the line.
    fn as_processes(
        &self,
        text: &str,
        layout: &Layout,
        devices: Devices,
    ) -> Result<bool, TrainError> {
        devices.hold(layout)?;
        let mut arguments = std::env::args_os().skip(1);
        let mut mine = Vec::new();
        while let Some(argument) = arguments.next() {
            match argument.to_str() {
                Some("--layout") => drop(arguments.next()),
                Some(flag) if flag.starts_with("--layout=") => {}
                _ => mine.push(argument),
            }
        }
        mine.extend(["--layout".into(), text.into()]);
        let outcome = launch_silently(layout.world_size(), mine)?;
        match outcome.exit_code() {
            0 => Ok(true),
            // Rank 0 has printed the values that are out of tolerance.
            code if code == i32::from(Exit::Failed.code()) => Ok(false),
            _ => Err(TrainError::Launch {
                why: outcome.to_string(),
            }),
        }
    }

    /// Whether two models are bitwise equal.
    fn compare(&self, a: &Path, b: &Path) -> Result<bool, TrainError> {
        if !self.layout.is_empty() {
            let key = "--layout";
            let value = self.layout.join(", ");
            let rule = "omitted when two models are compared".into();
            return Err(TrainError::Invalid { key, value, rule });
        }
        let opened = [Side::open(a)?, Side::open(b)?];
        let [of_a, of_b] = match &opened {
            [Side::Hf(a), Side::Hf(b)] => [a as &dyn TensorSource, b],
            // State that only one of the checkpoints has (e.g. the optimizer's) is not a difference
            // of the models.
            [Side::Model(a), Side::Model(b)] if has_state(a) == has_state(b) => {
                [checkpoint(a) as &dyn TensorSource, checkpoint(b)]
            }
            _ => {
                let [a, b] = [
                    ModelSource::open_verified(a)?,
                    ModelSource::open_verified(b)?,
                ];
                return self.print(&*a.as_hf()?, &*b.as_hf()?);
            }
        };
        self.print(of_a, of_b)
    }

    fn print(&self, a: &dyn TensorSource, b: &dyn TensorSource) -> Result<bool, TrainError> {
        let mut printed = Ok(());
        let found = compare(a, b, |tensor| {
            let line = if self.json {
                Some(tensor_json(tensor).to_string())
            } else {
                difference(tensor)
            };
            if let (Ok(()), Some(line)) = (&printed, line) {
                printed = print::result(line);
            }
        });
        let found = found.map_err(ModelError::from)?;
        printed?;
        if !self.json {
            print::result(format!(
                "{} tensors, {} bitwise equal; largest difference {:e}{}",
                found.num_tensors,
                found.num_bitwise_equal,
                found.max_abs,
                found
                    .worst
                    .as_ref()
                    .map(|name| format!(" in {name}"))
                    .unwrap_or_default()
            ))?;
        }
        Ok(found.is_identical())
    }
}

/// What was found for one layout.
enum Compared {
    Model(Report),
    Blocks(ActivationReport),
}

impl Compared {
    fn error(&self) -> Option<&str> {
        match self {
            Self::Model(report) => report.error.as_deref(),
            Self::Blocks(report) => report.error.as_deref(),
        }
    }

    fn is_ok(&self) -> bool {
        match self {
            Self::Model(report) => report.ok,
            Self::Blocks(report) => report.is_ok(),
        }
    }

    fn text(&self, json: bool) -> String {
        match self {
            Self::Model(report) if json => json!(report).to_string(),
            Self::Model(report) => line(report),
            Self::Blocks(report) if json => json!(report).to_string(),
            Self::Blocks(report) => report.to_string(),
        }
    }
}

/// One of the two models that are compared.
enum Side {
    Hf(HfDir),
    Model(Box<ModelSource>),
}

impl Side {
    fn open(path: &Path) -> Result<Self, ModelError> {
        // Any architecture is accepted: comparing tensors needs no knowledge of the model.
        Ok(match open_tensors(path)? {
            Some(dir) => Self::Hf(dir),
            None => Self::Model(Box::new(ModelSource::open_verified(path)?)),
        })
    }
}

fn checkpoint(source: &ModelSource) -> &Checkpoint {
    source.checkpoint().expect("the source is a checkpoint")
}

/// Whether the checkpoint contains optimizer state in addition to the weights.
fn has_state(source: &ModelSource) -> bool {
    !checkpoint(source).trainer().is_null()
}
