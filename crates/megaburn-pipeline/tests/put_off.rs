//! Products that give weights their gradients, beside what passes wait for.

use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use megaburn_collective::{CollectiveError, Group, GroupOptions, run_threads};
use megaburn_kernels::{CheckpointFunction, LinearOptions, MainGrad, Spare, linear};
use megaburn_pipeline::{
    MicroBatchStep, Output, P2pGroups, P2pSpec, ScheduleConfig, ScheduleKind, StageExecutor, run,
};
use rstest::rstest;

const SHAPE: [usize; 3] = [2, 1, 3];
/// Linear layers of a stage, between which it waits.
const LAYERS: usize = 5;

/// What happens on a rank.
#[derive(Clone, Debug, PartialEq)]
enum Event {
    Forward(MicroBatchStep),
    Backward(MicroBatchStep),
    Weights(MicroBatchStep),
    End,
    /// A layer of a chunk gets a gradient.
    Gradient(usize, usize),
}

type Events = Arc<Mutex<Vec<Event>>>;

struct Stages {
    /// By chunk.
    layers: Vec<Vec<(Tensor<2>, MainGrad)>>,
    is_last: Vec<bool>,
    puts_off: bool,
    waits: bool,
    events: Events,
}

fn weight(layer: usize) -> Tensor<2> {
    let values = (0..9).map(|i| ((layer * 7 + i * 3) % 5) as f32 * 0.1 - 0.2);
    let data = TensorData::new(values.collect::<Vec<_>>(), [3, 3]);
    Tensor::from_data(data, &Device::flex().autodiff()).require_grad()
}

fn input(micro_batch: usize) -> Tensor<3> {
    let values = (0..6).map(|i| ((micro_batch * 5 + i) % 7) as f32 * 0.2 - 0.5);
    let data = TensorData::new(values.collect::<Vec<_>>(), SHAPE);
    Tensor::from_data(data, &Device::flex().autodiff())
}

/// `x`, for which forward waits, and backward for its gradient.
fn waited_for(x: Tensor<3>) -> Tensor<3> {
    Spare::compute_share();
    let mut operands = CheckpointFunction::new(&x.device());
    let there = Tensor::from_inner(x.clone().inner());
    operands.add(x);
    let [y] = operands.results([there], |[dy]| {
        Spare::compute_share();
        vec![dy.map(|dy: Tensor<3>| dy.reshape([1, -1]))]
    });
    y
}

impl Stages {
    fn event(&self, event: Event) {
        self.events.lock().unwrap().push(event);
    }
}

impl StageExecutor for Stages {
    type Error = CollectiveError;

    fn puts_off(&self) -> bool {
        self.puts_off
    }

    fn forward(
        &mut self,
        pass: MicroBatchStep,
        x: Option<Tensor<3>>,
    ) -> Result<Output, CollectiveError> {
        self.event(Event::Forward(pass));
        let x = x.unwrap_or_else(|| input(pass.micro_batch));
        let y = self.layers[pass.chunk]
            .iter()
            .fold(x, |x, (weight, main_grad)| {
                let main_grad = Some(main_grad.clone());
                let options = LinearOptions {
                    main_grad,
                    ..Default::default()
                };
                let y = x.clone() + linear(x, weight.clone(), None, options);
                if self.waits { waited_for(y) } else { y }
            });
        self.event(Event::End);
        Ok(if self.is_last[pass.chunk] {
            Output::Loss((y.clone() * y).sum())
        } else {
            Output::Stream(y)
        })
    }

    fn backward(
        &mut self,
        pass: MicroBatchStep,
        run: impl FnOnce() -> Gradients,
    ) -> Result<(), CollectiveError> {
        self.event(Event::Backward(pass));
        run();
        self.event(Event::End);
        Ok(())
    }

    fn backward_weight(
        &mut self,
        pass: MicroBatchStep,
        run: impl FnOnce(),
    ) -> Result<(), CollectiveError> {
        self.event(Event::Weights(pass));
        run();
        self.event(Event::End);
        Ok(())
    }
}

/// What each rank has seen, and the sums of its layers' gradients.
fn trained(
    config: &ScheduleConfig,
    puts_off: bool,
    waits: bool,
) -> Vec<(Vec<Event>, Vec<Vec<f32>>)> {
    let schedule = config.build().unwrap();
    let stages = config.stages();
    let ranks = run_threads(config.num_ranks, GroupOptions::default(), |world: Group| {
        let of_rank = || (0..stages.num_chunks).map(|chunk| stages.stage(world.rank(), chunk));
        let events = Events::default();
        let layer = |(chunk, stage): (usize, usize), layer: usize| {
            let main_grad = MainGrad::default();
            let events = events.clone();
            main_grad.attach();
            main_grad
                .on_gradient(move || events.lock().unwrap().push(Event::Gradient(chunk, layer)));
            (weight(stage * LAYERS + layer), main_grad)
        };
        let layers = of_rank()
            .enumerate()
            .map(|of| (0..LAYERS).map(|at| layer(of, at)).collect());
        let mut chunks = Stages {
            layers: layers.collect(),
            is_last: of_rank()
                .map(|stage| stage + 1 == stages.num_stages())
                .collect(),
            puts_off,
            waits,
            events: events.clone(),
        };
        let neighbours = P2pGroups::new(&world, stages)?;
        let wire = P2pSpec {
            neighbours,
            shape: SHAPE,
            dtype: DType::F32,
            device: Device::flex(),
        };
        run(&schedule, &wire, &mut chunks)?;
        let sums = chunks.layers.iter().flatten().map(|(_, main_grad)| {
            let sum = main_grad.take().expect("each layer is used");
            sum.into_data().try_to_vec::<f32>().unwrap()
        });
        let events = events.lock().unwrap().clone();
        Ok::<_, CollectiveError>((events, sums.collect::<Vec<_>>()))
    });
    ranks.into_iter().map(Result::unwrap).collect()
}

/// The gradients that came in each pass.
fn by_pass(events: &[Event]) -> Vec<(Event, Vec<(usize, usize)>)> {
    let mut passes: Vec<(Event, Vec<_>)> = Vec::new();
    for event in events {
        match event {
            Event::Gradient(chunk, layer) => {
                passes
                    .last_mut()
                    .expect("in a pass")
                    .1
                    .push((*chunk, *layer));
            }
            pass => passes.push((pass.clone(), Vec::new())),
        }
    }
    assert!(
        passes
            .iter()
            .all(|(pass, grads)| *pass != Event::End || grads.is_empty())
    );
    passes.retain(|(pass, _)| *pass != Event::End);
    passes
}

#[rstest]
#[case(ScheduleKind::OneForwardOneBackward, 1, 1, 4)]
#[case(ScheduleKind::OneForwardOneBackward, 3, 1, 7)]
#[case(ScheduleKind::OneForwardOneBackward, 2, 1, 1)]
#[case(ScheduleKind::GPipe, 2, 1, 3)]
#[case(ScheduleKind::Interleaved, 2, 2, 6)]
#[case(ScheduleKind::ZbH1, 3, 1, 6)]
#[case(ScheduleKind::ZbV, 2, 2, 6)]
#[case(ScheduleKind::ZbV, 4, 2, 9)]
#[case(ScheduleKind::ZbH1, 4, 1, 8)]
fn sums_are_the_same_to_the_bit_and_last_passes_give_their_own(
    #[case] kind: ScheduleKind,
    #[case] num_ranks: usize,
    #[case] num_chunks: usize,
    #[case] num_micro_batches: usize,
) {
    let config =
        ScheduleConfig::new(kind, num_ranks, num_micro_batches).with_num_chunks(num_chunks);
    let found = trained(&config, true, true);
    let expected = trained(&config, false, true);
    for ((events, sums), (_, expected)) in found.iter().zip(&expected) {
        assert_eq!(sums, expected);
        let of_passes = by_pass(events);
        let mut seen = 0;
        for (pass, grads) in &of_passes {
            seen += grads.len();
            let own = |chunk| {
                (0..LAYERS)
                    .rev()
                    .map(|layer| (chunk, layer))
                    .collect::<Vec<_>>()
            };
            match pass {
                Event::Backward(pass) if pass.is_last && kind.splits_backward() => {
                    assert_eq!(grads, &[]);
                }
                Event::Backward(pass) | Event::Weights(pass) if pass.is_last => {
                    assert_eq!(grads, &own(pass.chunk));
                }
                _ => {}
            }
        }
        assert_eq!(seen, num_chunks * LAYERS * num_micro_batches);
        let beside = of_passes
            .iter()
            .any(|(pass, grads)| matches!(pass, Event::Forward(_)) && !grads.is_empty());
        // A forward after a backward, of which there is none where all forwards come first.
        let is_any = num_micro_batches > num_ranks + 1 && kind != ScheduleKind::GPipe;
        assert_eq!(beside, is_any, "{of_passes:?}");
    }
}

#[test]
fn waits_share_the_products_of_a_backward() {
    let config = ScheduleConfig::new(ScheduleKind::OneForwardOneBackward, 1, 4);
    let (events, _) = trained(&config, true, true).remove(0);
    let passes = by_pass(&events);
    let counts = passes.iter().map(|(pass, grads)| {
        let what = match pass {
            Event::Forward(_) => "forward",
            Event::Backward(_) => "backward",
            Event::Weights(_) => "rest",
            Event::Gradient(..) | Event::End => unreachable!(),
        };
        (what, grads.len())
    });
    // The first backward shows what a wait is worth: five products, ten waits of less than half of one. In the
    // others a wait has what layers behind it gave.
    let expected = [
        ("forward", 0),
        ("backward", 5),
        ("forward", 0),
        ("backward", 2),
        ("forward", 3),
        ("backward", 2),
        ("forward", 3),
        ("backward", 5),
    ];
    assert_eq!(counts.collect::<Vec<_>>(), expected);
}

#[rstest]
#[case(ScheduleKind::OneForwardOneBackward)]
#[case(ScheduleKind::ZbH1)]
fn where_nothing_waits_nothing_is_put_off(#[case] kind: ScheduleKind) {
    let config = ScheduleConfig::new(kind, 2, 5);
    for (found, expected) in trained(&config, true, false)
        .iter()
        .zip(trained(&config, false, false))
    {
        assert_eq!(*found, expected);
    }
}

/// At the end of a stage's step backwards follow each other.
#[test]
fn what_is_left_comes_before_the_next_backward() {
    let config = ScheduleConfig::new(ScheduleKind::OneForwardOneBackward, 3, 5);
    let (events, _) = trained(&config, true, true).remove(0);
    let passes = by_pass(&events);
    let is_rest = |pass: &Event| matches!(pass, Event::Weights(_));
    let rests: Vec<_> = passes.iter().filter(|(pass, _)| is_rest(pass)).collect();
    assert!(
        rests.iter().all(|(_, grads)| grads.len() == 3),
        "{passes:?}"
    );
    // Of the two before the last, behind which no forward comes.
    assert_eq!(rests.len(), 2, "{passes:?}");
}
