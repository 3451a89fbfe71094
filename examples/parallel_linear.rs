//! An ordinary Burn program made tensor parallel: `ParallelLinear` replaces its `Linear` layers,
//! and it reaches the same loss on 1, 2 and 4 ranks.
//!
//! ```sh
//! cargo run --release --example parallel_linear
//! ```

use burn::{
    module::Module,
    optim::{AdamWConfig, GradientsParams},
    prelude::Device,
    tensor::{Tensor, activation::gelu},
};
use megaburn::prelude::{
    Group, GroupOptions, ParallelError, ParallelLinear, ParallelLinearConfig, run_threads,
};

/// A two-layer MLP that learns a function of a point in the plane.
#[derive(Module, Debug)]
struct Net {
    up: ParallelLinear,
    down: ParallelLinear,
}

impl Net {
    fn new(group: &Group, device: &Device) -> Result<Self, ParallelError> {
        Ok(Self {
            // Was: LinearConfig::new(2, 64).init(device)
            up: ParallelLinearConfig::column(2, 64)
                .with_name("up")
                .init(group, device)?,
            down: ParallelLinearConfig::row(64, 1)
                .with_name("down")
                .init(group, device)?,
        })
    }

    fn forward(&self, points: Tensor<2>) -> Tensor<2> {
        self.down.forward(gelu(self.up.forward(points)))
    }
}

/// Trains on this rank and returns the first and the last loss.
fn train(group: &Group) -> Result<(f32, f32), ParallelError> {
    let device = Device::flex().autodiff();
    let mut net = Net::new(group, &device)?;
    let mut optimizer = AdamWConfig::new().init();
    // Every rank sees the same data: tensor parallelism splits the layers, not the batch.
    let points = grid(24);
    let surface = (points.clone() * 3.0).sin().prod_dim(1);
    let points = Tensor::from_inner(points);
    let surface = Tensor::from_inner(surface);
    let mut losses = (0.0, 0.0);
    for step in 0..200 {
        let loss = (net.forward(points.clone()) - surface.clone())
            .square()
            .mean();
        losses.1 = loss.clone().into_scalar::<f32>();
        if step == 0 {
            losses.0 = losses.1;
        }
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(5e-3, net, grads);
    }
    Ok(losses)
}

/// A grid of `n * n` points that covers the square from -1 to 1.
fn grid(n: i64) -> Tensor<2> {
    let line = Tensor::<1, burn::prelude::Int>::arange(0..n, &Device::flex()).float();
    let line = line * (2.0 / (n - 1) as f64) - 1.0;
    let n = n as usize;
    let x = line.clone().reshape([n, 1, 1]).expand([n, n, 1]);
    let y = line.reshape([1, n, 1]).expand([n, n, 1]);
    Tensor::cat(vec![x, y], 2).reshape([n * n, 2])
}

fn main() {
    for ranks in [1, 2, 4] {
        let losses = run_threads(ranks, GroupOptions::default(), |group| train(&group));
        for (rank, losses) in losses.into_iter().enumerate() {
            let (first, last) = losses.expect("no rank fails");
            println!("rank {rank} of {ranks}: loss {first:.6} -> {last:.6}");
        }
    }
}
