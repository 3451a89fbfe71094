//! An output head of any type as a field of a model.

use std::fmt;

use burn::{
    module::{
        Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    },
    prelude::Device,
    tensor::Tensor,
};
use megaburn_parallel::{ParallelError, PlanBuilder, Sharded, VocabParallelEmbedding};

use super::{
    HeadParts, OutputHead,
    erased_head::{ErasedHead, IntoErased},
};

/// Builds a family's [output head](OutputHead) on this rank.
pub type HeadInit = fn(&HeadParts<'_>) -> Result<FamilyHead, ParallelError>;

/// An [`OutputHead`] of any type.
pub struct FamilyHead(Box<dyn ErasedHead>);

impl FamilyHead {
    /// Wraps a family's head.
    pub fn new(head: impl OutputHead) -> Self {
        Self(Box::new(head))
    }

    /// See [`OutputHead::logits`].
    pub(super) fn logits(&self, x: Tensor<3>, output: &VocabParallelEmbedding) -> Tensor<3> {
        self.0.logits_of(x, output)
    }

    /// See [`OutputHead::whole_sequence`].
    pub(super) fn whole_sequence(self) -> Self {
        Self(self.0.for_whole_sequence())
    }
}

impl Module for FamilyHead {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.0.devices_after(devices)
    }

    fn fork(self, device: &Device) -> Self {
        Self(self.0.forked(device))
    }

    fn to_device(self, device: &Device) -> Self {
        Self(self.0.moved(device))
    }

    fn train(self) -> Self {
        Self(self.0.trained())
    }

    fn valid(&self) -> Self {
        Self(self.0.validated())
    }

    fn materialize(self) -> Self {
        Self(self.0.materialized())
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.0.visited(&mut IntoErased(visitor));
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        Self(self.0.mapped(&mut IntoErased(mapper)))
    }
}

impl Clone for FamilyHead {
    fn clone(&self) -> Self {
        Self(self.0.cloned())
    }
}

impl fmt::Debug for FamilyHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl ModuleDisplayDefault for FamilyHead {
    fn content(&self, content: Content) -> Option<Content> {
        content.set_top_level_type("FamilyHead").optional()
    }
}

impl ModuleDisplay for FamilyHead {}

impl Sharded for FamilyHead {
    fn shards(&self, plan: &mut PlanBuilder) {
        self.0.shards_in(plan);
    }
}
