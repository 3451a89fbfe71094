use std::process::Command;

use tempfile::TempDir;

use super::*;

/// A project that depends on crates with the names of Burn's, and a registry that holds the same
/// files.
struct Machine {
    dir: TempDir,
}

impl Machine {
    fn new() -> Self {
        let machine = Self {
            dir: TempDir::new().unwrap(),
        };
        let mut manifest = String::from("[package]\nname = \"app\"\nversion = \"1.0.0\"\n");
        manifest += "[workspace]\n[dependencies]\n";
        for name in BURN_CRATES {
            manifest += &format!("{name} = {{ path = \"vendor/z-{name}\" }}\n");
            let package = format!("[package]\nname = \"{name}\"\nversion = \"{BURN_VERSION}\"\n");
            for root in [format!("app/vendor/z-{name}"), machine.in_registry(name)] {
                machine.write(&format!("{root}/Cargo.toml"), &package);
                machine.write(
                    &format!("{root}/src/lib.rs"),
                    &format!("//! {name}\nmod a;\n"),
                );
                machine.write(
                    &format!("{root}/src/a/mod.rs"),
                    &format!("// a of {name}\n"),
                );
                machine.write(&format!("{root}/src/empty.rs"), "");
                machine.write(&format!("{root}/README.md"), "no source");
                machine.write(&format!("{root}/target/out.rs"), "not ours");
                machine.write(&format!("{root}/.hidden/out.rs"), "not ours");
            }
        }
        machine.write("app/Cargo.toml", &manifest);
        machine.write("app/src/lib.rs", "");
        machine.write("megaburn/crates/one/src/lib.rs", "// own\n");
        let lock = Command::new(env!("CARGO"))
            .args([
                "generate-lockfile",
                "--offline",
                "--quiet",
                "--manifest-path",
            ])
            .arg(machine.path("app/Cargo.toml"))
            .status();
        assert!(lock.unwrap().success());
        machine
    }

    fn in_registry(&self, name: &str) -> String {
        format!("home/registry/src/index-1/{name}-{BURN_VERSION}")
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn search(&self) -> Search {
        Search {
            manifest: Some(self.path("app/Cargo.toml")),
            cargo: None,
            cargo_home: Some(self.path("home")),
            projects: vec![self.path("nothing"), self.path("megaburn")],
        }
    }

    /// A search on a machine whose cargo cannot run.
    fn search_without_cargo(&self) -> Search {
        Search {
            cargo: Some(self.path("no-such-cargo")),
            ..self.search()
        }
    }
}

#[test]
fn cargo_and_the_registry_lead_to_the_same_text() {
    let machine = Machine::new();
    let by_cargo = machine.search().find().unwrap();
    let by_scan = machine.search_without_cargo().find().unwrap();
    let what = "Rust sources of 9 Burn 0.22.1 crates";
    assert_eq!(by_cargo.name(), format!("{what} (found by cargo metadata)"));
    let place = machine.path("home/registry/src/index-1");
    assert_eq!(
        by_scan.name(),
        format!("{what} (found in {})", place.display())
    );
    assert_eq!(by_cargo.documents(), by_scan.documents());
    assert_eq!(by_cargo.hash(), by_scan.hash());
    assert_eq!((by_cargo.note(), by_scan.note()), (None, None));
    assert_eq!(by_cargo.documents().len(), 2 * BURN_CRATES.len());
    // Sorted by crate and path: `burn-autodiff/..` precedes `burn/..`.
    assert_eq!(
        by_cargo.documents()[..2],
        ["// a of burn-autodiff\n", "//! burn-autodiff\nmod a;\n"]
    );
}

#[test]
fn a_manifest_is_not_needed_where_the_registry_is() {
    let machine = Machine::new();
    let corpus = Search {
        manifest: None,
        ..machine.search()
    }
    .find()
    .unwrap();
    assert!(corpus.name().contains("(found in "), "{}", corpus.name());
}

#[test]
fn asking_cargo_leaves_a_project_without_lock_file_as_it_was() {
    let machine = Machine::new();
    let lock = machine.path("app/Cargo.lock");
    fs::remove_file(&lock).unwrap();
    let corpus = machine.search().find().unwrap();
    assert!(corpus.name().contains("(found in "), "{}", corpus.name());
    assert!(!lock.exists());
}

#[test]
fn without_all_of_burn_the_own_sources_are_taken_and_it_is_said_why() {
    let machine = Machine::new();
    fs::remove_dir_all(machine.path(&machine.in_registry("burn-nn"))).unwrap();
    let corpus = machine.search_without_cargo().find().unwrap();
    let crates = machine.path("megaburn/crates");
    let name = format!(
        "megaburn's own Rust sources (found in {})",
        crates.display()
    );
    assert_eq!(corpus.name(), name);
    assert_eq!(corpus.documents(), ["// own\n"]);
    let note = corpus.note().unwrap();
    assert!(
        note.starts_with("Burn's were not found: failed to start `cargo metadata`"),
        "{note}"
    );
    assert!(
        note.ends_with(" does not contain all 9 Burn 0.22.1 crates"),
        "{note}"
    );
}

#[test]
fn a_project_with_another_burn_is_not_taken_for_ours() {
    let machine = Machine::new();
    let other = "[package]\nname = \"burn-nn\"\nversion = \"0.21.0\"\n";
    machine.write("app/vendor/z-burn-nn/Cargo.toml", other);
    let lock = fs::read_to_string(machine.path("app/Cargo.lock")).unwrap();
    let at = "name = \"burn-nn\"\nversion = ";
    let lock = lock.replace(&format!("{at}\"0.22.1\""), &format!("{at}\"0.21.0\""));
    machine.write("app/Cargo.lock", &lock);
    let error = machine.search().ask_cargo().unwrap_err();
    assert_eq!(error, "cargo metadata does not list burn-nn 0.22.1");
}

#[test]
fn with_nothing_at_all_the_error_names_what_was_tried() {
    let machine = Machine::new();
    fs::remove_file(machine.path("app/Cargo.lock")).unwrap();
    let cargo_home = Some(machine.path("nowhere"));
    let search = Search {
        cargo_home,
        projects: vec![],
        ..machine.search()
    };
    let error = search.find().unwrap_err().to_string();
    assert!(error.starts_with("no text to train on was found (cargo metadata says `error: "));
    let src = machine.path("nowhere/registry/src");
    assert!(error.contains(&format!("; {}: ", src.display())), "{error}");
    let end = "; megaburn's own sources were not found either); give a file as data";
    assert!(error.ends_with(end), "{error}");
}

#[test]
fn this_machine_has_sources_and_gives_them_twice_the_same() {
    let first = burn_sources().unwrap();
    let second = burn_sources().unwrap();
    assert_eq!(first.hash(), second.hash());
    assert_eq!(first.name(), second.name());
    assert!(first.documents().iter().any(|d| d.contains("fn ")));
    if first.note().is_none() {
        let bytes = first.num_bytes().unwrap();
        assert!((4_500_000..5_500_000).contains(&bytes), "{first}");
    }
}

#[test]
fn the_crates_are_those_that_every_build_of_this_workspace_has() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .unwrap();
    let output = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--offline",
            "--locked",
            "--workspace",
            "--edges",
            "normal",
        ])
        .args(["--prefix", "none", "--format", "{p}"])
        .current_dir(root)
        .output()
        .unwrap();
    if !output.status.success() {
        // Offline, `cargo tree` fails if an optional crate was never downloaded. Then the registry
        // has only the crates that were built.
        let found = Search::from_environment().scan_registry();
        assert!(found.is_ok(), "build the whole workspace first: {found:?}");
        return;
    }
    let tree = String::from_utf8(output.stdout).unwrap();
    for name in BURN_CRATES {
        let line = format!("{name} v{BURN_VERSION}");
        assert!(
            tree.lines().any(|l| l == line),
            "{line} is not in `cargo tree`"
        );
    }
}
