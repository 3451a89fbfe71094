//! The layers of a task's configuration: defaults, then files, then `--set`, then dedicated flags.

use std::path::Path;

use serde::{Serialize, de::DeserializeOwned};
use toml::{Table, Value};

use super::{config::TaskConfig, error::TaskRunError};
use crate::{
    config::{
        ConfigLayers, RUN_SECTIONS, bad_value, drop_removed, key_and_value, merge, nearest_key,
        nearest_of, nested, parse, read_file,
    },
    error::TrainError,
    resume_error::ResumeError,
    run_folder::config_of,
};

/// Collects the layers of a task's configuration, as [`ConfigLayers`] does for a decoder. What is not
/// in `[run]`, `[parallel]`, `[train]`, `[optimizer]`, `[log]`, `[alerts]` or `[profile]` belongs to
/// the task.
#[derive(Clone, Debug, Default)]
pub struct TaskLayers {
    run: ConfigLayers,
    own: Table,
    /// The keys of `own`, and where they come from.
    origins: Vec<(String, String)>,
    /// The folder given to `--resume`, if any.
    resumed: Option<String>,
}

impl TaskLayers {
    /// No layers: all defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a TOML file.
    ///
    /// # Errors
    /// The file cannot be read or is not TOML, or a key of the sections of every run is unknown or
    /// has a value of a wrong type.
    pub fn with_file(self, path: impl AsRef<Path>) -> Result<Self, TrainError> {
        let path = path.as_ref();
        self.with_text(&path.display().to_string(), &read_file(path)?)
    }

    /// Adds TOML text; errors call it `name`.
    ///
    /// # Errors
    /// As [`with_file`](Self::with_file).
    pub fn with_text(self, name: &str, text: &str) -> Result<Self, TrainError> {
        let origin = format!("`{name}`");
        let table = parse(text, &origin)?;
        self.with_table(table, &origin)
    }

    /// Adds one `KEY=VALUE`. VALUE is parsed as TOML, or taken as a bare string if it is not TOML.
    ///
    /// # Errors
    /// As [`ConfigLayers::with_set`].
    pub fn with_set(self, text: &str) -> Result<Self, TrainError> {
        let (key, value) = key_and_value(text)?;
        self.with_table(nested(key, value), &format!("`--set {text}`"))
    }

    /// Adds what the run in the folder `dir` was trained with, for `--resume DIR`.
    ///
    /// # Errors
    /// The folder has no `config.toml`; see also [`with_file`](Self::with_file).
    pub fn with_run(self, dir: &str) -> Result<Self, TrainError> {
        let file = config_of(Path::new(dir));
        if !file.is_file() {
            return Err(ResumeError::NoRun { path: dir.into() }.into());
        }
        let origin = format!("`{}`", file.display());
        let mut trained = parse(&read_file(&file)?, &origin)?;
        drop_removed(&mut trained);
        let mut layers = self.with_table(trained, &origin)?;
        layers.resumed = Some(dir.to_string());
        let dir = nested("run.dir", dir.into());
        layers.with_table(dir, "`--resume`")
    }

    /// Adds `--layout L`, which replaces all keys of `[parallel]` that describe the layout.
    ///
    /// # Errors
    /// The layout is invalid.
    pub fn with_layout(mut self, layout: &str) -> Result<Self, TrainError> {
        self.run = self.run.with_layout(layout)?;
        Ok(self)
    }

    /// Builds the configuration of the task called `name`.
    ///
    /// # Errors
    /// A value that no run can use, a key that does not exist, or one that only a decoder has a use
    /// for.
    pub fn load<C>(self, name: &str) -> Result<TaskConfig<C>, TrainError>
    where
        C: Serialize + DeserializeOwned + Default,
    {
        let task = match self.own.is_empty() {
            // A task without a configuration has the type `()`, which no table is.
            true => C::default(),
            false => self
                .own
                .clone()
                .try_into()
                .map_err(|source| self.own_error(&source.to_string()))?,
        };
        self.check_known(&task)?;
        let run = self.run.load_for_own_model(format!("runs/{name}"))?;
        if let Some(resumed) = self.resumed.filter(|resumed| *resumed != run.run.dir) {
            let rule = format!("omitted with --resume, which continues in `{resumed}`");
            return Err(TrainError::Invalid {
                key: "run.dir",
                value: run.run.dir,
                rule,
            });
        }
        Ok(TaskConfig {
            run: run.into(),
            task,
        })
    }

    fn with_table(mut self, layer: Table, origin: &str) -> Result<Self, TrainError> {
        let is_of_run = |name: &String| RUN_SECTIONS.contains(&name.as_str());
        let (of_run, own): (Table, Table) =
            layer.into_iter().partition(|(name, _)| is_of_run(name));
        self.run = self.run.with_layer(of_run, origin.to_string())?;
        let keys = leaves(&own).into_iter();
        self.origins
            .extend(keys.map(|key| (key, origin.to_string())));
        merge(&mut self.own, own);
        Ok(self)
    }

    /// The error about a value of the task, with the last place that sets its key.
    fn own_error(&self, text: &str) -> TrainError {
        let key = text.rsplit_once("\nin ").map(|(_, key)| key.trim());
        let named = |(of, _): &&(String, String)| {
            key.is_some_and(|key| key.trim_matches('`') == of.as_str())
        };
        let origin = self.origins.iter().rev().find(named);
        let origin = origin.map_or("the configuration", |(_, origin)| origin.as_str());
        bad_value(text, origin)
    }

    /// Refuses a key that the task does not read.
    fn check_known<C: Serialize + Default>(&self, task: &C) -> Result<(), TrainError> {
        let tables =
            [task, &C::default()].map(|config| Table::try_from(config).unwrap_or_default());
        let known: Vec<String> = tables.iter().flat_map(leaves).collect();
        let is_known = |key: &str| {
            let inside = format!("{key}.");
            let is = |known: &String| known == key || known.starts_with(&inside);
            known.iter().any(is)
        };
        match self.origins.iter().find(|(key, _)| !is_known(key)) {
            None => Ok(()),
            Some((key, origin)) => {
                let names: Vec<&str> = known.iter().map(String::as_str).collect();
                let of_run = nearest_key(key).filter(|key| {
                    let section = key.split('.').next().unwrap_or_default();
                    RUN_SECTIONS.contains(&section)
                });
                let own = nearest_of(key, &names).map(str::to_string);
                Err(TaskRunError::UnknownKey {
                    key: key.clone(),
                    origin: origin.clone(),
                    nearest: own.or(of_run),
                }
                .into())
            }
        }
    }
}

/// The dotted paths of all values. Elements of lists, and empty tables, are values.
fn leaves(table: &Table) -> Vec<String> {
    let mut found = Vec::new();
    for (name, value) in table {
        match value {
            Value::Table(inner) if !inner.is_empty() => {
                let inner = leaves(inner).into_iter();
                found.extend(inner.map(|key| format!("{name}.{key}")));
            }
            _ => found.push(name.clone()),
        }
    }
    found
}
