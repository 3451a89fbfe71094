//! Trainings that end early.

use std::sync::{Arc, Mutex};

use burn::{
    data::{
        dataloader::DataLoaderBuilder,
        dataset::{Dataset, DatasetError},
    },
    prelude::Device,
    tensor::Tensor,
};
use burn_train::{
    EarlyStoppingStrategy, Interrupter, LearningResult, SupervisedTraining,
    metric::store::EventStoreClient,
};
use megaburn_collective::ProcessGroups;
use rstest::rstest;

use super::program::{Net, Program, batch, loader, optimizer, schedule};

/// Stops after an epoch, and counts how often it was asked.
#[derive(Clone)]
struct After {
    epoch: usize,
    asked: Arc<Mutex<usize>>,
}

impl EarlyStoppingStrategy for After {
    fn should_stop(&mut self, epoch: usize, _: &EventStoreClient) -> bool {
        *self.asked.lock().unwrap() += 1;
        epoch >= self.epoch
    }
}

#[test]
fn early_stopping_of_rank_0_ends_the_training_on_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let program = Program {
        epochs: 5,
        ..Program::new(dir.path())
    };
    let ranks = program.run("tp2-dp2", |program, groups| {
        let asked = Arc::new(Mutex::new(0));
        let stopping = After {
            epoch: 2,
            asked: asked.clone(),
        };
        let training = program.training().early_stopping(stopping);
        let result = program.parallel(groups).launch(
            training,
            Net::known(&groups.tp),
            optimizer(),
            schedule(),
        )?;
        Ok((result.model.probe(), *asked.lock().unwrap()))
    });
    let expected = Program {
        epochs: 2,
        ..program
    };
    let expected = expected.probes("tp2-dp2");
    for (rank, result) in ranks.into_iter().enumerate() {
        let (probe, asked) = result.unwrap();
        assert_eq!(probe, expected[rank]);
        assert_eq!(asked, if rank == 0 { 2 } else { 0 });
    }
}

/// Items of which one cannot be read.
struct Broken {
    at: usize,
}

impl Dataset<u32> for Broken {
    fn get(&self, index: usize) -> Result<u32, DatasetError> {
        if index == self.at {
            return Err(DatasetError::new(std::io::Error::other("the disk is gone")));
        }
        Ok(index as u32)
    }

    fn len(&self) -> usize {
        16
    }
}

#[derive(Clone)]
struct ToTensors;

impl burn::data::dataloader::batcher::Batcher<u32, [Tensor<2>; 2]> for ToTensors {
    fn batch(&self, items: Vec<u32>, device: &Device) -> [Tensor<2>; 2] {
        batch(&items, device)
    }
}

fn launched(
    program: &Program<'_>,
    groups: &ProcessGroups,
    training: SupervisedTraining<Net>,
) -> Result<LearningResult<Net>, crate::LearnerError> {
    let net = Net::known(&groups.tp);
    program
        .parallel(groups)
        .launch(training, net, optimizer(), schedule())
}

#[rstest]
// Data-parallel rank 1 has items 8 to 15; the ranks of a tensor-parallel group have all.
#[case("dp2", 13)]
#[case("tp2", 5)]
fn an_item_that_cannot_be_read_stops_all_ranks(#[case] layout: &str, #[case] at: usize) {
    let dir = tempfile::tempdir().unwrap();
    let program = Program::new(dir.path());
    let ranks = program.run(layout, |program, groups| {
        let at = if groups.world.rank() == 1 { at } else { 99 };
        let train = DataLoaderBuilder::new(ToTensors)
            .batch_size(4)
            .build(Broken { at });
        let training = SupervisedTraining::new(dir.path(), train, loader(8))
            .with_application_logger(None)
            .renderer(Box::new(crate::silent::NoRenderer));
        let result = launched(program, groups, training)?;
        let error = result.error.map(|error| error.to_string());
        let reason = result.interrupted.and_then(|stop| stop.reason);
        Ok((error, reason))
    });
    let ranks: Vec<_> = ranks.into_iter().map(|rank| rank.unwrap()).collect();
    let (error, _) = &ranks[1];
    assert!(
        error.as_ref().unwrap().contains("the disk is gone"),
        "{error:?}"
    );
    let (error, reason) = &ranks[0];
    assert_eq!(*error, None);
    let reason = reason.as_ref().unwrap();
    assert!(
        reason.contains("rank 1") && reason.contains("the disk is gone"),
        "{reason}"
    );
}

/// Asks to stop at the end of an epoch, without a reason.
#[derive(Clone)]
struct StopsAt {
    epoch: usize,
    interrupter: Interrupter,
}

impl EarlyStoppingStrategy for StopsAt {
    fn should_stop(&mut self, epoch: usize, _: &EventStoreClient) -> bool {
        if epoch == self.epoch {
            self.interrupter.stop(None);
        }
        false
    }
}

#[test]
fn a_stop_without_a_reason_ends_the_training_and_keeps_its_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let program = Program {
        epochs: 9,
        saves: true,
        ..Program::new(dir.path())
    };
    let ranks = program.run("dp2", |program, groups| {
        let training = program.training();
        let stops = StopsAt {
            epoch: 2,
            interrupter: training.interrupter(),
        };
        let result = launched(program, groups, training.early_stopping(stops))?;
        Ok(result.interrupted.is_some())
    });
    assert!(ranks.into_iter().all(|rank| rank.unwrap()));
    let folder = dir.path().join("checkpoints");
    let is_there = |epoch| folder.join(format!("step-{epoch:08}")).exists();
    assert!(is_there(1) && is_there(2) && !is_there(3));
}

#[test]
fn a_stop_on_one_rank_stops_all() {
    let dir = tempfile::tempdir().unwrap();
    let program = Program::new(dir.path());
    let ranks = program.run("tp2", |program, groups| {
        let training = program.training();
        if groups.world.rank() == 1 {
            training.interrupter().stop(Some("a user pressed q"));
        }
        let result = launched(program, groups, training)?;
        Ok((
            result.model.probe(),
            result.interrupted.unwrap().reason.unwrap(),
        ))
    });
    let ranks: Vec<_> = ranks.into_iter().map(|rank| rank.unwrap()).collect();
    assert_eq!(ranks[1].1, "a user pressed q");
    assert!(
        ranks[0].1.contains("rank 1") && ranks[0].1.contains("pressed q"),
        "{}",
        ranks[0].1
    );
    let before = Program {
        epochs: 0,
        ..program
    };
    assert_eq!(ranks[0].0, before.probes("tp2")[0], "a step was taken");
}
