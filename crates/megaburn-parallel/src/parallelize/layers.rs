use std::{any::type_name, collections::BTreeMap, fmt};

use burn::{
    module::{Module, Param},
    tensor::{DType, Tensor},
};
use megaburn_collective::Group;

use super::plan::{Rule, Style};
use crate::{error::ParallelError, shards::Sharded};

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

/// A layer that a rule may split.
pub(crate) trait SplitLayer {
    fn kind(&self) -> Kind;

    fn weight(&self) -> &Param<Tensor<2>>;

    /// The group that splits the layer.
    fn group(&self) -> &Group;

    /// Splits a layer that one rank holds. Without a rule, every rank of `group` keeps all of it.
    fn split_by(
        &mut self,
        rule: Option<&Rule>,
        path: &str,
        group: &Group,
    ) -> Result<(), ParallelError>;
}

pub(crate) enum Kind {
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

    /// Splits the current layer, or lists it.
    pub(crate) fn split(&mut self, layer: &mut impl SplitLayer) {
        self.list(layer.kind());
        if matches!(layer.weight().base().dtype(), DType::QFloat(_)) {
            self.fail("it is quantised; split the model first, then use `ShardedQuantizer`".into());
        }
        let ranks = layer.group().size();
        if ranks > 1 {
            self.fail(format!("it is split over {ranks} ranks already"));
        }
        if self.error.is_some() {
            return;
        }
        let path = self.path.join(".");
        if let Step::Split { rules, group } = &self.step {
            let rule = rules.get(&path).filter(|rule| rule.style != Style::Whole);
            self.error = layer.split_by(rule, &path, group).err();
        }
    }

    /// Gives a layer without parameters its path and group, when the others are split.
    pub(crate) fn place(&mut self, place: impl FnOnce(&str, &Group)) {
        if let Step::Split { group, .. } = &self.step {
            place(&self.path.join("."), group);
        }
    }

    /// Refuses Burn's dropout, whose ranks would draw different elements.
    pub(crate) fn plain_dropout(&mut self, prob: f64) {
        if prob > 0.0 {
            self.fail(
                "ranks would drop different elements; make the field a `ReplicatedDropout`, built with \
                `.into()` or, if its input is split between a column and a row, mark it \
                `#[sharded(skip)]`"
                    .into(),
            );
        }
    }

    fn list(&mut self, kind: Kind) {
        let path = self.path.join(".");
        if let Step::List(layers) = &mut self.step {
            layers.push(Layer { path, kind });
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
