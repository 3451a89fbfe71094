//! An output head without its type. Burn's `Module` cannot be a trait object, because its visitors
//! are generic in the number of dimensions of a parameter.

use std::{any::Any, fmt::Debug};

use burn::{
    module::{Devices, Flag, ModuleMapper, ModuleVisitor, Param},
    prelude::Device,
    tensor::Tensor,
};
use megaburn_parallel::{PlanBuilder, VocabParallelEmbedding};

use super::OutputHead;

/// The methods of an [`OutputHead`] and of its `Module`, for trait objects.
pub(super) trait ErasedHead: Debug + Send {
    fn cloned(&self) -> Box<dyn ErasedHead>;
    fn devices_after(&self, devices: Devices) -> Devices;
    fn forked(self: Box<Self>, device: &Device) -> Box<dyn ErasedHead>;
    fn moved(self: Box<Self>, device: &Device) -> Box<dyn ErasedHead>;
    fn trained(self: Box<Self>) -> Box<dyn ErasedHead>;
    fn validated(&self) -> Box<dyn ErasedHead>;
    fn materialized(self: Box<Self>) -> Box<dyn ErasedHead>;
    fn visited(&self, visitor: &mut dyn ErasedVisitor);
    fn mapped(self: Box<Self>, mapper: &mut dyn ErasedMapper) -> Box<dyn ErasedHead>;
    fn shards_in(&self, plan: &mut PlanBuilder);
    fn logits_of(&self, x: Tensor<3>, output: &VocabParallelEmbedding) -> Tensor<3>;
    fn for_whole_sequence(self: Box<Self>) -> Box<dyn ErasedHead>;
}

impl<H: OutputHead> ErasedHead for H {
    fn cloned(&self) -> Box<dyn ErasedHead> {
        Box::new(self.clone())
    }

    fn devices_after(&self, devices: Devices) -> Devices {
        self.collect_devices(devices)
    }

    fn forked(self: Box<Self>, device: &Device) -> Box<dyn ErasedHead> {
        Box::new(self.fork(device))
    }

    fn moved(self: Box<Self>, device: &Device) -> Box<dyn ErasedHead> {
        Box::new(self.to_device(device))
    }

    fn trained(self: Box<Self>) -> Box<dyn ErasedHead> {
        Box::new(self.train())
    }

    fn validated(&self) -> Box<dyn ErasedHead> {
        Box::new(self.valid())
    }

    fn materialized(self: Box<Self>) -> Box<dyn ErasedHead> {
        Box::new(self.materialize())
    }

    fn visited(&self, visitor: &mut dyn ErasedVisitor) {
        self.visit(&mut FromErased(visitor));
    }

    fn mapped(self: Box<Self>, mapper: &mut dyn ErasedMapper) -> Box<dyn ErasedHead> {
        Box::new(self.map(&mut FromErased(mapper)))
    }

    fn shards_in(&self, plan: &mut PlanBuilder) {
        self.shards(plan);
    }

    fn logits_of(&self, x: Tensor<3>, output: &VocabParallelEmbedding) -> Tensor<3> {
        self.logits(x, output)
    }

    fn for_whole_sequence(self: Box<Self>) -> Box<dyn ErasedHead> {
        Box::new(self.whole_sequence())
    }
}

/// A visitor of parameters whose number of dimensions is known at run time only.
pub(super) trait ErasedVisitor {
    fn enter(&mut self, name: &str, container: &str);
    fn exit(&mut self, name: &str, container: &str);
    /// `param` is a `Param<Tensor<D>>`.
    fn float(&mut self, param: &dyn Any);
    fn flag(&mut self, flag: &Param<Flag>);
}

/// A mapper of parameters whose number of dimensions is known at run time only.
pub(super) trait ErasedMapper {
    fn enter(&mut self, name: &str, container: &str);
    fn exit(&mut self, name: &str, container: &str);
    /// `param` and the result are a `Param<Tensor<D>>` of the same `D`.
    fn float(&mut self, param: Box<dyn Any>) -> Box<dyn Any>;
    fn flag(&mut self, flag: Param<Flag>) -> Param<Flag>;
}

/// Burn's visitor or mapper, as one of this file.
pub(super) struct IntoErased<'a, V>(pub(super) &'a mut V);

/// A visitor or mapper of this file, as Burn's.
struct FromErased<'a, V: ?Sized>(&'a mut V);

const MOST_DIMENSIONS: &str = "a parameter of an output head has at most four dimensions";

impl<V: ModuleVisitor> ErasedVisitor for IntoErased<'_, V> {
    fn enter(&mut self, name: &str, container: &str) {
        self.0.enter_module(name, container);
    }

    fn exit(&mut self, name: &str, container: &str) {
        self.0.exit_module(name, container);
    }

    fn float(&mut self, param: &dyn Any) {
        fn visited<const D: usize>(visitor: &mut impl ModuleVisitor, param: &dyn Any) -> bool {
            let param = param.downcast_ref::<Param<Tensor<D>>>();
            param.map(|param| visitor.visit_float(param)).is_some()
        }
        let found = visited::<1>(self.0, param)
            || visited::<2>(self.0, param)
            || visited::<3>(self.0, param)
            || visited::<4>(self.0, param);
        assert!(found, "{MOST_DIMENSIONS}");
    }

    fn flag(&mut self, flag: &Param<Flag>) {
        self.0.visit_flag(flag);
    }
}

impl ModuleVisitor for FromErased<'_, dyn ErasedVisitor + '_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0.enter(name, container_type);
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.0.exit(name, container_type);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.float(param);
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.0.flag(flag);
    }
}

impl<M: ModuleMapper> ErasedMapper for IntoErased<'_, M> {
    fn enter(&mut self, name: &str, container: &str) {
        self.0.enter_module(name, container);
    }

    fn exit(&mut self, name: &str, container: &str) {
        self.0.exit_module(name, container);
    }

    fn float(&mut self, param: Box<dyn Any>) -> Box<dyn Any> {
        /// The mapped parameter, or the given one if it has another number of dimensions.
        fn mapped<const D: usize>(
            mapper: &mut impl ModuleMapper,
            param: Box<dyn Any>,
        ) -> Result<Box<dyn Any>, Box<dyn Any>> {
            let param = param.downcast::<Param<Tensor<D>>>()?;
            Ok(Box::new(mapper.map_float(*param)))
        }
        mapped::<1>(self.0, param)
            .or_else(|param| mapped::<2>(self.0, param))
            .or_else(|param| mapped::<3>(self.0, param))
            .or_else(|param| mapped::<4>(self.0, param))
            .expect(MOST_DIMENSIONS)
    }

    fn flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.0.map_flag(flag)
    }
}

impl ModuleMapper for FromErased<'_, dyn ErasedMapper + '_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0.enter(name, container_type);
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.0.exit(name, container_type);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let mapped = self.0.float(Box::new(param)).downcast();
        *mapped.expect("a mapper keeps the number of dimensions")
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.0.flag(flag)
    }
}
