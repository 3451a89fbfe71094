//! Every layout trains as one rank does.

use burn::{
    grad_clipping::GradientClipping,
    optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer, SgdConfig},
};
use megaburn_collective::{Group, ProcessGroups};
use megaburn_optim::ShardedOptimizer;
use rstest::rstest;

use super::program::{BATCH, Net, Program, Seen, batch, close, optimizer, schedule};

/// The items that all data-parallel ranks read in each step.
fn steps(items: u32, dp: u32) -> Vec<Vec<u32>> {
    let shares = (0..dp).map(|rank| items * rank / dp..items * (rank + 1) / dp);
    let shares: Vec<Vec<u32>> = shares.map(Iterator::collect).collect();
    let longest = shares.iter().map(Vec::len).max().unwrap();
    (0..longest.div_ceil(BATCH))
        .map(|step| {
            let batches = shares
                .iter()
                .filter_map(|share| share.chunks(BATCH).nth(step));
            batches.flatten().copied().collect()
        })
        .collect()
}

/// The program as a plain loop with Burn's optimizer. Returns the probe and the mean loss of each step.
fn reference(program: &Program<'_>, dp: u32) -> (Vec<f32>, Vec<f32>) {
    reference_by(optimizer(), program, dp)
}

fn reference_by(
    mut optimizer: ModuleOptimizer,
    program: &Program<'_>,
    dp: u32,
) -> (Vec<f32>, Vec<f32>) {
    let mut net = Net::known(&Group::single(0));
    let device = burn::prelude::Device::flex().autodiff();
    let mut schedule = schedule();
    let mut losses = Vec::new();
    for _ in 0..program.epochs {
        let steps = steps(program.train, dp);
        let last = steps.len() - 1;
        let mut sum = GradientsAccumulator::new();
        for (step, items) in steps.into_iter().enumerate() {
            let loss = net.loss(batch(&items, &device)).loss;
            losses.push(loss.clone().into_scalar::<f32>());
            sum.accumulate(&net, GradientsParams::from_grads(loss.backward(), &net));
            let batches = program.accumulation.unwrap_or(1);
            if (step + 1) % batches == 0 || step == last {
                let mut grads = sum.grads();
                if let Some(max) = program.max_grad_norm {
                    grads = clipped(&net, grads, max);
                }
                let lr = schedule.step();
                net = optimizer.step(lr, net, grads);
            }
        }
    }
    (net.probe(), losses)
}

/// Gradients clipped by their norm over all parameters.
fn clipped(net: &Net, mut grads: GradientsParams, max: f64) -> GradientsParams {
    use burn::module::{Module, ModuleVisitor, Param};
    use burn::tensor::Tensor;

    struct Squares<'a>(&'a GradientsParams, f32);
    impl ModuleVisitor for Squares<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.0.get::<D>(param.id) {
                self.1 += grad.powi_scalar(2).sum().into_scalar::<f32>();
            }
        }
    }
    struct Scale<'a>(&'a mut GradientsParams, f32);
    impl ModuleVisitor for Scale<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.0.remove::<D>(param.id) {
                self.0.register(param.id, grad.mul_scalar(self.1));
            }
        }
    }
    let mut squares = Squares(&grads, 0.0);
    net.visit(&mut squares);
    let norm = f64::from(squares.1).sqrt();
    let factor = (max / (norm + 1e-6)).min(1.0);
    assert!(factor < 1.0, "nothing is clipped");
    net.visit(&mut Scale(&mut grads, factor as f32));
    grads
}

#[rstest]
fn a_layout_trains_as_one_rank(
    #[values("dp1", "tp2", "dp2", "dp3", "tp2-dp2", "tp4")] layout: &str,
    #[values((None, None), (Some(2), None), (None, Some(0.3)))] settings: (
        Option<usize>,
        Option<f64>,
    ),
) {
    let dir = tempfile::tempdir().unwrap();
    let program = Program {
        accumulation: settings.0,
        max_grad_norm: settings.1,
        ..Program::new(dir.path())
    };
    let dp = layout.parse::<megaburn_mesh::Layout>().unwrap().dp as u32;
    let (expected, _) = reference(&program, dp);
    for probe in program.probes(layout) {
        close(&probe, &expected, layout);
    }
}

#[rstest]
fn gradients_clipped_by_a_sharded_optimizer_train_as_on_one_rank(
    #[values("tp1", "tp2", "tp4", "tp2-dp2")] layout: &str,
) {
    // Less than the norms of parameters that are split and of those that are not.
    let by_norm = GradientClipping::Norm(0.05);
    let sgd = || SgdConfig::new().build();
    let dir = tempfile::tempdir().unwrap();
    let program = Program::new(dir.path());
    let dp = layout.parse::<megaburn_mesh::Layout>().unwrap().dp as u32;
    let clipping = ModuleOptimizer::from(sgd()).with_grad_clipping(by_norm.clone());
    let (expected, _) = reference_by(clipping, &program, dp);
    let (unclipped, _) = reference_by(sgd().into(), &program, dp);
    let moved = |(a, b): (&f32, &f32)| (a - b).abs() > 1e-2;
    let are_clipped = expected.iter().zip(&unclipped).any(moved);
    assert!(are_clipped, "{expected:?} {unclipped:?}");

    let ranks = program.run(layout, |program, groups| {
        let optimizer = ShardedOptimizer::new(sgd()).with_grad_clipping(by_norm.clone());
        let net = Net::known(&groups.tp);
        let result =
            program
                .parallel(groups)
                .launch(program.training(), net, optimizer, schedule())?;
        Ok(result.model.probe())
    });
    for probe in ranks {
        close(&probe.unwrap(), &expected, layout);
    }
}

#[rstest]
// The shares of 9 items have 4 and 5, so that one rank has a batch fewer than the other.
#[case("dp2", 9)]
#[case("tp2-dp3", 22)]
fn metrics_on_rank_0_see_every_batch(#[case] layout: &str, #[case] items: u32) {
    let dir = tempfile::tempdir().unwrap();
    let program = Program {
        train: items,
        epochs: 1,
        ..Program::new(dir.path())
    };
    let ranks = program.run(layout, |program, groups: &ProcessGroups| {
        let (train, valid) = (Seen::default(), Seen::default());
        let training = program
            .training()
            .metric_train(train.clone())
            .metric_valid(valid.clone());
        let net = Net::known(&groups.tp);
        program
            .parallel(groups)
            .launch(training, net, optimizer(), schedule())?;
        Ok((train.all(), valid.all()))
    });
    let ranks: Vec<_> = ranks.into_iter().map(|rank| rank.unwrap()).collect();
    assert!(
        ranks[1..]
            .iter()
            .all(|(train, valid)| train.is_empty() && valid.is_empty())
    );

    let dp = layout.parse::<megaburn_mesh::Layout>().unwrap().dp as u32;
    let (_, expected) = reference(&program, dp);
    let (train, valid) = &ranks[0];
    let steps = steps(items, dp);
    // The losses of a step's batches, weighted by their sizes, are its mean loss.
    let mut seen = train.iter();
    let mut done = 0;
    for (step, loss) in steps.iter().zip(expected) {
        let shares = (0..dp).map(|rank| items * rank / dp..items * (rank + 1) / dp);
        done += step.len();
        let mut mean = 0.0;
        for share in shares {
            let mine = step.iter().filter(|item| share.contains(item)).count();
            if mine > 0 {
                let (at, loss) = seen.next().unwrap();
                assert_eq!(*at, done);
                mean += loss * mine as f32 / step.len() as f32;
            }
        }
        close(&[mean], &[loss], layout);
    }
    assert_eq!(seen.next(), None);
    let batches: usize = (0..dp)
        .map(|rank| (9 * (rank + 1) / dp - 9 * rank / dp) as usize)
        .map(|items| items.div_ceil(BATCH))
        .sum();
    assert_eq!(valid.len(), batches);
    assert_eq!(valid.last().unwrap().0, 9);
}

#[test]
fn layers_that_every_rank_drew_for_itself_are_made_equal() {
    let dir = tempfile::tempdir().unwrap();
    let program = Program {
        epochs: 1,
        ..Program::new(dir.path())
    };
    let ranks = program.run("tp2-dp2", |program, groups| {
        let net = Net::new(&groups.tp);
        let before = net.plain_layers();
        let result =
            program
                .parallel(groups)
                .launch(program.training(), net, optimizer(), schedule())?;
        Ok((before, result.model.plain_layers(), result.model.probe()))
    });
    let ranks: Vec<_> = ranks.into_iter().map(|rank| rank.unwrap()).collect();
    assert!(
        ranks[1..].iter().all(|rank| rank.0 != ranks[0].0),
        "they were drawn alike"
    );
    for rank in &ranks {
        assert_eq!(rank.1, ranks[0].1);
        assert_eq!(rank.2, ranks[0].2);
        // Neither weight decay nor zeros of an accumulator touch what has no gradient.
        assert_eq!(rank.1[..4], ranks[0].0[..4]);
    }
}

#[test]
fn running_statistics_are_those_of_rank_0_on_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let program = Program::new(dir.path());
    let ranks = program.run("dp2", |program, groups| {
        let net = Net::known(&groups.tp).with_batch_norm();
        let result =
            program
                .parallel(groups)
                .launch(program.training(), net, optimizer(), schedule())?;
        Ok(result.model.running_mean())
    });
    let ranks: Vec<_> = ranks.into_iter().map(|rank| rank.unwrap()).collect();
    assert!(ranks[0].iter().all(|mean| *mean != 0.0), "{ranks:?}");
    assert_eq!(ranks[0], ranks[1]);
}
