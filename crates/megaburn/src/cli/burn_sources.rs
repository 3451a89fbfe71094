//! Real text that is present wherever megaburn was built: Burn's own Rust sources.

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
};

use cargo_metadata::{Error as CargoError, MetadataCommand};
use megaburn_data::{Corpus, DataError, read_text};

/// The version of Burn whose sources are read; the workspace pins the same version.
const BURN_VERSION: &str = "0.22.1";

/// The crates whose sources are read: the Burn crates that every build of megaburn compiles,
/// without code generators and small helpers. About 5 MB.
const BURN_CRATES: [&str; 9] = [
    "burn",
    "burn-autodiff",
    "burn-backend",
    "burn-core",
    "burn-flex",
    "burn-nn",
    "burn-optim",
    "burn-std",
    "burn-tensor",
];

/// The Rust sources of [`BURN_CRATES`], one document per file, sorted by crate and path. The text,
/// and so the hash, does not depend on where the sources were found.
///
/// They are searched for in this order:
/// 1. The paths that `cargo metadata` reports. It runs offline, for the package of
///    `CARGO_MANIFEST_DIR` at run time, else for the nearest `Cargo.toml` above the working
///    directory. Cargo fails offline if an optional crate of the lock file was never downloaded,
///    which is the case after a first build.
/// 2. `$CARGO_HOME/registry/src`, to which that build has downloaded them.
/// 3. megaburn's own sources, which are a different and smaller text ([`Corpus::note`] says why they
///    were taken).
///
/// # Errors
/// None of the three places has sources, or a source file cannot be read.
pub(super) fn burn_sources() -> Result<Corpus, DataError> {
    Search::from_environment().find()
}

/// The places to search for sources.
#[derive(Clone, Debug)]
struct Search {
    /// The manifest that is passed to `cargo metadata`.
    manifest: Option<PathBuf>,
    /// The cargo executable to run. If `None`, this is the cargo that runs the program, else the
    /// one found in `PATH`.
    cargo: Option<PathBuf>,
    cargo_home: Option<PathBuf>,
    /// Project folders whose `crates` folder may hold megaburn's sources.
    projects: Vec<PathBuf>,
}

/// The name and the folder of a crate.
type Root = (String, PathBuf);

impl Search {
    fn from_environment() -> Self {
        let manifest = env::var_os("CARGO_MANIFEST_DIR")
            .map(|dir| Path::new(&dir).join("Cargo.toml"))
            .filter(|manifest| manifest.is_file())
            .or_else(|| {
                let here = env::current_dir().ok()?;
                here.ancestors()
                    .map(|d| d.join("Cargo.toml"))
                    .find(|m| m.is_file())
            });
        let built_here = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
        let running_here = manifest.as_deref().and_then(Path::parent);
        let projects = [built_here, running_here]
            .into_iter()
            .flatten()
            .map(PathBuf::from);
        Self {
            projects: projects.collect(),
            manifest,
            cargo: None,
            cargo_home: env::var_os("CARGO_HOME")
                .map(PathBuf::from)
                .or_else(|| Some(env::home_dir()?.join(".cargo"))),
        }
    }

    fn find(&self) -> Result<Corpus, DataError> {
        let what = format!(
            "Rust sources of {} Burn {BURN_VERSION} crates",
            BURN_CRATES.len()
        );
        let not_cargo = match self.ask_cargo() {
            Ok(roots) => return load(format!("{what} (found by cargo metadata)"), &roots),
            Err(why) => why,
        };
        let not_registry = match self.scan_registry() {
            Ok((place, roots)) => {
                tracing::info!("reading Burn's sources from the registry, because {not_cargo}");
                return load(format!("{what} (found in {})", place.display()), &roots);
            }
            Err(why) => why,
        };
        let tried = format!("{not_cargo}; {not_registry}");
        match self
            .projects
            .iter()
            .map(|p| p.join("crates"))
            .find(|crates| crates.is_dir())
        {
            Some(crates) => {
                tracing::warn!("reading megaburn's own sources instead of Burn's: {tried}");
                let name = format!(
                    "megaburn's own Rust sources (found in {})",
                    crates.display()
                );
                let corpus = load(name, &[("crates".into(), crates)])?;
                Ok(corpus.with_note(Some(format!("Burn's were not found: {tried}"))))
            }
            None => Err(DataError::NoSources {
                tried: format!("{tried}; megaburn's own sources were not found either"),
            }),
        }
    }

    fn ask_cargo(&self) -> Result<Vec<Root>, String> {
        let manifest = self
            .manifest
            .as_ref()
            .ok_or("there is no Cargo.toml above the working folder")?;
        let mut command = MetadataCommand::new();
        command.manifest_path(manifest);
        // `--locked`: the query must not write a lock file into a user's project.
        command.other_options(["--offline", "--locked"].map(String::from));
        if let Some(cargo) = &self.cargo {
            command.cargo_path(cargo);
        }
        let metadata = command.exec().map_err(|error| match error {
            CargoError::CargoMetadata { stderr } => {
                let first = stderr
                    .lines()
                    .find(|l| l.starts_with("error"))
                    .unwrap_or("no reason given");
                format!("cargo metadata says `{first}`")
            }
            other => other.to_string(),
        })?;
        BURN_CRATES
            .iter()
            .map(|&name| {
                let is_it = |p: &&cargo_metadata::Package| {
                    p.name.as_str() == name && p.version.to_string() == BURN_VERSION
                };
                let package = metadata.packages.iter().find(is_it);
                let root = package.and_then(|p| p.manifest_path.parent());
                root.map(|root| (name.to_string(), root.into()))
                    .ok_or_else(|| format!("cargo metadata does not list {name} {BURN_VERSION}"))
            })
            .collect()
    }

    fn scan_registry(&self) -> Result<(PathBuf, Vec<Root>), String> {
        let home = self
            .cargo_home
            .as_ref()
            .ok_or("neither CARGO_HOME nor a home folder is set")?;
        let src = home.join("registry").join("src");
        // `src` has one folder per registry: crates.io and its mirrors.
        let mut places: Vec<PathBuf> = fs::read_dir(&src)
            .map_err(|error| format!("{}: {error}", src.display()))?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect();
        places.sort();
        let roots_in = |place: &PathBuf| {
            let root = |name: &&str| {
                (
                    name.to_string(),
                    place.join(format!("{name}-{BURN_VERSION}")),
                )
            };
            let roots: Vec<Root> = BURN_CRATES.iter().map(root).collect();
            roots
                .iter()
                .all(|(_, root)| root.is_dir())
                .then(|| (place.clone(), roots))
        };
        places.iter().find_map(roots_in).ok_or_else(|| {
            let count = BURN_CRATES.len();
            let src = src.display();
            format!("{src} does not contain all {count} Burn {BURN_VERSION} crates")
        })
    }
}

/// Reads all `.rs` files under `roots` into a corpus, sorted by crate and path.
fn load(name: String, roots: &[Root]) -> Result<Corpus, DataError> {
    let mut files = Vec::new();
    for (label, root) in roots {
        rust_files(root, label, &mut files)?;
    }
    // Sorts by label, not by path, so that the location of the registry does not change the order.
    files.sort();
    let documents = files
        .iter()
        .map(|(_, path)| read_text(path))
        .collect::<Result<_, _>>()?;
    Corpus::from_documents(name, documents)
}

fn rust_files(
    folder: &Path,
    label: &str,
    files: &mut Vec<(String, PathBuf)>,
) -> Result<(), DataError> {
    let unreadable = |source| DataError::Io {
        path: folder.into(),
        source,
    };
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let label = format!("{label}/{name}");
        let kind = entry.file_type().map_err(unreadable)?;
        if kind.is_dir() && name != "target" && !name.starts_with('.') {
            rust_files(&path, &label, files)?;
        } else if kind.is_file() && path.extension() == Some(OsStr::new("rs")) {
            files.push((label, path));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
