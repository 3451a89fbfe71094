//! `megaburn convert`: imports models of Hugging Face and torchtitan, and exports those of Hugging
//! Face.

use std::path::PathBuf;

use burn::tensor::DType;
use clap::{Args, Subcommand, ValueEnum};
use megaburn_checkpoint::{HfWriteOptions, hf::HfQuantization};
use megaburn_models::{
    convert::{export, import},
    upcycle::{UpcycleOptions, upcycle},
};
use megaburn_train::TrainError;

use super::{interrupt::end_clean_on_signals, print};

#[derive(Subcommand)]
pub(super) enum ConvertCommand {
    /// Convert a model of Hugging Face or torchtitan to a checkpoint at step 0, which any layout can
    /// load.
    Import(ImportArgs),
    /// Convert the model of a checkpoint or run to a folder that Transformers can load.
    Export(ExportArgs),
    /// Convert a dense model to a checkpoint of an equivalent mixture-of-experts model.
    Upcycle(UpcycleArgs),
}

#[derive(Args)]
pub(super) struct ImportArgs {
    /// Folder with `config.json` and safetensors files, PyTorch's `.bin` or `.pt` files, or a
    /// checkpoint of torchtitan.
    #[arg(value_name = "DIR")]
    from: PathBuf,
    /// The checkpoint to write.
    #[arg(value_name = "OUT")]
    to: PathBuf,
    /// Element type of the weights. Default: unchanged.
    #[arg(long, value_enum, value_name = "D")]
    dtype: Option<DtypeArg>,
    /// Replace an existing checkpoint.
    #[arg(long)]
    force: bool,
}

#[derive(Args)]
pub(super) struct ExportArgs {
    /// A checkpoint, or a run, whose newest checkpoint is used.
    #[arg(value_name = "CKPT_OR_RUN")]
    from: PathBuf,
    /// The folder to write.
    #[arg(value_name = "HF_DIR")]
    to: PathBuf,
    /// Element type of the weights. Default: unchanged, and bf16 with --quantize.
    #[arg(long, value_enum, value_name = "D")]
    dtype: Option<DtypeArg>,
    /// Write the weights of attention, MLPs and experts in FP8, in a form that vLLM, SGLang and
    /// Transformers read.
    #[arg(long, value_enum, value_name = "FORM")]
    quantize: Option<QuantizeArg>,
    /// With fp8-block, round scales up to powers of two. Those of a run that trained with such scales
    /// (recipe blockwise) are rounded in any case.
    #[arg(long)]
    power_of_two_scales: bool,
    /// Largest size of the tensors in one file, in GB.
    #[arg(long, value_name = "GB", default_value_t = 5.0)]
    max_shard_gb: f64,
    /// Replace an existing Hugging Face model.
    #[arg(long)]
    force: bool,
}

#[derive(Args)]
pub(super) struct UpcycleArgs {
    /// A dense model: a folder of Hugging Face or torchtitan, a checkpoint or a run.
    #[arg(value_name = "MODEL")]
    from: PathBuf,
    /// The checkpoint to write.
    #[arg(value_name = "OUT")]
    to: PathBuf,
    /// Number of copies of each MLP.
    #[arg(long, value_name = "N", default_value_t = 8)]
    experts: usize,
    /// Number of experts per token.
    #[arg(long, value_name = "N", default_value_t = 2)]
    top_k: usize,
    /// Number of experts that each copy is split into.
    #[arg(long, value_name = "N", default_value_t = 1)]
    granularity: usize,
    /// Random seed of the routers' weights.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Replace an existing checkpoint.
    #[arg(long)]
    force: bool,
}

/// The element types of weights, under both of their usual names.
#[derive(Clone, Copy, ValueEnum)]
pub(super) enum DtypeArg {
    #[value(alias = "float32")]
    F32,
    #[value(alias = "bfloat16")]
    Bf16,
    #[value(alias = "float16")]
    F16,
}

/// The forms of FP8 weights (E4M3).
#[derive(Clone, Copy, ValueEnum)]
pub(super) enum QuantizeArg {
    /// One scale for 128 by 128 elements, as in DeepSeek-V3 (`quant_method` fp8).
    #[value(name = "fp8-block")]
    Block,
    /// One scale for each output feature (`compressed-tensors`).
    #[value(name = "fp8-channel")]
    Channel,
    /// One scale for each weight (`compressed-tensors`), for models without experts.
    #[value(name = "fp8-tensor")]
    Tensor,
}

impl QuantizeArg {
    fn form(self, powers_of_two: bool) -> HfQuantization {
        match self {
            Self::Block => HfQuantization::Block { powers_of_two },
            Self::Channel => HfQuantization::Channel,
            Self::Tensor => HfQuantization::Tensor,
        }
    }
}

impl From<DtypeArg> for DType {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            DtypeArg::F32 => Self::F32,
            DtypeArg::Bf16 => Self::BF16,
            DtypeArg::F16 => Self::F16,
        }
    }
}

impl ConvertCommand {
    pub(super) fn run(self) -> Result<(), TrainError> {
        end_clean_on_signals()?;
        match self {
            Self::Import(args) => args.run(),
            Self::Export(args) => args.run(),
            Self::Upcycle(args) => args.run(),
        }
    }
}

impl ImportArgs {
    fn run(self) -> Result<(), TrainError> {
        let Self {
            from,
            to,
            dtype,
            force,
        } = self;
        let source = import(&from, &to, dtype.map(DType::from), force)?;
        let family = source.config().family;
        let params = source.num_params();
        print::note(format!(
            "{family}, {params} parameters: {} -> {}",
            from.display(),
            to.display()
        ));
        print::note(format!(
            "to train it, --init {0}; to generate text, megaburn generate {0}",
            to.display()
        ));
        Ok(())
    }
}

impl UpcycleArgs {
    fn run(self) -> Result<(), TrainError> {
        let Self {
            from,
            to,
            experts,
            top_k,
            granularity,
            seed,
            force,
        } = self;
        let options = UpcycleOptions {
            num: experts,
            top_k,
            granularity,
            seed,
        };
        let config = upcycle(&from, &to, options, force)?;
        let experts = config.experts.expect("the upcycled model has experts");
        print::note(format!(
            "{}, {} experts per layer, top-k {}: {} -> {}",
            config.family,
            experts.num,
            experts.top_k,
            from.display(),
            to.display()
        ));
        print::note(format!("to train it, --init {}", to.display()));
        Ok(())
    }
}

impl ExportArgs {
    fn run(self) -> Result<(), TrainError> {
        let Self {
            from,
            to,
            dtype,
            quantize,
            power_of_two_scales,
            max_shard_gb,
            force,
        } = self;
        if power_of_two_scales && !matches!(quantize, Some(QuantizeArg::Block)) {
            return Err(TrainError::Invalid {
                key: "--power-of-two-scales",
                value: "set".into(),
                rule: "used with --quantize fp8-block only: no other form has such scales".into(),
            });
        }
        if !(max_shard_gb > 0.0 && max_shard_gb.is_finite()) {
            let key = "--max-shard-gb";
            let value = max_shard_gb.to_string();
            return Err(TrainError::Invalid {
                key,
                value,
                rule: "more than 0".into(),
            });
        }
        let max_shard_bytes = (max_shard_gb * 1e9) as u64;
        let dtype = dtype.map(DType::from);
        let options = HfWriteOptions {
            dtype,
            quantization: quantize.map(|form| form.form(power_of_two_scales)),
            max_shard_bytes,
            force,
            ..Default::default()
        };
        let written = export(&from, &to, &options)?;
        let num_files = written.files.len();
        let plural = if written.files.len() == 1 { "" } else { "s" };
        print::note(format!(
            "{} tensors, {} bytes in {num_files} file{plural}: {} -> {}",
            written.num_tensors,
            written.num_bytes,
            from.display(),
            to.display()
        ));
        Ok(())
    }
}
