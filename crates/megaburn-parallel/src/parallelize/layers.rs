use std::{any::type_name, collections::BTreeMap, fmt};

use burn::module::Module;
use megaburn_collective::Group;

use super::plan::Rule;
use crate::{
    embedding::VocabParallelEmbedding, error::ParallelError, linear::ParallelLinear,
    shards::Sharded,
};

/// The layers of a module, while [`parallelize`](super::parallelize) walks down it.
/// `#[derive(Sharded)]` writes the calls.
pub struct Layers<'a> {
    path: Vec<String>,
    step: Step<'a>,
    error: Option<ParallelError>,
}

pub(super) enum Step<'a> {
    /// Lists the layers.
    List(Vec<Layer>),
    /// Splits those that have rules.
    Split {
        rules: &'a BTreeMap<String, Rule>,
        group: &'a Group,
    },
}

pub(super) struct Layer {
    pub(super) path: String,
    pub(super) kind: Kind,
}

pub(super) enum Kind {
    Linear,
    Embedding,
    /// A plain Burn layer of this type.
    Plain(&'static str),
}

/// The type's own name.
fn short_name<T: ?Sized>() -> &'static str {
    let name = type_name::<T>();
    let end = name.find('<').unwrap_or(name.len());
    name[..end].rsplit("::").next().unwrap_or(name)
}

impl<'a> Layers<'a> {
    pub(super) fn new(step: Step<'a>) -> Self {
        Self {
            path: Vec::new(),
            step,
            error: None,
        }
    }

    pub(super) fn into_list(self) -> Result<Vec<Layer>, ParallelError> {
        match (self.error, self.step) {
            (Some(error), _) => Err(error),
            (None, Step::List(layers)) => Ok(layers),
            (None, Step::Split { .. }) => Ok(Vec::new()),
        }
    }

    pub(super) fn into_result(self) -> Result<(), ParallelError> {
        self.error.map_or(Ok(()), Err)
    }

    /// Walks down the module in field `field`.
    pub fn child<M: Sharded + ?Sized>(&mut self, field: &str, module: &mut M) {
        self.path.push(field.to_string());
        module.parallelize(self);
        self.path.pop();
    }

    /// Leaves the plain Burn module in field `field` as it is, replicated on the members of the group
    /// in another field, which becomes the group that splits the module.
    pub fn replicated<M: Module>(&mut self, field: &str, module: &M, group: &mut Group) {
        self.replicated_in_module(field, module);
        if let Step::Split { group: of_all, .. } = &self.step {
            *group = (*of_all).clone();
        }
    }

    /// Leaves the plain Burn module in field `field` as it is, replicated on all ranks.
    pub fn replicated_in_module<M: Module>(&mut self, field: &str, _module: &M) {
        self.path.push(field.to_string());
        self.list(Kind::Plain(short_name::<M>()));
        self.path.pop();
    }

    /// Refuses a layer that was built with a group.
    pub fn refuse<M: ?Sized>(&mut self) {
        self.fail(format!(
            "a `{}` is built with the group that splits it; build the module with it, or make the field \
            a plain Burn layer that is `#[sharded(replicated)]`",
            short_name::<M>()
        ));
    }

    pub(crate) fn linear(&mut self, layer: &mut ParallelLinear) {
        self.list(Kind::Linear);
        self.change(layer.group().size(), |rule, path, group| {
            layer.split_by(rule, path, group)
        });
    }

    pub(crate) fn embedding(&mut self, layer: &mut VocabParallelEmbedding) {
        self.list(Kind::Embedding);
        self.change(layer.group().size(), |rule, path, group| {
            layer.split_by(rule.is_some(), path, group)
        });
    }

    fn list(&mut self, kind: Kind) {
        let path = self.path.join(".");
        if let Step::List(layers) = &mut self.step {
            layers.push(Layer { path, kind });
        }
    }

    /// Splits the current layer, if this is the time for it.
    fn change(
        &mut self,
        ranks: usize,
        split: impl FnOnce(Option<&Rule>, &str, &Group) -> Result<(), ParallelError>,
    ) {
        if ranks > 1 {
            self.fail(format!("it is split over {ranks} ranks already"));
        }
        if self.error.is_some() {
            return;
        }
        let path = self.path.join(".");
        if let Step::Split { rules, group } = &self.step {
            self.error = split(rules.get(&path), &path, group).err();
        }
    }

    /// Keeps the first error.
    fn fail(&mut self, why: String) {
        let error = ParallelError::Config {
            layer: "parallelize",
            name: self.path.join("."),
            why,
        };
        self.error.get_or_insert(error);
    }
}

impl fmt::Debug for Layers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layers").field("path", &self.path).finish()
    }
}
