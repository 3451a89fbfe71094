//! The file of a sweep: which runs it has.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use megaburn_train::TrainError;
use serde::Deserialize;
use toml::{Table, Value};

use super::paths::LOGS;

/// A sweep has at most this number of runs.
const MOST_RUNS: usize = 10_000;

/// The keys of the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SweepFile {
    /// The folder of the sweep. Each run has a folder of its own in it.
    dir: Option<PathBuf>,
    /// Files of settings of all runs, as for `megaburn train --config`.
    #[serde(default)]
    config: Vec<PathBuf>,
    /// Runs at a time.
    jobs: Option<usize>,
    /// GPUs of each run; with several jobs, their GPUs are disjoint.
    gpus: Option<usize>,
    /// What the table is sorted by.
    #[serde(default)]
    metric: Metric,
    /// A law that is fitted to the runs.
    fit: Option<Fit>,
    /// Settings of all runs.
    #[serde(default)]
    set: Table,
    /// Settings with a list of values: every combination is a run.
    #[serde(default)]
    grid: Table,
    /// Further runs, each with settings and perhaps a `name`.
    #[serde(default)]
    run: Vec<Table>,
}

/// What a sweep compares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Metric {
    /// The last validation loss; the last training loss of runs without one.
    #[default]
    EvalLoss,
    /// The last training loss.
    Loss,
}

/// A law that is fitted to the runs of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(super) enum Fit {
    /// `L(N, D) = E + A / N^a + B / D^b`.
    #[serde(rename = "scaling-law")]
    ScalingLaw,
}

/// A sweep as its file describes it.
#[derive(Debug)]
pub(super) struct Sweep {
    pub(super) dir: PathBuf,
    pub(super) config: Vec<PathBuf>,
    pub(super) jobs: usize,
    pub(super) gpus: Option<usize>,
    pub(super) metric: Metric,
    pub(super) fit: Option<Fit>,
    /// The keys by which the runs differ.
    pub(super) keys: Vec<String>,
    pub(super) runs: Vec<SweepRun>,
}

/// A run of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SweepRun {
    /// The name of its folder.
    pub(super) name: String,
    /// Its settings by key, those of all runs included.
    pub(super) settings: BTreeMap<String, Value>,
}

impl Sweep {
    /// Reads a file. Relative paths in it are relative to its folder.
    ///
    /// # Errors
    /// It cannot be read, has an unknown key, or describes no run or the same run twice.
    pub(super) fn read(path: &Path) -> Result<Self, TrainError> {
        let text = fs::read_to_string(path).map_err(|source| TrainError::Read {
            path: path.into(),
            source,
        })?;
        let origin = format!("`{}`", path.display());
        let toml = |source| TrainError::Toml { origin, source };
        let file: SweepFile = toml::from_str(&text).map_err(toml)?;
        let refuse = |why: String| TrainError::Value {
            place: format!("`{}`", path.display()),
            why,
        };
        let folder = path.parent().unwrap_or(Path::new(""));
        let stem = path.file_stem().unwrap_or_default();
        let dir = file.dir.unwrap_or_else(|| Path::new("runs").join(stem));
        let jobs = file.jobs.unwrap_or(1);
        if jobs == 0 || file.gpus == Some(0) {
            return Err(refuse("`jobs` and `gpus` must be at least 1".into()));
        }
        let common = flat(file.set);
        let grid = flat(file.grid);
        let mut runs = combinations(&grid).map_err(&refuse)?;
        let mut keys: Vec<String> = grid.into_keys().collect();
        for mut table in file.run {
            let name = match table.remove("name") {
                None => None,
                Some(Value::String(name)) => Some(name),
                Some(other) => return Err(refuse(format!("the name {other} of a run is no text"))),
            };
            let settings = flat(table);
            keys.extend(settings.keys().cloned());
            let name = name.unwrap_or_else(|| name_of(&settings));
            runs.push(SweepRun { name, settings });
        }
        let mut seen = BTreeSet::new();
        keys.retain(|key| seen.insert(key.clone()));
        let mut names = BTreeSet::new();
        for run in &mut runs {
            check_name(&run.name).map_err(&refuse)?;
            if !names.insert(run.name.clone()) {
                return Err(refuse(format!(
                    "two runs are called `{}`: give one of them another `name`",
                    run.name
                )));
            }
            if let Some(key) = run.settings.keys().find(|key| *key == "run.dir") {
                return Err(refuse(format!("`{key}` is chosen by the sweep: remove it")));
            }
            for (key, value) in &common {
                let own = run.settings.entry(key.clone());
                own.or_insert_with(|| value.clone());
            }
        }
        if runs.is_empty() {
            return Err(refuse(
                "it has no runs: add a table [grid] of lists, or a [[run]]".into(),
            ));
        }
        Ok(Self {
            dir: folder.join(dir),
            config: file.config.iter().map(|file| folder.join(file)).collect(),
            jobs,
            gpus: file.gpus,
            metric: file.metric,
            fit: file.fit,
            keys,
            runs,
        })
    }
}

/// Dotted keys of nested tables: `optimizer.lr` of `{ optimizer = { lr = .. } }`.
fn flat(table: Table) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    for (key, value) in table {
        match value {
            Value::Table(inner) => {
                let inner = flat(inner).into_iter();
                found.extend(inner.map(|(below, value)| (format!("{key}.{below}"), value)));
            }
            value => {
                found.insert(key, value);
            }
        }
    }
    found
}

/// A run for each combination of the values of a grid.
fn combinations(grid: &BTreeMap<String, Value>) -> Result<Vec<SweepRun>, String> {
    if grid.is_empty() {
        return Ok(Vec::new());
    }
    let mut all = vec![BTreeMap::new()];
    for (key, values) in grid {
        let Value::Array(values) = values else {
            return Err(format!(
                "`{key}` in [grid] is {values}: write a list of values, or move it to [set]"
            ));
        };
        if values.is_empty() || all.len().saturating_mul(values.len()) > MOST_RUNS {
            return Err(format!(
                "the grid has no combination, or more than {MOST_RUNS} (`{key}` has {} values)",
                values.len()
            ));
        }
        let more = |settings: &BTreeMap<String, Value>| {
            let settings = settings.clone();
            values.iter().map(move |value| {
                let mut settings = settings.clone();
                settings.insert(key.clone(), value.clone());
                settings
            })
        };
        all = all.iter().flat_map(more).collect();
    }
    let run = |settings| SweepRun {
        name: name_of(&settings),
        settings,
    };
    Ok(all.into_iter().map(run).collect())
}

/// A name made of settings: `layers2-lr0.001`.
fn name_of(settings: &BTreeMap<String, Value>) -> String {
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || "._+".contains(*c);
    let last = |key: &str| key.rsplit('.').next().unwrap_or(key).to_string();
    let parts = settings.iter().map(|(key, value)| {
        let is_same = |other: &&String| last(other) == last(key);
        let name = match settings.keys().filter(is_same).count() {
            1 => last(key),
            _ => key.clone(),
        };
        let text = match value {
            Value::String(text) => text.clone(),
            value => value.to_string(),
        };
        let text: String = text
            .chars()
            .map(|c| if is_plain(&c) { c } else { '_' })
            .collect();
        format!("{name}{text}")
    });
    parts.collect::<Vec<_>>().join("-")
}

/// Refuses names that are no names of folders.
fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_alphanumeric() || "._+-=".contains(c);
    let is_reserved = name.starts_with('.') || name == LOGS;
    match !name.is_empty() && name.len() <= 200 && name.chars().all(is_plain) && !is_reserved {
        true => Ok(()),
        false => Err(format!(
            "`{name}` cannot be the name of a run's folder: set its `name` to letters, digits and \
             any of . _ + - ="
        )),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn read(text: &str) -> Result<Sweep, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lr.toml");
        fs::write(&path, text).unwrap();
        Sweep::read(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn a_grid_and_a_list_are_runs_with_names() {
        let text = "config = [\"base.toml\"]\n[set]\ntrain.steps = 5\n[grid]\n\
            optimizer.lr = [1e-3, 3e-3]\n\"model.layers\" = [2, 4]\n[[run]]\nname = \"wide\"\n\
            model.hidden = 64\ntrain.steps = 7\n";
        let sweep = read(text).unwrap();
        let names: Vec<_> = sweep.runs.iter().map(|run| run.name.as_str()).collect();
        let expected = [
            "layers2-lr0.001",
            "layers2-lr0.003",
            "layers4-lr0.001",
            "layers4-lr0.003",
            "wide",
        ];
        assert_eq!(names, expected);
        assert_eq!(sweep.keys[..2], ["model.layers", "optimizer.lr"]);
        assert_eq!(sweep.runs[0].settings["train.steps"], Value::Integer(5));
        assert_eq!(sweep.runs[4].settings["train.steps"], Value::Integer(7));
        assert!(sweep.dir.ends_with("runs/lr") && sweep.config[0].ends_with("base.toml"));
    }

    #[rstest]
    #[case("", "it has no runs")]
    #[case("[grid]\noptimizer.lr = 1e-3\n", "write a list of values")]
    #[case("jobs = 0\n[grid]\noptimizer.lr = [1]\n", "at least 1")]
    #[case(
        "[[run]]\nname = \"a\"\n[[run]]\nname = \"a\"\n",
        "two runs are called `a`"
    )]
    #[case("[[run]]\nname = \"../a\"\n", "cannot be the name")]
    #[case("[[run]]\nrun.dir = \"x\"\n", "chosen by the sweep")]
    #[case("fits = \"scaling-law\"\n", "unknown field `fits`")]
    #[case("fit = \"line\"\n", "scaling-law")]
    fn a_file_without_a_meaning_is_refused(#[case] text: &str, #[case] message: &str) {
        let error = read(text).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
}
