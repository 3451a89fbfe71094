//! Command lines, parsed as the programs parse them.

use std::{collections::BTreeSet, ffi::OsString, sync::OnceLock};

use cargo_metadata::MetadataCommand;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, error::ErrorKind};
use megaburn::{
    cli::{self, TrainArgs},
    train::ConfigLayers,
};

use super::shell::is_program;
use crate::house::rules::root;

/// What `cargo` can build and run in the workspace.
struct Targets {
    packages: BTreeSet<String>,
    features: BTreeSet<String>,
    /// Kind and name, like `example memory`.
    targets: BTreeSet<String>,
}

fn targets() -> &'static Targets {
    static TARGETS: OnceLock<Targets> = OnceLock::new();
    TARGETS.get_or_init(|| {
        let metadata = MetadataCommand::new()
            .manifest_path(root().join("Cargo.toml"))
            .no_deps()
            .exec()
            .unwrap();
        let mut found = Targets {
            packages: BTreeSet::new(),
            features: BTreeSet::new(),
            targets: BTreeSet::new(),
        };
        for package in metadata.packages {
            found.packages.insert(package.name.to_string());
            for feature in package.features.into_keys() {
                found.features.insert(format!("{}/{feature}", package.name));
                found.features.insert(feature);
            }
            for target in package.targets {
                for kind in &target.kind {
                    found.targets.insert(format!("{kind} {}", target.name));
                }
            }
        }
        found
    })
}

/// Checks a command of `megaburn` or `cargo`: its flags, settings, layouts, and what it runs in
/// turn.
pub(super) fn check(words: &[String]) -> Result<(), String> {
    match words[0].as_str() {
        "cargo" => cargo(words),
        _ => megaburn(words),
    }
}

fn megaburn(words: &[String]) -> Result<(), String> {
    let matches = matches(cli::command(), words)?;
    if let Some(matches) = matches {
        let mut inner = &matches;
        let mut name = "";
        while let Some((below, of_it)) = inner.subcommand() {
            (name, inner) = (below, of_it);
        }
        settings(inner, ["train", "plan", "search"].contains(&name))?;
        let launched = inner.try_get_many::<OsString>("command").ok().flatten();
        let launched: Vec<String> = launched
            .into_iter()
            .flatten()
            .map(|word| word.to_str().unwrap().to_string())
            .collect();
        if launched.first().is_some_and(|first| is_program(first)) {
            check(&launched)?;
        }
    }
    Ok(())
}

/// The matches of a command line, or `None` if it asks for help or the version.
fn matches(command: Command, words: &[String]) -> Result<Option<ArgMatches>, String> {
    match command.try_get_matches_from(words) {
        Ok(matches) => Ok(Some(matches)),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(None),
            _ => Err(error.to_string()),
        },
    }
}

/// Checks `--config`, `--set` and `--layout` like a run; with `is_run` also what a run refuses, such
/// as a batch that the layout cannot split.
fn settings(matches: &ArgMatches, is_run: bool) -> Result<(), String> {
    let values = |id: &str| -> Vec<String> {
        let found = matches.try_get_many::<String>(id).ok().flatten();
        found.into_iter().flatten().cloned().collect()
    };
    let mut layers = ConfigLayers::new();
    // Whether all of the configuration is known here.
    let mut is_known = values("resume").is_empty() && values("init").is_empty();
    for file in values("config") {
        let path = root().join(&file);
        if path.is_file() {
            layers = layers.with_file(path).map_err(|e| e.to_string())?;
        } else if file.starts_with("configs/") {
            return Err(format!("{file} does not exist"));
        } else {
            is_known = false;
        }
    }
    for text in values("set") {
        layers = layers.with_set(&text).map_err(|e| e.to_string())?;
        is_known &= !text.starts_with("data.tokenizer=");
    }
    let has_layout = !values("layout").is_empty();
    for layout in values("layout") {
        layers = layers.with_layout(&layout).map_err(|e| e.to_string())?;
    }
    if is_run && is_known {
        let config = layers.load().map_err(|e| e.to_string())?;
        if has_layout {
            config.layout(None).map_err(|e| e.to_string())?;
        }
    }
    Ok(())
}

/// The flags of cargo that pages use.
fn cargo_command() -> Command {
    let flag = |name: &'static str| Arg::new(name).long(name).action(ArgAction::SetTrue);
    let value = |name: &'static str| {
        let arg = Arg::new(name).long(name).action(ArgAction::Append);
        arg.value_delimiter(',')
    };
    let build = |name: &'static str| {
        Command::new(name)
            .args(
                [
                    "release",
                    "locked",
                    "workspace",
                    "bins",
                    "examples",
                    "all-targets",
                ]
                .map(flag),
            )
            .args(["example", "bin", "test", "features"].map(value))
            .arg(value("package").short('p'))
            .arg(Arg::new("target").long("target"))
            .arg(Arg::new("args").num_args(0..).trailing_var_arg(true))
    };
    let install = build("install").arg(Arg::new("path").long("path"));
    let install = install.arg(Arg::new("root").long("root"));
    Command::new("cargo")
        .subcommand_required(true)
        .subcommands(["build", "run", "test", "check", "clippy", "bench"].map(build))
        .subcommand(install)
}

fn cargo(words: &[String]) -> Result<(), String> {
    let Some(matches) = matches(cargo_command(), words)? else {
        return Ok(());
    };
    let (command, matches) = matches.subcommand().unwrap();
    let values = |id: &str| -> Vec<String> {
        let found = matches.get_many::<String>(id);
        found.into_iter().flatten().cloned().collect()
    };
    let targets = targets();
    for package in values("package") {
        if !targets.packages.contains(&package) {
            return Err(format!("there is no package {package}"));
        }
    }
    for feature in values("features") {
        if !targets.features.contains(&feature) {
            return Err(format!("no package has the feature {feature}"));
        }
    }
    for kind in ["example", "bin", "test"] {
        for name in values(kind) {
            if !targets.targets.contains(&format!("{kind} {name}")) {
                return Err(format!("there is no {kind} {name}"));
            }
        }
    }
    if command != "run" {
        return Ok(());
    }
    let program = [values("example"), values("bin")].concat().pop();
    let program = program.unwrap_or_default();
    let words = [vec![program.clone()], values("args")].concat();
    let train = || TrainArgs::augment_args(Command::new("run"));
    match program.as_str() {
        "megaburn" => megaburn(&words),
        "llama_pretrain" | "memory" => run(train(), &words, true),
        "own_model" => run(cli::train_command(), &words, false),
        _ => Ok(()),
    }
}

fn run(command: Command, words: &[String], has_our_keys: bool) -> Result<(), String> {
    match matches(command, words)? {
        Some(matches) if has_our_keys => settings(&matches, true),
        _ => Ok(()),
    }
}
