//! The steps of an epoch.

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn_train::{InferenceStep, LearnerModel, TrainStep};

use crate::{
    error::LearnerError,
    events::{Place, gathered, processed},
    gradients::Gradients,
    output::RankOutput,
    run::Training,
    shares::{Agreed, agree, check_losses},
};

/// This rank's next batch, and what the ranks agreed on about theirs.
struct Batch<I> {
    batch: Option<I>,
    /// Number of items in this rank's batch.
    items: u64,
    all: Agreed,
}

impl<M> Training<M>
where
    M: LearnerModel,
    <M as TrainStep>::Output: RankOutput,
    <M as InferenceStep>::Output: RankOutput,
{
    /// Trains on this rank's share of the data. `total` is the number of items of all ranks.
    ///
    /// # Collective
    /// All ranks.
    pub(crate) fn train_epoch(
        &mut self,
        share: &dyn DataLoader<<M as TrainStep>::Input>,
        total: usize,
        gradients: &mut Gradients,
    ) -> Result<(), LearnerError> {
        let mut batches = share.iter();
        let (mut done, mut computed, mut accumulated) = (0, 0, 0);
        let first = self.step + 1;
        while let Some(Batch { batch, items, all }) = self.next_batch(&mut *batches)? {
            done += all.items as usize;
            computed += all.batches;
            let model = self.parts.model();
            let item = batch.map(|batch| {
                let output = TrainStep::step(model, batch);
                let weight = items as f64 / all.items as f64;
                gradients.add(model, output.grads, weight);
                output.item
            });
            check_losses(&self.groups, self.step, self.step - first, item.as_ref())?;
            accumulated += 1;
            let accumulates = self.components.grad_accumulation.unwrap_or(1);
            if accumulated >= accumulates || done == total {
                self.update(gradients)?;
                accumulated = 0;
            }
            let place = Place {
                done,
                total,
                batches: computed,
                lr: Some(self.lr.clone()),
            };
            let device = share_device(self.parts.model());
            for item in gathered(item, &self.groups, &device)? {
                self.on_train(processed(item, &place));
            }
        }
        // A loader that counts other items than it returns.
        if accumulated > 0 && !self.is_stopping {
            self.update(gradients)?;
        }
        Ok(())
    }

    /// One step of the optimizer. The schedule takes its step first, as in `burn-train`.
    fn update(&mut self, gradients: &mut Gradients) -> Result<(), LearnerError> {
        let grads = gradients.take(self.parts.model())?;
        self.lr = self.parts.scheduler.step();
        let lr = self.lr.clone();
        let model = self.parts.model.take().expect("an update puts it back");
        let model = model.optimize(&mut self.parts.optimizer, lr, grads);
        self.parts.model = Some(model);
        Ok(())
    }

    /// Validates on this rank's share of the data. `total` is the number of items of all ranks.
    ///
    /// # Collective
    /// All ranks.
    pub(crate) fn valid_epoch(
        &mut self,
        share: &dyn DataLoader<<M as InferenceStep>::Input>,
        total: usize,
    ) -> Result<(), LearnerError> {
        let model = self.parts.model().valid();
        let device = share_device(&model);
        let mut batches = share.iter();
        let (mut done, mut computed) = (0, 0);
        while let Some(Batch { batch, all, .. }) = self.next_batch(&mut *batches)? {
            done += all.items as usize;
            computed += all.batches;
            let item = batch.map(|batch| InferenceStep::step(&model, batch));
            let place = Place {
                done,
                total,
                batches: computed,
                lr: None,
            };
            for item in gathered(item, &self.groups, &device)? {
                self.on_valid(processed(item, &place));
            }
        }
        Ok(())
    }

    /// The next batch of the ranks; `None` at the end of all ranks' data, and if a rank stops.
    ///
    /// # Collective
    /// All ranks; see [`agree`].
    fn next_batch<I>(
        &mut self,
        batches: &mut dyn DataLoaderIterator<I>,
    ) -> Result<Option<Batch<I>>, LearnerError> {
        let interrupter = &self.components.interrupter;
        let before = batches.progress().items_processed;
        let batch = match batches.next() {
            Some(Ok(batch)) => Some(batch),
            Some(Err(error)) => {
                interrupter.fail(error);
                None
            }
            None => None,
        };
        let items = batch.as_ref().map_or(0, |_| {
            let read = batches.progress().items_processed - before;
            // A loader that does not count items has batches of one.
            read.max(1) as u64
        });
        self.step += 1;
        let all = agree(&self.groups, self.step, items, interrupter.should_stop())?;
        self.is_stopping = all.stop;
        Ok((all.items > 0).then_some(Batch { batch, items, all }))
    }
}

/// The device of a model's outputs.
fn share_device<M: burn::module::Module>(model: &M) -> burn::prelude::Device {
    model.devices().swap_remove(0).inner()
}
