//! The layers of a configuration: defaults, then files, then `--set`, then dedicated flags.

use std::{fs, path::Path};

use megaburn_data::HfTokenizer;
use megaburn_models::assets::ASSETS;
use serde::Deserialize;
use toml::{Table, Value};

use super::{
    ParallelConfig, TrainConfig, follow, init, layer_check,
    removed::drop_removed,
    require::fits_toml,
    value::{bad_value, list_ways},
};
use crate::{error::TrainError, resume_error::ResumeError, run_folder::config_of};

/// Collects the layers of a configuration. Later layers override earlier ones. Each layer is
/// checked separately, so an error names the file or flag at fault even if a later layer overrides
/// the value.
#[derive(Clone, Debug, Default)]
pub struct ConfigLayers {
    merged: Table,
    fresh: bool,
    /// The folder given to `--resume`, if any.
    run: Option<String>,
}

impl ConfigLayers {
    /// No layers: all defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a TOML file.
    ///
    /// # Errors
    /// The file cannot be read or is not TOML, or has an unknown or removed key or a value of a
    /// wrong type.
    pub fn with_file(self, path: impl AsRef<Path>) -> Result<Self, TrainError> {
        let path = path.as_ref();
        self.with_text(&path.display().to_string(), &read_file(path)?)
    }

    /// Adds what the run in the folder `dir` was trained with, its `config.toml`, for
    /// `--resume DIR`. A run that was moved is found where it is now, and so is its copy of the
    /// tokenizer. Keys that a later version removed are dropped.
    ///
    /// # Errors
    /// The folder has no `config.toml`; see also [`with_file`](Self::with_file).
    pub fn with_run(self, dir: &str) -> Result<Self, TrainError> {
        let folder = Path::new(dir);
        let file = config_of(folder);
        if !file.is_file() {
            return Err(ResumeError::NoRun {
                path: folder.into(),
            }
            .into());
        }
        let origin = format!("`{}`", file.display());
        let mut trained = parse(&read_file(&file)?, &origin)?;
        drop_removed(&mut trained);
        let mut layers = self.with_layer(trained, origin)?;
        let origin = format!("`--resume {dir}`");
        let kept = HfTokenizer::find(&folder.join(ASSETS));
        let said = layers
            .merged
            .get("data")
            .and_then(|data| data.get("tokenizer")?.as_str());
        if let Some(kept) = kept.filter(|_| said.is_some_and(|said| said != "byte")) {
            let kept = kept.display().to_string();
            layers = layers.with_value("data.tokenizer", kept.into(), origin.clone())?;
        }
        layers.run = Some(dir.to_string());
        layers.with_value("run.dir", dir.into(), origin)
    }

    /// Adds TOML text; errors call it `name`.
    ///
    /// # Errors
    /// As [`with_file`](Self::with_file).
    pub fn with_text(self, name: &str, text: &str) -> Result<Self, TrainError> {
        let origin = format!("`{name}`");
        let table = parse(text, &origin)?;
        self.with_layer(table, origin)
    }

    /// Adds one `KEY=VALUE`, such as `parallel.tp=2`. VALUE is parsed as TOML, or taken as a bare
    /// string if it is not TOML.
    ///
    /// # Errors
    /// `text` has no key or no `=`, the key is unknown or removed, or its value has another type.
    pub fn with_set(self, text: &str) -> Result<Self, TrainError> {
        let (key, value) = key_and_value(text)?;
        let layers = self.with_value(key, value, format!("`--set {text}`"))?;
        Ok(match key {
            "data.train" => layers.with_list_in_place_of_path(),
            _ => layers,
        })
    }

    /// A list of data sets replaces the data set that a resumed run began with.
    fn with_list_in_place_of_path(mut self) -> Self {
        if let (Some(_), Some(Value::Table(data))) = (&self.run, self.merged.get_mut("data")) {
            data.remove("path");
        }
        self
    }

    /// Adds `--data FILE`: `data.path`.
    ///
    /// # Errors
    /// Never fails: any text is a path, and [`load`](Self::load) refuses an empty one. It returns a
    /// `Result` so that calls can be chained.
    pub fn with_data(self, path: &str) -> Result<Self, TrainError> {
        self.with_value("data.path", path.into(), format!("`--data {path}`"))
    }

    /// Adds `--tokenizer PATH`: `data.tokenizer`.
    ///
    /// # Errors
    /// Never fails; see [`with_data`](Self::with_data).
    pub fn with_tokenizer(self, path: &str) -> Result<Self, TrainError> {
        let origin = format!("`--tokenizer {path}`");
        self.with_value("data.tokenizer", path.into(), origin)
    }

    /// Adds `--init PATH`: `model.init`.
    ///
    /// # Errors
    /// Never fails; see [`with_data`](Self::with_data).
    pub fn with_init(self, path: &str) -> Result<Self, TrainError> {
        self.with_value("model.init", path.into(), format!("`--init {path}`"))
    }

    /// Sets whether the run starts over (`--fresh`). Its model then comes from `model.init` even if
    /// the run has a checkpoint.
    pub fn with_fresh(mut self, fresh: bool) -> Self {
        self.fresh = fresh;
        self
    }

    /// Adds `--steps N`: `train.steps`.
    ///
    /// # Errors
    /// More steps than a TOML integer can hold.
    pub fn with_steps(self, steps: u64) -> Result<Self, TrainError> {
        let value = fits_toml("train.steps", steps)?;
        self.with_value("train.steps", value.into(), format!("`--steps {steps}`"))
    }

    /// Adds `--layout L`, which replaces all keys of `[parallel]` that describe the layout.
    ///
    /// # Errors
    /// The layout is invalid.
    pub fn with_layout(mut self, text: &str) -> Result<Self, TrainError> {
        let parallel = ParallelConfig::from_layout(text)?;
        let mut table = Table::try_from(parallel).expect("a section is a table");
        if let Some(Value::Table(before)) = self.merged.remove("parallel") {
            let stays = |key: &String| ParallelConfig::BESIDE_LAYOUT.contains(&key.as_str());
            table.extend(before.into_iter().filter(|(key, _)| stays(key)));
        }
        self.merged.insert("parallel".into(), table.into());
        Ok(self)
    }

    /// Builds the configuration: the layers on top of the defaults.
    ///
    /// # Errors
    /// A value that no run can use; the error names its key.
    pub fn load(self) -> Result<TrainConfig, TrainError> {
        let mut config = self.read()?;
        follow::fill_in(&mut config, &self.merged);
        if let Some(run) = self.run.filter(|run| *run != config.run.dir) {
            let rule = format!("omitted with --resume, which continues in `{run}`");
            return Err(TrainError::Invalid {
                key: "run.dir",
                value: config.run.dir,
                rule,
            });
        }
        let names_dir = self
            .merged
            .get("run")
            .is_some_and(|run| run.get("dir").is_some());
        if !names_dir && config.model.init.is_some() {
            // `run.dir` must be known here: if the run has a checkpoint, its model comes from
            // there.
            config.run.dir = config.default_dir();
        }
        init::fill_in(&mut config, &self.merged, self.fresh)?;
        follow::fill_in_dataset(&mut config, &self.merged);
        config.validate()?;
        if !names_dir && config.model.init.is_none() {
            config.run.dir = config.default_dir();
        }
        Ok(config)
    }

    /// All layers so far, without the defaults.
    pub(super) fn merged(&self) -> &Table {
        &self.merged
    }

    /// The layers so far on top of the defaults, unchecked.
    pub(super) fn read(&self) -> Result<TrainConfig, TrainError> {
        read(self.merged.clone(), "the configuration".into())
    }

    fn with_value(self, key: &str, value: Value, origin: String) -> Result<Self, TrainError> {
        self.with_layer(nested(key, value), origin)
    }

    pub(crate) fn with_layer(
        mut self,
        mut layer: Table,
        origin: String,
    ) -> Result<Self, TrainError> {
        list_ways(&mut layer);
        layer_check::check(&layer, &origin)?;
        read(layer.clone(), origin)?;
        merge(&mut self.merged, layer);
        Ok(self)
    }
}

/// The key and the value of `KEY=VALUE`. The value is TOML, or else a bare string.
pub(crate) fn key_and_value(text: &str) -> Result<(&str, Value), TrainError> {
    let (key, value) = text
        .split_once('=')
        .filter(|(key, _)| key.trim().split('.').all(|part| !part.is_empty()))
        .ok_or_else(|| TrainError::Set { text: text.into() })?;
    let value = value.trim();
    let value = value
        .parse()
        .unwrap_or_else(|_| Value::String(value.into()));
    Ok((key.trim(), value))
}

/// The tables around a value whose key is a dotted path.
pub(crate) fn nested(key: &str, value: Value) -> Table {
    let (outer, inner) = match key.split_once('.') {
        Some((outer, inner)) => (outer, Value::Table(nested(inner, value))),
        None => (key, value),
    };
    Table::from_iter([(outer.to_string(), inner)])
}

pub(crate) fn read_file(path: &Path) -> Result<String, TrainError> {
    fs::read_to_string(path).map_err(|source| TrainError::Read {
        path: path.into(),
        source,
    })
}

pub(crate) fn parse(text: &str, origin: &str) -> Result<Table, TrainError> {
    text.parse().map_err(|source| TrainError::Toml {
        origin: origin.to_string(),
        source,
    })
}

fn read(layer: Table, origin: String) -> Result<TrainConfig, TrainError> {
    TrainConfig::deserialize(layer).map_err(|source| bad_value(&source.to_string(), &origin))
}

pub(crate) fn merge(base: &mut Table, layer: Table) {
    for (key, value) in layer {
        match (base.get_mut(&key), value) {
            (Some(Value::Table(base)), Value::Table(layer)) => merge(base, layer),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::exit::Exit;

    #[test]
    fn later_layers_override_earlier_ones_key_by_key() {
        let dir = tempfile::tempdir().unwrap();
        let a = dir.path().join("a.toml");
        let b = dir.path().join("b.toml");
        fs::write(
            &a,
            "[train]\nsteps = 10\nglobal_batch = 16\n[run]\nseed = 1",
        )
        .unwrap();
        fs::write(&b, "[train]\nsteps = 20\n[optimizer]\nlr = 1").unwrap();
        let files = ConfigLayers::new()
            .with_file(&a)
            .unwrap()
            .with_file(&b)
            .unwrap();
        let config = files.clone().load().unwrap();
        assert_eq!((config.train.steps, config.train.global_batch), (20, 16));
        assert_eq!((config.run.seed, config.optimizer.lr), (1, 1.0));
        let set = files
            .with_set("train.steps=30")
            .unwrap()
            .with_set(" run.seed = 2 ")
            .unwrap();
        let config = set.clone().load().unwrap();
        assert_eq!((config.train.steps, config.run.seed), (30, 2));
        let flagged = set
            .with_steps(40)
            .unwrap()
            .with_data("x.txt")
            .unwrap()
            .load()
            .unwrap();
        assert_eq!(flagged.train.steps, 40);
        assert_eq!(flagged.data.path.as_deref(), Some("x.txt"));
    }

    #[rstest]
    #[case("data.path=corpus.txt", "corpus.txt")]
    #[case("data.path=\"corpus.txt\"", "corpus.txt")]
    #[case("data.path='2024'", "2024")]
    #[case("data.path=a=b", "a=b")]
    #[case("data.path=1\nrun.seed = 9", "1\nrun.seed = 9")]
    #[case("data.path= a b ", "a b")]
    fn a_value_is_toml_else_a_bare_string(#[case] set: &str, #[case] path: &str) {
        let config = ConfigLayers::new().with_set(set).unwrap().load().unwrap();
        assert_eq!(config.data.path.as_deref(), Some(path));
        assert_eq!(config.run.seed, 1234);
    }

    #[test]
    fn layout_replaces_the_whole_section() {
        let layers = ConfigLayers::new().with_set("parallel.pp=2").unwrap();
        let config = layers.with_layout("dp2").unwrap().load().unwrap();
        assert_eq!(config.layout(None).unwrap().to_string(), "dp2");
        let error = ConfigLayers::new().with_layout("tp0").unwrap_err();
        assert!(error.to_string().contains("degree 0"), "{error}");
    }

    #[rstest]
    #[case(
        "parallel.tpp=2",
        "unknown key `parallel.tpp` in `--set parallel.tpp=2`; the nearest key is `parallel.tp`"
    )]
    #[case(
        "parallel.overlap_moe=false",
        "`parallel.overlap_moe` in `--set parallel.overlap_moe=false` is no longer supported: no step was faster with it"
    )]
    #[case(
        "train.steps=-1",
        "`train.steps` in `--set train.steps=-1`: expected a whole number of 0 or more, found the integer -1"
    )]
    #[case(
        "train.steps=many",
        "expected a whole number of 0 or more, found the string \"many\""
    )]
    #[case(
        "train.steps=1.5",
        "expected a whole number of 0 or more, found the float 1.5"
    )]
    #[case("optimizer.lr=high", "expected a number, found the string \"high\"")]
    #[case("parallel.sp=1", "expected true or false, found the integer 1")]
    #[case(
        "data.path=2024",
        "expected a string in quotes, found the integer 2024"
    )]
    #[case("data.path=[1]", "expected a string in quotes, found an array")]
    #[case(
        "model=3",
        "`model` in `--set model=3`: expected a table, found the integer 3"
    )]
    #[case(
        "parallel.tp.x=3",
        "`parallel.tp` in `--set parallel.tp.x=3`: expected a whole number of 0 or more, found a table"
    )]
    #[case("data.tokenizer=7", "expected a string in quotes, found the integer 7")]
    #[case(
        "train.steps",
        "`--set train.steps` is not KEY=VALUE, with a key like `parallel.tp`"
    )]
    #[case("=3", "`--set =3` is not KEY=VALUE")]
    #[case("train..steps=3", "`--set train..steps=3` is not KEY=VALUE")]
    fn a_bad_setting_is_an_error_that_names_it(#[case] set: &str, #[case] message: &str) {
        let error = ConfigLayers::new().with_set(set).unwrap_err();
        let error_text = error.to_string();
        assert!(
            error_text.contains(message) && !error_text.contains('\n'),
            "{error_text}"
        );
        assert_eq!(error.exit(), Exit::BadInput);
    }

    #[rstest]
    #[case(
        "[trian]\nsteps = 3",
        "unknown key `trian` in `my.toml`; the nearest key is `train`"
    )]
    #[case(
        "[empty]",
        "unknown key `empty` in `my.toml`; there is no similar key; configs/"
    )]
    #[case(
        "[train]\nsteps = ",
        "cannot read `my.toml`: TOML parse error at line 2"
    )]
    #[case("[train]\nsteps = 1\nsteps = 2", "duplicate key")]
    #[case(
        "[parallel]\noverlap_moe = true",
        "`parallel.overlap_moe` in `my.toml` is no longer supported: no step was faster with it"
    )]
    fn a_bad_file_is_an_error_that_names_it(#[case] text: &str, #[case] message: &str) {
        let error = ConfigLayers::new().with_text("my.toml", text).unwrap_err();
        let error_text = error.to_string();
        assert!(
            error_text.contains(message) && !error_text.ends_with('\n'),
            "{error_text}"
        );
        assert_eq!(error.exit(), Exit::BadInput);
    }

    #[test]
    fn more_steps_than_toml_can_hold_are_refused() {
        let error = ConfigLayers::new().with_steps(u64::MAX).unwrap_err();
        let message =
            "`train.steps` is 18446744073709551615: it must be at most 9223372036854775807";
        assert_eq!(error.to_string(), message);
    }

    #[test]
    fn a_missing_file_is_bad_input() {
        let error = ConfigLayers::new().with_file("no/such.toml").unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("cannot read `no/such.toml`: "),
            "{error}"
        );
        assert_eq!(error.exit(), Exit::BadInput);
    }
}
