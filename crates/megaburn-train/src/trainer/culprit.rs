use megaburn_collective::objects;
use serde::{Deserialize, Serialize};

use crate::{TrainError, trainer::Trainer};

/// Where a step went wrong first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Culprit {
    /// The lowest rank of the world with a gradient of its own that is not finite.
    pub rank: usize,
    /// The first such parameter there.
    pub param: String,
}

impl Trainer {
    /// Computes the gradients of the next step once more, and looks at them before they are summed
    /// over data-parallel ranks, where all of them would look alike. A step that goes well costs
    /// nothing for it; Megatron looks at each bucket of each step (`--check-for-nan-in-loss-and-grad`).
    ///
    /// None if every gradient is finite this time.
    ///
    /// # Collective
    /// All ranks; a forward and backward pass, and a name.
    pub(super) fn culprit(&mut self) -> Result<Option<Culprit>, TrainError> {
        self.accumulate_gradients();
        let world = &self.groups.world;
        let mine = self.grads.find_non_finite().map(str::to_string);
        let mut all = objects::gather(world, &mine)?.into_iter().enumerate();
        let first = all.find_map(|(rank, param)| param.map(|param| Culprit { rank, param }));
        Ok(objects::broadcast(world, &first)?)
    }
}

#[cfg(test)]
mod tests {
    use crate::trainer::testing::{poison, trainers};

    #[test]
    fn the_rank_whose_gradients_are_not_finite_is_named() {
        // In the second layout rank 2 computes with what rank 3 sends.
        for (layout, rank) in [("dp3", 2), ("tp2-dp2", 3)] {
            let errors = trainers(layout, |mut trainer| {
                trainer.step()?;
                if trainer.groups.world.rank() == rank {
                    poison(&mut trainer, "blocks.1.mlp.down.weight", f32::NAN);
                }
                let error = trainer.step().unwrap_err();
                assert_eq!(trainer.progress().step, 1);
                Ok(error.to_string())
            });
            for error in errors {
                assert!(error.contains("first in `blocks.0."), "{layout}: {error}");
                assert!(error.contains("` of rank 2); the weights"), "{layout}: {error}");
            }
        }
    }
}
