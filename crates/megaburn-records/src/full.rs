//! Full tensors that member 0 of a group draws one after the other, while all members send shards.

use std::sync::Arc;

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{Bool, DType, Int, Tensor, TensorData},
};
use megaburn_collective::{CollectiveError, Group, GroupShards, ParamShards, Phase, objects};
use megaburn_parallel::is_transposed_in_files;
use serde::{Deserialize, Serialize};

use crate::{
    error::RecordsError,
    layout::{Layout, Place},
    part::transposed,
};

/// A full tensor that is gathered when member 0 asks for it.
pub(crate) struct FullTensor {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) id: u64,
    /// Whether ranks hold different parts.
    pub(crate) is_split: bool,
    /// Gathers it; only member 0 gets it.
    gather: Box<dyn Fn() -> Result<Option<TensorData>, CollectiveError> + Send + Sync>,
}

/// The full tensors of a module, in its order.
pub(crate) struct FullTensors {
    pub(crate) tensors: Vec<FullTensor>,
    group: Group,
}

impl FullTensors {
    pub(crate) fn of<M: Module>(
        module: &M,
        shards: &GroupShards,
        layout: Layout,
        group: &Group,
    ) -> Arc<Self> {
        let mut visitor = Collector {
            place: Place::default(),
            shards,
            layout,
            is_first: group.rank() == 0,
            found: Vec::new(),
        };
        module.visit(&mut visitor);
        Arc::new(Self {
            tensors: visitor.found,
            group: group.clone(),
        })
    }

    /// Gathers tensor `index`, which the other members are asked to send.
    ///
    /// # Collective
    /// Member 0, while the others are in [`serve`](Self::serve).
    pub(crate) fn draw(&self, index: usize) -> Result<TensorData, CollectiveError> {
        objects::broadcast(&self.group, &Request::Tensor(index))?;
        let data = (self.tensors[index].gather)()?;
        Ok(data.expect("member 0 gets the tensor"))
    }

    /// Runs `write` on member 0, while the other members send what it draws.
    ///
    /// # Errors
    /// An error of `write` is an error on every member.
    /// # Collective
    /// All members.
    pub(crate) fn written<T>(
        self: Arc<Self>,
        write: impl FnOnce(Arc<Self>) -> Result<T, RecordsError>,
    ) -> Result<Option<T>, RecordsError> {
        let group = self.group.clone();
        if group.rank() != 0 {
            return self.serve().map(|()| None);
        }
        // The others wait while a tensor is written.
        let phase = group.phase(Phase::Save);
        let written = write(self);
        drop(phase);
        // In a group that has failed the others know it.
        if group.failure().is_none() {
            let why = written.as_ref().err().map(ToString::to_string);
            objects::broadcast(&group, &Request::End(why))?;
        }
        written.map(Some)
    }

    /// Sends shards until member 0 has ended.
    fn serve(&self) -> Result<(), RecordsError> {
        loop {
            // Only member 0's value matters.
            match objects::broadcast(&self.group, &Request::End(None))? {
                Request::Tensor(index) => (self.tensors[index].gather)().map(drop)?,
                Request::End(None) => return Ok(()),
                Request::End(Some(why)) => return Err(RecordsError::OnFirst { why }),
            }
        }
    }
}

/// A message by which member 0 asks the others for a tensor, or ends.
#[derive(Serialize, Deserialize)]
enum Request {
    Tensor(usize),
    /// Nothing more; the text says why the file was not written.
    End(Option<String>),
}

struct Collector<'a> {
    place: Place,
    shards: &'a GroupShards,
    layout: Layout,
    is_first: bool,
    found: Vec<FullTensor>,
}

impl Collector<'_> {
    /// The shards of the current parameter, if ranks hold different parts.
    fn split(&self) -> Option<ParamShards> {
        let shards = self.shards.get(&self.place.path())?;
        shards.is_split().then(|| shards.clone())
    }

    /// Adds a tensor as Burn's own mapping gives it, which has transposed it if `is_mapped`.
    fn add(
        &mut self,
        (id, is_mapped): (u64, bool),
        dtype: DType,
        mut shape: Vec<usize>,
        gather: impl Fn() -> Result<Option<TensorData>, CollectiveError> + Send + Sync + 'static,
    ) {
        let is_transposed = !is_mapped && self.layout.transposes(&self.place, shape.len());
        if is_transposed {
            shape.reverse();
        }
        let gather = move || {
            let data = gather()?;
            Ok(if is_transposed {
                data.map(transposed)
            } else {
                data
            })
        };
        self.found.push(FullTensor {
            name: self.layout.tensor_name(&self.place),
            dtype,
            shape,
            id,
            is_split: self.split().is_some(),
            gather: Box::new(gather),
        });
    }
}

impl ModuleVisitor for Collector<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.place.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let id = param.id.val();
        let is_first = self.is_first;
        match self.split() {
            Some(shards) => {
                let local = param.val().inner();
                let shape = shards.own().global_shape.clone();
                self.add((id, false), local.dtype(), shape, move || {
                    let full = shards.gather_on_first(local.clone())?;
                    Ok(full.map(Tensor::into_data))
                });
            }
            None => {
                let full = param.transform_for_save().val().inner();
                let id = (id, is_transposed_in_files(param));
                self.add(id, full.dtype(), full.dims().to_vec(), move || {
                    Ok(is_first.then(|| full.to_data()))
                });
            }
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let is_first = self.is_first;
        let full = param.transform_for_save().val();
        self.add(
            (param.id.val(), false),
            full.dtype(),
            full.dims().to_vec(),
            move || Ok(is_first.then(|| full.to_data())),
        );
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let is_first = self.is_first;
        let full = param.transform_for_save().val();
        self.add(
            (param.id.val(), false),
            full.dtype(),
            full.dims().to_vec(),
            move || Ok(is_first.then(|| full.to_data())),
        );
    }
}
