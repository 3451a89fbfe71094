//! The configuration that continues a run of Megatron-LM.

use megaburn_parallel::{CapacityScope, DropPolicy};
use megaburn_torch::pickle::Value;

use super::{
    args::Args,
    error::MegatronError,
    model_settings::{has_experts, model},
    precision_settings::precision,
    schedule_settings::Schedules,
};
use crate::config::{
    BatchRampConfig, DataConfig, DataOrder, Dtype, GenerateConfig, MoeTrainingConfig,
    ParallelConfig, RunConfig, SourceConfig, TrainConfig, TrainingConfig,
};

/// Arguments that say where the data is, and are not converted.
const OTHER_DATA: [&str; 5] = [
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "data_args_path",
    "per_split_data_args_path",
];

/// A configuration, and what a person should know about it.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) config: TrainConfig,
    pub(super) notes: Vec<String>,
}

impl Settings {
    /// The configuration of a run with `vocab` token ids.
    ///
    /// # Errors
    /// An argument is missing, or asks for something that megaburn does not do.
    pub(super) fn of(
        args: Args,
        schedules: &Schedules,
        vocab: usize,
    ) -> Result<Self, MegatronError> {
        let mut notes = Vec::new();
        let model = model(args, vocab)?;
        let train = training(args, &mut notes)?;
        let defaults = TrainConfig::default();
        let mut optimizer = schedules.optimizer(train.global_batch, &mut notes)?;
        if train.dtype == Dtype::Bf16 && !args.flag("accumulate_allreduce_grads_in_fp32")? {
            optimizer.main_grads_dtype = Dtype::Bf16;
        }
        notes.extend(precision_notes(args, train.dtype)?);
        let config = TrainConfig {
            run: RunConfig {
                seed: args.seed()?,
                ..defaults.run
            },
            model,
            parallel: parallel(args)?,
            data: data(args, &mut notes)?,
            train,
            optimizer,
            moe: match has_experts(args)? {
                true => experts(args)?,
                false => MoeTrainingConfig::default(),
            },
            precision: precision(args, &mut notes)?,
            generate: GenerateConfig {
                tokens: 0,
                ..GenerateConfig::default()
            },
            ..defaults
        };
        Ok(Self { config, notes })
    }
}

/// Where Megatron-LM computes in another type than megaburn.
fn precision_notes(args: Args, dtype: Dtype) -> Result<Vec<String>, MegatronError> {
    let mut notes = Vec::new();
    let is_bf16 = dtype == Dtype::Bf16;
    if is_bf16 && args.flag("fp32_residual_connection")? {
        notes.push(
            "argument `fp32_residual_connection` is on: megaburn adds residuals in bf16".into(),
        );
    }
    let router = args.optional_text("moe_router_dtype")?;
    let is_same = match router {
        Some(router) => router == "fp32",
        None => !is_bf16,
    };
    if has_experts(args)? && !is_same {
        let router = router.unwrap_or("None");
        notes.push(format!(
            "argument `moe_router_dtype` is {router}: megaburn computes the router's logits in f32"
        ));
    }
    Ok(notes)
}

fn training(args: Args, notes: &mut Vec<String>) -> Result<TrainingConfig, MegatronError> {
    args.off(
        &["fp16"],
        "the state of the loss scale is not converted; use bf16",
    )?;
    args.unset(
        &["step_batch_size_schedule"],
        "megaburn's batch grows as with --rampup-batch-size only",
    )?;
    let global_batch = args.size("global_batch_size")?;
    if global_batch == 0 {
        return Err(args.refused("global_batch_size", "it must be at least 1"));
    }
    let defaults = TrainingConfig::default();
    let dropout = |name| Ok::<_, MegatronError>(args.optional_number(name)?.unwrap_or(0.0));
    let (hidden_dropout, attention_dropout) =
        (dropout("hidden_dropout")?, dropout("attention_dropout")?);
    if hidden_dropout > 0.0 || attention_dropout > 0.0 {
        notes.push(
            "arguments `hidden_dropout` and `attention_dropout` are kept, but masks are other \
            random numbers: losses differ by them"
                .into(),
        );
    }
    let evaluations = args.optional_size("eval_iters")?.unwrap_or(0);
    let interval = |name| Ok::<_, MegatronError>(args.optional_size(name)?.unwrap_or(0) as u64);
    Ok(TrainingConfig {
        steps: steps(args, global_batch)?,
        dtype: if args.flag("bf16")? {
            Dtype::Bf16
        } else {
            Dtype::F32
        },
        hidden_dropout,
        attention_dropout,
        global_batch,
        batch_ramp: batch_ramp(args)?,
        micro_batch: args.size("micro_batch_size")?,
        eval_interval: match evaluations {
            0 => 0,
            _ => interval("eval_interval")?,
        },
        eval_batches: evaluations.max(1),
        log_interval: interval("log_interval")?.max(1),
        checkpoint_interval: interval("save_interval")?,
        ..defaults
    })
}

fn steps(args: Args, global_batch: usize) -> Result<u64, MegatronError> {
    if let Some(steps) = args
        .optional_size("train_iters")?
        .filter(|steps| *steps > 0)
    {
        return Ok(steps as u64);
    }
    let samples = args.optional_size("train_samples")?;
    match samples.filter(|_| args.get("rampup_batch_size").is_none()) {
        Some(samples) => Ok((samples / global_batch) as u64),
        None => Err(MegatronError::NoSteps {
            path: args.path().into(),
        }),
    }
}

fn batch_ramp(args: Args) -> Result<Option<BatchRampConfig>, MegatronError> {
    let name = "rampup_batch_size";
    let Some(value) = args.get(name) else {
        return Ok(None);
    };
    // Megatron-LM keeps them as strings.
    let number = |value: Value| match value.as_str() {
        Some(text) => text.parse().ok(),
        None => value.as_usize(),
    };
    let numbers: Option<Vec<usize>> = value
        .sequence()
        .and_then(|values| values.iter().map(number).collect());
    match numbers.as_deref() {
        Some(&[start, increment, samples]) => Ok(Some(BatchRampConfig {
            start,
            increment,
            samples: samples as u64,
        })),
        _ => Err(args.refused(
            name,
            "it must be three numbers: start, increment and samples",
        )),
    }
}

fn data(args: Args, notes: &mut Vec<String>) -> Result<DataConfig, MegatronError> {
    let why = "megaburn's data.documents pads documents, so samples would not be the same";
    args.off(&["reset_position_ids", "reset_attention_mask"], why)?;
    args.off(&["fim_data"], "set [data.fim] in a run of megaburn instead")?;
    args.off(&["sft"], "data of conversations is not read")?;
    args.only_text(
        "dataloader_type",
        &["single"],
        "megaburn reads in the order of `single`",
    )?;
    let eod_mask_loss = args.flag("eod_mask_loss")?;
    if eod_mask_loss && !args.flag("calculate_per_token_loss")? {
        notes.push(
            "argument `calculate_per_token_loss` is off: Megatron-LM takes the mean of the means of \
            micro-batches, and megaburn the mean over all tokens that `eod_mask_loss` leaves"
                .into(),
        );
    }
    let train = sources(args)?;
    if train.is_empty() {
        notes.push(format!(
            "argument `data_path` is not set{}: give the data with --data or --set data.train",
            other_data(args)?
        ));
    }
    notes.push(match (args.optional_text("tokenizer_type")?, args.get("tokenizer_model")) {
        (Some(kind), Some(model)) => format!(
            "arguments `tokenizer_type` {kind} and `tokenizer_model` {model} are not converted: set \
            data.tokenizer to its tokenizer.json for text or generation"
        ),
        _ => "data.tokenizer is not set: set it to a tokenizer.json for text or generation".into(),
    });
    let (path, train) = match <[SourceConfig; 1]>::try_from(train) {
        Ok([only]) => (Some(only.path), Vec::new()),
        Err(several) => (None, several),
    };
    let defaults = DataConfig::default();
    let split = args.optional_text("split")?.map(String::from);
    Ok(DataConfig {
        path,
        train,
        order: DataOrder::Megatron,
        seq_len: args.size("seq_length")?,
        eod_mask_loss,
        validation_fraction: match split {
            Some(_) => defaults.validation_fraction,
            None => 0.0,
        },
        split,
        ..defaults
    })
}

/// Which of the other arguments say where the data is.
fn other_data(args: Args) -> Result<String, MegatronError> {
    let mut set: Vec<&str> = OTHER_DATA
        .into_iter()
        .filter(|name| args.get(name).is_some())
        .collect();
    if args.flag("mock_data")? {
        set.push("mock_data");
    }
    let verb = if set.len() == 1 { "is" } else { "are" };
    Ok(match set.is_empty() {
        true => String::new(),
        false => format!(", and `{}` {verb} not converted", set.join("`, `")),
    })
}

/// The data sets of `--data-path`: prefixes, or weights and prefixes in turn.
fn sources(args: Args) -> Result<Vec<SourceConfig>, MegatronError> {
    let name = "data_path";
    let Some(value) = args.get(name) else {
        return Ok(Vec::new());
    };
    let texts = value.sequence().and_then(|values| {
        let texts = values.iter().map(|value| value.as_str());
        texts.collect::<Option<Vec<_>>>()
    });
    let texts = texts.ok_or_else(|| args.refused(name, "it must be a list of strings"))?;
    let source = |path: &str, weight| SourceConfig {
        path: path.into(),
        weight,
        ..SourceConfig::default()
    };
    let has_weights = texts.len() > 1
        && texts.len().is_multiple_of(2)
        && texts
            .iter()
            .step_by(2)
            .all(|text| text.parse::<f64>().is_ok());
    Ok(match has_weights {
        false => texts.into_iter().map(|path| source(path, None)).collect(),
        true => texts
            .chunks_exact(2)
            .map(|pair| source(pair[1], pair[0].parse().ok()))
            .collect(),
    })
}

fn experts(args: Args) -> Result<MoeTrainingConfig, MegatronError> {
    let name = "moe_router_load_balancing_type";
    let mut moe = MoeTrainingConfig {
        z_loss: args.optional_number("moe_z_loss_coeff")?.unwrap_or(0.0),
        force_balance: args.flag("moe_router_force_load_balancing")?,
        ..MoeTrainingConfig::default()
    };
    // A negative one means no capacity in Megatron-Core too.
    let factor = args.optional_number("moe_expert_capacity_factor")?;
    moe.capacity_factor = factor.filter(|factor| *factor >= 0.0);
    if moe.capacity_factor.is_some() {
        moe.capacity_scope = CapacityScope::Rank;
        moe.pad_to_capacity = args.flag("moe_pad_expert_input_to_capacity")?;
        if args.optional_text("moe_token_drop_policy")? == Some("position") {
            moe.drop_policy = DropPolicy::Position;
        }
    }
    // A list has a coefficient for each kind of loss.
    let all = |name| {
        args.get(name).map(|value| match value.sequence() {
            Some(values) => values.iter().collect(),
            None => vec![value],
        })
    };
    let kinds = all(name).unwrap_or_default();
    let coefficients = all("moe_aux_loss_coeff").unwrap_or_default();
    for (index, kind) in kinds.into_iter().enumerate() {
        let coefficient = coefficients.get(index).and_then(|value| value.as_f64());
        let coefficient = coefficient.unwrap_or(0.0);
        match kind.as_str() {
            Some("aux_loss") => moe.aux_loss = coefficient,
            Some("seq_aux_loss") => moe.seq_aux_loss = coefficient,
            Some("global_aux_loss") => moe.global_aux_loss = coefficient,
            Some("sinkhorn") => moe.sinkhorn = true,
            Some("none") => {}
            _ => return Err(args.refused(name, "megaburn does not have it")),
        }
    }
    Ok(moe)
}

fn parallel(args: Args) -> Result<ParallelConfig, MegatronError> {
    let degree = |name| Ok::<_, MegatronError>(args.optional_size(name)?.unwrap_or(1));
    let [tp, pp, cp] = [
        degree("tensor_model_parallel_size")?,
        degree("pipeline_model_parallel_size")?,
        degree("context_parallel_size")?,
    ];
    let world = args.optional_size("world_size")?;
    let ranks = args.product(&[
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    ])?;
    let rest = world.map(|world| (world / ranks.max(1)).max(1));
    let experts = has_experts(args)?;
    let etp = args.optional_size("expert_tensor_parallel_size")?;
    Ok(ParallelConfig {
        tp: Some(tp),
        pp,
        cp,
        dp: args.optional_size("data_parallel_size")?.or(rest),
        ep: if experts {
            degree("expert_model_parallel_size")?
        } else {
            1
        },
        etp: if experts { etp.unwrap_or(tp) } else { 1 },
        sp: Some(tp > 1 && args.flag("sequence_parallel")?),
        zero: u8::from(args.flag("use_distributed_optimizer")?),
        ..ParallelConfig::default()
    })
}
