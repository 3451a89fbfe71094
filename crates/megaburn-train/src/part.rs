//! The named parts of a rank's work.

use burn::module::Module;
use megaburn_collective::{Phase, PhaseGuard, SectionGuard};
use megaburn_pipeline::MicroBatchStep;
use megaburn_report::profile::Range;

use crate::trainer_core::TrainerCore;

/// A part of a rank's work, which ends when this is dropped. A profile has it as a range; the times
/// of parts show stragglers, and reports of a hang say in which part a rank is.
#[must_use = "the part ends when this is dropped"]
#[derive(Debug)]
pub(crate) struct Part {
    _range: Range,
    _section: SectionGuard,
    _phase: Option<PhaseGuard>,
}

impl<M: Module> TrainerCore<M> {
    /// Begins the part `name` of this rank's work.
    pub(crate) fn part(&self, name: &'static str) -> Part {
        Part {
            _range: self.spans.range(name),
            _section: self.groups.world.section(name),
            _phase: None,
        }
    }

    /// Begins a part of the pass of a micro-batch.
    pub(crate) fn pass_part(&self, name: &'static str, pass: MicroBatchStep) -> Part {
        let numbers = || {
            [
                ("micro_batch", pass.micro_batch as u64),
                ("chunk", pass.chunk as u64),
            ]
        };
        Part {
            _range: self.spans.numbered(name, numbers),
            _section: self.groups.world.section(name),
            _phase: None,
        }
    }

    /// Begins to read the samples of a micro-batch, which has a time limit of its own.
    pub(crate) fn data_part(&self, pass: MicroBatchStep) -> Part {
        Part {
            _phase: Some(self.groups.world.phase(Phase::Data)),
            ..self.pass_part("data", pass)
        }
    }
}
