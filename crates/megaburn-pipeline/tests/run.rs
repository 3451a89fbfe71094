//! The runner executes a schedule: its gradients equal a run of all stages on one rank.

use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use megaburn_autograd::MainGrad;
use megaburn_collective::{CollectiveError, Group, GroupOptions, run_threads};
use megaburn_kernels::{LinearOptions, linear};
use megaburn_pipeline::{
    MicroBatchStep, Output, P2pGroups, P2pSpec, Placement, ScheduleConfig, ScheduleKind,
    StageExecutor, run,
};
use rstest::rstest;

const SHAPE: [usize; 3] = [2, 1, 3];

/// Stage `s` adds `x² weight` to `x`, and the last stage sums the result.
fn stage(x: Tensor<3>, weight: &Tensor<3>) -> Tensor<3> {
    x.clone() + x.clone() * x * weight.clone()
}

fn weight(stage: usize, device: &Device) -> Tensor<3> {
    let values: Vec<f32> = (0..6)
        .map(|i| ((stage * 7 + i * 3) % 5) as f32 * 0.1 - 0.2)
        .collect();
    Tensor::from_data(TensorData::new(values, SHAPE), device).require_grad()
}

fn input(micro_batch: usize, device: &Device) -> Tensor<3> {
    let values: Vec<f32> = (0..6)
        .map(|i| ((micro_batch * 5 + i) % 7) as f32 * 0.2 - 0.5)
        .collect();
    Tensor::from_data(TensorData::new(values, SHAPE), device)
}

/// The chunks of a rank, and their observed results.
struct Sums {
    backward_weight: Vec<Tensor<3>>,
    is_first: Vec<bool>,
    is_last: Vec<bool>,
    grads: Vec<Option<Tensor<3>>>,
    ended: Vec<usize>,
    losses: f32,
}

impl StageExecutor for Sums {
    type Error = CollectiveError;

    fn forward(
        &mut self,
        pass: MicroBatchStep,
        x: Option<Tensor<3>>,
    ) -> Result<Output, CollectiveError> {
        let MicroBatchStep {
            chunk, micro_batch, ..
        } = pass;
        assert_eq!(x.is_none(), self.is_first[chunk]);
        let x = x.unwrap_or_else(|| input(micro_batch, &Device::flex().autodiff()));
        let y = stage(x, &self.backward_weight[chunk]);
        if !self.is_last[chunk] {
            return Ok(Output::Stream(y));
        }
        let loss = y.sum();
        self.losses += loss.clone().into_scalar::<f32>();
        Ok(Output::Loss(loss))
    }

    fn backward(
        &mut self,
        pass: MicroBatchStep,
        run: impl FnOnce() -> Gradients,
    ) -> Result<(), CollectiveError> {
        let mut grads = run();
        let grad = self.backward_weight[pass.chunk]
            .grad_remove(&mut grads)
            .expect("it is used");
        let sum = &mut self.grads[pass.chunk];
        *sum = Some(sum.take().map_or(grad.clone(), |sum| sum + grad));
        self.ended[pass.chunk] += usize::from(pass.is_last);
        Ok(())
    }

    fn backward_weight(
        &mut self,
        pass: MicroBatchStep,
        run: impl FnOnce(),
    ) -> Result<(), CollectiveError> {
        run();
        self.ended[pass.chunk] += usize::from(pass.is_last);
        Ok(())
    }
}

/// The loss, and the gradient of each stage of the ranks.
fn gradients(config: &ScheduleConfig) -> (f32, Vec<Vec<f32>>) {
    let schedule = config.build().unwrap();
    let stages = config.stages();
    let ranks = run_threads(config.num_ranks, GroupOptions::default(), |world: Group| {
        let device = Device::flex().autodiff();
        let of_rank = || (0..stages.num_chunks).map(|chunk| stages.stage(world.rank(), chunk));
        let mut chunks = Sums {
            backward_weight: of_rank().map(|stage| weight(stage, &device)).collect(),
            is_first: of_rank().map(|stage| stage == 0).collect(),
            is_last: of_rank()
                .map(|stage| stage + 1 == stages.num_stages())
                .collect(),
            grads: vec![None; stages.num_chunks],
            ended: vec![0; stages.num_chunks],
            losses: 0.0,
        };
        let spec = P2pSpec {
            neighbours: P2pGroups::new(&world, stages)?,
            shape: SHAPE,
            dtype: DType::F32,
            device: device.inner(),
        };
        run(&schedule, &spec, &mut chunks)?;
        let kinds = if schedule.kind.splits_backward() {
            2
        } else {
            1
        };
        assert!(chunks.ended.iter().all(|ended| *ended == kinds));
        let grads = chunks
            .grads
            .into_iter()
            .map(|grad| grad.unwrap().into_data());
        let grads = grads.map(|grad| grad.try_to_vec::<f32>().unwrap());
        Ok::<_, CollectiveError>((chunks.losses, of_rank().zip(grads).collect::<Vec<_>>()))
    });
    let (losses, grads): (Vec<_>, Vec<_>) = ranks.into_iter().map(Result::unwrap).unzip();
    let mut grads: Vec<_> = grads.into_iter().flatten().collect();
    grads.sort_by_key(|(stage, _)| *stage);
    (
        losses.into_iter().sum(),
        grads.into_iter().map(|(_, grad)| grad).collect(),
    )
}

#[rstest]
#[case(ScheduleKind::GPipe, 3, 1, 4)]
#[case(ScheduleKind::GPipe, 2, 3, 3)]
#[case(ScheduleKind::OneForwardOneBackward, 1, 1, 3)]
#[case(ScheduleKind::OneForwardOneBackward, 4, 1, 7)]
#[case(ScheduleKind::OneForwardOneBackward, 4, 1, 1)]
#[case(ScheduleKind::Interleaved, 3, 2, 5)]
#[case(ScheduleKind::Interleaved, 2, 4, 3)]
#[case(ScheduleKind::ZbH1, 3, 1, 5)]
#[case(ScheduleKind::ZbV, 3, 2, 7)]
#[case(ScheduleKind::ZbV, 1, 2, 3)]
fn gradients_are_those_of_one_rank(
    #[case] kind: ScheduleKind,
    #[case] num_ranks: usize,
    #[case] num_chunks: usize,
    #[case] num_micro_batches: usize,
) {
    let config =
        ScheduleConfig::new(kind, num_ranks, num_micro_batches).with_num_chunks(num_chunks);
    let (loss, grads) = gradients(&config);
    let device = Device::flex().autodiff();
    let backward_weight: Vec<_> = (0..num_ranks * num_chunks)
        .map(|stage| weight(stage, &device))
        .collect();
    let mut expected: Vec<Option<Tensor<3>>> = vec![None; backward_weight.len()];
    let mut losses = 0.0;
    for micro_batch in 0..num_micro_batches {
        let sum = backward_weight
            .iter()
            .fold(input(micro_batch, &device), stage)
            .sum();
        losses += sum.clone().into_scalar::<f32>();
        let grads = sum.backward();
        for (weight, sum) in backward_weight.iter().zip(&mut expected) {
            let grad = weight.grad(&grads).unwrap();
            *sum = Some(sum.take().map_or(grad.clone(), |sum| sum + grad));
        }
    }
    assert_eq!(loss, losses);
    for (found, expected) in grads.iter().zip(expected) {
        assert_eq!(
            found,
            &expected.unwrap().into_data().try_to_vec::<f32>().unwrap()
        );
    }
}

#[rstest]
#[case(ScheduleKind::OneForwardOneBackward, 2, 1, 5)]
#[case(ScheduleKind::ZbH1, 3, 1, 6)]
#[case(ScheduleKind::ZbV, 2, 2, 6)]
fn weight_gradients_are_computed_where_the_schedule_has_them(
    #[case] kind: ScheduleKind,
    #[case] num_ranks: usize,
    #[case] num_chunks: usize,
    #[case] num_micro_batches: usize,
) {
    /// A linear layer for each chunk.
    struct Layers {
        backward_weight: Vec<(Tensor<2>, MainGrad)>,
        is_last: Vec<bool>,
        splits_backward: bool,
        computed: usize,
    }

    impl Layers {
        /// Sums of gradients are taken after each pass, so each is of that pass alone.
        fn check(&mut self, pass: MicroBatchStep, is_computed: bool) {
            for (chunk, (_, main_grad)) in self.backward_weight.iter().enumerate() {
                let expected = is_computed && chunk == pass.chunk;
                assert_eq!(main_grad.take().is_some(), expected, "{pass:?}");
            }
            self.computed += usize::from(is_computed);
        }
    }

    impl StageExecutor for Layers {
        type Error = CollectiveError;

        fn forward(
            &mut self,
            pass: MicroBatchStep,
            x: Option<Tensor<3>>,
        ) -> Result<Output, CollectiveError> {
            let x = x.unwrap_or_else(|| input(pass.micro_batch, &Device::flex().autodiff()));
            let (weight, main_grad) = &self.backward_weight[pass.chunk];
            let options = LinearOptions {
                main_grad: Some(main_grad.clone()),
                ..Default::default()
            };
            let y = linear(x, weight.clone(), None, options);
            Ok(if self.is_last[pass.chunk] {
                Output::Loss(y.sum())
            } else {
                Output::Stream(y)
            })
        }

        fn backward(
            &mut self,
            pass: MicroBatchStep,
            run: impl FnOnce() -> Gradients,
        ) -> Result<(), CollectiveError> {
            drop(run());
            self.check(pass, !self.splits_backward);
            Ok(())
        }

        fn backward_weight(
            &mut self,
            pass: MicroBatchStep,
            run: impl FnOnce(),
        ) -> Result<(), CollectiveError> {
            run();
            self.check(pass, true);
            Ok(())
        }
    }

    let config =
        ScheduleConfig::new(kind, num_ranks, num_micro_batches).with_num_chunks(num_chunks);
    let schedule = config.build().unwrap();
    let stages = config.stages();
    let ranks = run_threads(num_ranks, GroupOptions::default(), |world| {
        let device = Device::flex();
        let of_rank = || (0..num_chunks).map(|chunk| stages.stage(world.rank(), chunk));
        let layer = |_| {
            let main_grad = MainGrad::default();
            main_grad.attach();
            let weight = Tensor::full([3, 3], 0.3, &device.clone().autodiff()).require_grad();
            (weight, main_grad)
        };
        let mut layers = Layers {
            backward_weight: of_rank().map(layer).collect(),
            is_last: of_rank()
                .map(|stage| stage + 1 == stages.num_stages())
                .collect(),
            splits_backward: kind.splits_backward(),
            computed: 0,
        };
        let spec = P2pSpec {
            neighbours: P2pGroups::new(&world, stages)?,
            shape: SHAPE,
            dtype: DType::F32,
            device,
        };
        run(&schedule, &spec, &mut layers)?;
        Ok::<_, CollectiveError>(layers.computed)
    });
    let computed: Vec<_> = ranks.into_iter().map(Result::unwrap).collect();
    assert_eq!(computed, vec![num_chunks * num_micro_batches; num_ranks]);
}

#[rstest]
fn without_backward_nothing_is_kept(
    #[values(Placement::Loop, Placement::Vee)] placement: Placement,
) {
    /// A stage that adds one, off the autodiff device.
    struct Ones {
        /// The chunk that is the last stage, if it is on this rank.
        last: Option<usize>,
        found: Vec<f32>,
    }

    impl StageExecutor for Ones {
        type Error = CollectiveError;

        fn forward(
            &mut self,
            pass: MicroBatchStep,
            x: Option<Tensor<3>>,
        ) -> Result<Output, CollectiveError> {
            let x = x.unwrap_or_else(|| input(pass.micro_batch, &Device::flex()));
            assert!(!x.device().is_autodiff());
            let y = x + 1.0;
            if self.last != Some(pass.chunk) {
                return Ok(Output::Stream(y));
            }
            self.found = y.into_data().try_to_vec().unwrap();
            Ok(Output::Nothing)
        }
    }

    let config = ScheduleConfig::new(ScheduleKind::ForwardOnly, 3, 1)
        .with_num_chunks(2)
        .with_placement(placement);
    let schedule = config.build().unwrap();
    let stages = config.stages();
    let ranks = run_threads(3, GroupOptions::default(), |world| {
        let device = Device::flex();
        let neighbours = P2pGroups::new(&world, stages)?;
        let spec = P2pSpec {
            neighbours,
            shape: SHAPE,
            dtype: DType::F32,
            device,
        };
        let end = stages.num_stages() - 1;
        let last = (stages.rank_of(end) == world.rank()).then(|| stages.chunk_of(end));
        let mut ones = Ones {
            last,
            found: Vec::new(),
        };
        run(&schedule, &spec, &mut ones)?;
        Ok::<_, CollectiveError>(ones.found)
    });
    let last: Vec<f32> = ranks.into_iter().flat_map(Result::unwrap).collect();
    let first: Vec<f32> = input(0, &Device::flex()).into_data().try_to_vec().unwrap();
    let expected = first.into_iter().map(|x| (0..6).fold(x, |x, _| x + 1.0));
    assert!(last.into_iter().eq(expected));
}
