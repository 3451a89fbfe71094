//! Forward and backward times of an MoE layer, compared with PyTorch's grouped GEMMs.
//!
//! ```sh
//! python3 benches/peer/moe.py > peer.txt
//! bench-moe --peer peer.txt
//! torchrun --nproc-per-node 8 benches/peer/moe_parallel.py > peer.txt
//! megaburn launch --nproc 8 -- bench-moe --peer peer.txt
//! ```

use std::{
    collections::BTreeMap, convert::Infallible, ffi::OsString, path::PathBuf, process::ExitCode,
    time::Duration,
};

use burn::{
    prelude::Device,
    tensor::{DType, Distribution, Tensor, TensorData},
};
use clap::Parser;
use megaburn::{
    autograd::backward_from,
    collective::{ConnectOptions, Group, ProcessGroups, RankEnv, ReduceOp, connect},
    cuda::{self, CudaQueue, timing::elapsed},
    kernels::GroupedGemmChoice,
    launch::tie_to_launcher,
    mesh::Layout,
    parallel::{
        BalanceChoice, BatchContext, LoadBalance, Moe, MoeConfig, MoeOptions, load_params,
        main_grads, read_params,
    },
};

use super::{peer_times, ranks::gib};
use crate::{
    Failure,
    report::{Args, Report, Table},
    timing::Times,
};

#[derive(Debug, Parser)]
struct MoeArgs {
    #[command(flatten)]
    report: Args,
    /// The output of `peer/moe.py` on the same GPU, or of `peer/moe_parallel.py` on the same GPUs.
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// Tokens of each rank.
    #[arg(long, default_value_t = 4096)]
    tokens: usize,
    /// Measure one rank's share of the experts as if this number of ranks held them all, with as
    /// many tokens as arrive at such a rank, each for one expert: its computation without its
    /// communication. The router sees more tokens than on a real rank.
    #[arg(long, value_name = "RANKS", default_value_t = 1)]
    share_of: usize,
    /// How the experts' GEMMs are computed: auto, together or each.
    #[arg(long, default_value = "auto", value_parser = products)]
    products: GroupedGemmChoice,
    /// Layers to measure; all if none is named.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Number of timed passes.
    #[arg(long, default_value_t = 10)]
    passes: usize,
}

fn products(name: &str) -> Result<GroupedGemmChoice, String> {
    let all = [
        GroupedGemmChoice::Auto,
        GroupedGemmChoice::Together,
        GroupedGemmChoice::Each,
    ];
    let found = all
        .into_iter()
        .find(|products| products.to_string() == name);
    found.ok_or_else(|| "the value is auto, together or each".into())
}

/// Runs the measurement.
pub fn main(command: Vec<OsString>) -> ExitCode {
    match run(&MoeArgs::parse_from(command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Megatron-LM's proxies (`tests/functional_tests/test_cases/common/moe_perf`), and a layer of
/// Qwen3-30B-A3B.
fn proxies() -> [(&'static str, MoeConfig); 3] {
    let mixtral = MoeConfig::new(4096, 14_336, 8, 2);
    let deepseek = MoeConfig::new(7168, 2048, 32, 8)
        .with_sigmoid(true)
        .with_scale(2.5)
        .with_groups(Some([8, 4, 2]));
    let qwen3 = MoeConfig::new(2048, 768, 128, 8);
    [
        ("mixtral", mixtral),
        ("deepseek", deepseek),
        ("qwen3", qwen3),
    ]
}

fn run(args: &MoeArgs) -> Result<(), Failure> {
    tie_to_launcher()?;
    let gpus = cuda::start()?;
    let env = RankEnv::from_env()?;
    let gpu = env.as_ref().map_or(Some(0), |env| env.gpu(gpus));
    let device =
        Device::cuda(gpu.ok_or("more ranks than GPUs on this host (CUDA_VISIBLE_DEVICES)")?);
    let world = match env {
        Some(env) => connect(&ConnectOptions::new(env))?,
        None => Group::single(0),
    };
    let ranks = world.size();
    let layout = Layout {
        dp: ranks,
        ep: ranks,
        ..Layout::SINGLE
    };
    let groups = ProcessGroups::new(&world, layout)?;
    let about = format!(
        "Layers of experts of Megatron-LM's proxies in bf16, {} tokens on each of {ranks} GPUs, \
        over which the experts are sharded, each token's experts chosen round robin; weight \
        gradients in f32. Milliseconds of the device, the slowest rank's, the median of {} \
        passes.",
        args.tokens, args.passes
    );
    let peer = peer_times(args.peer.as_deref())?;
    let mut report = Report::new("moe", &about);
    let head = [
        "layer",
        "forward ms",
        "peer",
        "backward ms",
        "peer",
        "ratio",
        "TFLOP/s",
        "GiB",
    ];
    let part = match args.share_of {
        1 => String::new(),
        ranks => format!(", one's share of {ranks} ranks"),
    };
    let mut table = Table::new(format!("{ranks} GPUs, {} tokens{part}", args.tokens), &head);
    let is_wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|only| only == name);
    for (name, config) in proxies().into_iter().filter(|(name, _)| is_wanted(name)) {
        let (config, tokens) = match args.share_of {
            1 => (config, args.tokens),
            ranks => share(&config, args.tokens, ranks)?,
        };
        let [forward, backward, most] = measured(&config, &groups, (tokens, args), &device)?;
        let theirs = |pass: &str| peer.get(&format!("{name} {pass}")).copied();
        let [of_forward, of_backward] = ["forward", "backward"].map(theirs);
        let told = |time: Option<f64>| time.map_or("-".into(), |time| format!("{time:.2}"));
        let both = of_forward.zip(of_backward);
        let ratio = both.map(|(a, b)| (forward + backward) / (a + b));
        let flops = 6.0 * (3 * config.d_model * config.d_ffn * config.top_k * tokens) as f64;
        table.row(vec![
            name.into(),
            format!("{forward:.2}"),
            told(of_forward),
            format!("{backward:.2}"),
            told(of_backward),
            told(ratio),
            format!("{:.0}", flops / (forward + backward) / 1e9),
            format!("{:.2}", gib(most as u64)),
        ]);
    }
    if world.rank() != 0 {
        return Ok(());
    }
    report.table(&table);
    report.finish(&args.report)
}

/// The experts of one of `ranks` ranks, and the number of assignments that arrive at it.
fn share(config: &MoeConfig, tokens: usize, ranks: usize) -> Result<(MoeConfig, usize), Failure> {
    let MoeConfig {
        num_experts, top_k, ..
    } = *config;
    if ranks == 0 || !num_experts.is_multiple_of(ranks) {
        return Err(
            format!("{num_experts} experts are not divisible by --share-of {ranks}").into(),
        );
    }
    let config = MoeConfig {
        num_experts: num_experts / ranks,
        top_k: 1,
        ..config.clone()
    };
    Ok((config.with_groups(None), tokens * top_k))
}

/// Median milliseconds of a forward and of a backward pass, and the most bytes that tensors occupy
/// after the forward; each is the largest of all ranks.
fn measured(
    config: &MoeConfig,
    groups: &ProcessGroups,
    (tokens, args): (usize, &MoeArgs),
    device: &Device,
) -> Result<[f64; 3], Failure> {
    let tracked = device.clone().autodiff();
    let options = MoeOptions {
        balance: LoadBalance {
            choice: BalanceChoice::RoundRobin,
            ..LoadBalance::default()
        },
        grouped_gemm: args.products,
        ..MoeOptions::default()
    };
    let config = config.clone().with_name("moe");
    let layer = in_bf16(config.init(groups, options, &tracked)?);
    let sums = main_grads(&layer);
    sums.values().for_each(|sum| sum.attach());
    let shape = [tokens, 1, config.d_model];
    let normal = || {
        let x = Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), device);
        Tensor::<3>::from_inner(x.cast(DType::BF16))
    };
    let x = normal();
    let dy = normal();
    let context = BatchContext {
        loss_factor: Some(1.0),
        ..BatchContext::default()
    };
    let queue = CudaQueue::for_device(device).ok_or("the device is not a CUDA device")?;
    let mut times = [Times::default(), Times::default()];
    let mut held = 0;
    for pass in 0..args.passes + 5 {
        let x = x.clone().require_grad();
        groups.world.barrier()?;
        let mut y = None;
        let mut done = None;
        let forward = elapsed(&queue, || y = Some(layer.forward(x.clone(), &context)))?;
        held = held.max(cuda::memory::allocated(device).unwrap_or(0));
        let loss = backward_from(y.take().expect("the result was computed"), dy.clone());
        let backward = elapsed(&queue, || done = Some(loss.backward()))?;
        drop(done);
        if pass >= 5 {
            for (times, millis) in times.iter_mut().zip([forward, backward]) {
                times.push(Duration::from_secs_f64(f64::from(millis) / 1e3));
            }
        }
    }
    sums.values().for_each(|sum| drop(sum.take()));
    let [forward, backward] = times.map(|times| times.median() * 1e3);
    let mine = TensorData::from([forward, backward, held as f64]);
    let slowest: Vec<f64> = groups
        .world
        .all_reduce(mine, ReduceOp::Max)?
        .iter::<f64>()
        .collect();
    Ok([slowest[0], slowest[1], slowest[2]])
}

fn in_bf16(layer: Moe) -> Moe {
    let mut params: BTreeMap<_, _> = read_params(&layer).into_iter().collect();
    let next = |path: &str, _: &[usize]| {
        let data = params.remove(path).expect("each value is read once");
        Ok::<_, Infallible>(data.convert_dtype(DType::BF16))
    };
    match load_params(layer, next) {
        Ok(layer) => layer,
        Err(never) => match never {},
    }
}
