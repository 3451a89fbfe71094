//! The families of a program, and the checks of one that is added.

use std::{
    collections::BTreeMap,
    sync::{PoisonError, RwLock},
};

use super::{Family, ModelFamily};
use crate::{decoder::DecoderConfig, error::ModelError};

/// The families that are defined outside of this crate, in the order of their registration.
static REGISTERED: RwLock<Vec<Family>> = RwLock::new(Vec::new());

impl Family {
    /// All families of this program: the built-in ones, then the registered ones.
    pub fn all() -> Vec<Self> {
        let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
        let all = Self::BUILT_IN.iter().chain(registered.iter());
        all.copied().collect()
    }

    /// Adds a family that is defined outside of this crate. A program does this once, before it
    /// reads a configuration or a checkpoint; every process of a run does it.
    ///
    /// # Errors
    /// A family of this program has the same `model_type` or architecture, or the definition is
    /// incomplete: its template cannot be a model, a parameter has no name on Hugging Face, or its
    /// `config.json` does not read back as the same model.
    pub fn register(definition: &'static dyn ModelFamily) -> Result<Self, ModelError> {
        register(Self(definition))
    }
}

/// Adds a family, and removes it again if its definition is incomplete.
fn register(family: Family) -> Result<Family, ModelError> {
    check_names(family).map_err(|why| refused(family, &why))?;
    {
        let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
        let others = Family::BUILT_IN.iter().chain(registered.iter());
        check_new(others, family).map_err(|why| refused(family, &why))?;
        registered.push(family);
    }
    // The family is registered while its definition is checked, because reading `config.json` finds
    // a family by its architecture.
    let Err(error) = check_definition(family) else {
        return Ok(family);
    };
    let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
    registered.retain(|other| *other != family);
    let why = match error {
        ModelError::Config(why) => why,
        other => other.to_string(),
    };
    Err(refused(family, &why))
}

fn refused(family: Family, why: &str) -> ModelError {
    let name = family.definition().model_type();
    ModelError::Config(format!("the family `{name}` cannot be registered: {why}"))
}

/// Refuses names that a configuration or a file cannot hold.
fn check_names(family: Family) -> Result<(), String> {
    let definition = family.definition();
    let is_plain = |name: &str| {
        !name.is_empty()
            && name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
    };
    for (method, name) in [
        ("model_type", definition.model_type()),
        ("architecture", definition.architecture()),
    ] {
        if !is_plain(name) {
            return Err(format!(
                "its {method} is `{name}`; use letters, digits, `_`, `-` and `.` only"
            ));
        }
    }
    Ok(())
}

/// Refuses a family that could be confused with one of `others`.
fn check_new<'a>(others: impl Iterator<Item = &'a Family>, family: Family) -> Result<(), String> {
    let definition = family.definition();
    for other in others {
        let known = other.definition();
        if known.model_type() == definition.model_type() {
            let name = definition.model_type();
            return Err(format!(
                "this program has a family with the model_type `{name}`; choose another name"
            ));
        }
        let names = other.architectures();
        if let Some(name) = family.architectures().iter().find(|of| names.contains(of)) {
            return Err(format!(
                "the architecture `{name}` belongs to the family `{other}`; choose another name"
            ));
        }
    }
    Ok(())
}

/// Refuses a definition whose models could not be built, saved or exported.
fn check_definition(family: Family) -> Result<(), ModelError> {
    let template = family.template();
    // A model without tied embeddings has all parameters.
    let untied = DecoderConfig {
        tied: false,
        ..template.clone()
    };
    let mut owners = BTreeMap::new();
    for param in untied.hf_params()? {
        for name in param.names() {
            if let Some(other) = owners.insert(name.clone(), param.path.clone()) {
                return Err(ModelError::Config(format!(
                    "its keys give the tensor `{name}` to both `{other}` and `{}`",
                    param.path
                )));
            }
        }
    }
    if family.find_head_name().is_none() {
        return Err(ModelError::Config(
            "its keys do not read `head.weight` with Key::plain".into(),
        ));
    }
    if !family.definition().layer().contains('*') {
        return Err(ModelError::Config(
            "its layer prefix has no `*` for the number of the layer".into(),
        ));
    }
    template.check_sayable()
}
