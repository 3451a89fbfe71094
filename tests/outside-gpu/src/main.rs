//! Trains two `ParallelLinear`s with Burn's own optimizer, one process a GPU, and prints the loss
//! before and after: the same on one GPU and on several.
//!
//! ```sh
//! RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 outside-gpu
//! megaburn launch --nproc 2 -- outside-gpu
//! ```

use burn::{
    module::Module,
    optim::{AdamWConfig, GradientsParams},
    prelude::*,
    tensor::activation::gelu,
};
use megaburn::{
    collective::{ConnectOptions, RankEnv, connect},
    prelude::{Group, ParallelError, ParallelLinear, ParallelLinearConfig},
};

#[derive(Module, Debug)]
struct Net {
    up: ParallelLinear,
    down: ParallelLinear,
}

impl Net {
    fn new(group: &Group, device: &Device) -> Result<Self, ParallelError> {
        Ok(Self {
            up: ParallelLinearConfig::column(2, 68).with_name("up").init(group, device)?,
            down: ParallelLinearConfig::row(68, 1).with_name("down").init(group, device)?,
        })
    }

    fn forward(&self, points: Tensor<2>) -> Tensor<2> {
        self.down.forward(gelu(self.up.forward(points)))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let env = RankEnv::from_env()?.ok_or("start it with `megaburn launch`")?;
    let gpus = megaburn::cuda::start()?;
    let device = Device::cuda(env.gpu(gpus).ok_or("more ranks than GPUs on this host (CUDA_VISIBLE_DEVICES)")?);
    let group = connect(&ConnectOptions::new(env))?;
    let points = grid(24, &device);
    let surface = (points.clone() * 3.0).sin().prod_dim(1);
    let points = Tensor::from_inner(points);
    let surface = Tensor::from_inner(surface);
    let mut net = Net::new(&group, &device.autodiff())?;
    let mut optimizer = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for _ in 0..200 {
        let loss = (net.forward(points.clone()) - surface.clone()).square().mean();
        losses.push(loss.clone().inner());
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(5e-3, net, grads);
    }
    let losses: Vec<f32> = Tensor::cat(losses, 0).into_data().try_to_vec()?;
    let rank = group.rank();
    let ranks = group.size();
    println!("rank {rank} of {ranks}: loss {:.6} -> {:.6}", losses[0], losses[199]);
    Ok(())
}

/// `n * n` points of the square from -1 to 1.
fn grid(n: usize, device: &Device) -> Tensor<2> {
    let line = Tensor::<1, Int>::arange(0..n as i64, device).float();
    let line = line * (2.0 / (n - 1) as f64) - 1.0;
    let x = line.clone().reshape([n, 1, 1]).expand([n, n, 1]);
    let y = line.reshape([1, n, 1]).expand([n, n, 1]);
    Tensor::cat(vec![x, y], 2).reshape([n * n, 2])
}
