//! Project rules that can be checked automatically.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use cargo_metadata::{DependencyKind, MetadataCommand};

/// The level of each crate; a crate depends only on crates of lower levels.
pub(crate) const FLOORS: [(&str, u8); 30] = [
    ("megaburn-derive", 0),
    ("megaburn-mesh", 0),
    ("megaburn-cuda", 0),
    ("megaburn-torch", 0),
    ("megaburn-store", 0),
    ("megaburn-watch", 0),
    ("megaburn-autograd", 1),
    ("megaburn-data", 1),
    ("megaburn-collective", 2),
    ("megaburn-kernels", 2),
    ("megaburn-doctor", 3),
    ("megaburn-launch", 3),
    ("megaburn-parallel", 3),
    ("megaburn-pipeline", 3),
    ("megaburn-optim", 3),
    ("megaburn-checkpoint", 3),
    ("megaburn-models", 4),
    ("megaburn-records", 4),
    ("megaburn-learner", 4),
    ("megaburn-report", 4),
    ("megaburn-train", 5),
    ("megaburn-plan", 6),
    ("megaburn-verify", 6),
    ("megaburn", 7),
    ("megaburn-examples", 8),
    ("megaburn-benches", 8),
    ("megaburn-kernel-tests", 8),
    ("megaburn-store-server", 8),
    ("megaburn-test-support", 8),
    ("megaburn-tests", 9),
];

/// The most lines of a source file, without its tests.
const LONGEST_FILE: usize = 400;

/// The most lines of a file of tests.
const LONGEST_TEST_FILE: usize = 450;

/// The most characters of a comment line, except for the rows of a table.
const LONGEST_COMMENT: usize = 125;

/// Files that are allowed to be longer. This list may only shrink.
const LONG_FILES: [&str; 0] = [];

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_path_buf()
}

#[test]
fn floors_point_down() {
    let floors = BTreeMap::from(FLOORS);
    let metadata = MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .no_deps()
        .exec()
        .unwrap();
    let mut edges = 0;
    for package in &metadata.packages {
        let name = package.name.as_str();
        let floor = floors
            .get(name)
            .unwrap_or_else(|| panic!("{name} has no floor: add it"));
        for dependency in &package.dependencies {
            let Some(below) = floors.get(dependency.name.as_str()) else {
                continue;
            };
            let is_test = dependency.kind == DependencyKind::Development;
            assert!(
                below < floor || is_test,
                "{name} (floor {floor}) depends on {} (floor {below})",
                dependency.name
            );
            edges += 1;
        }
    }
    assert!(edges > 20, "only {edges} edges were looked at");
}

#[test]
fn a_file_holds_one_idea() {
    let mut long = Vec::new();
    let mut files = 0;
    for folder in ["crates", "cubecl-kernels", "examples", "tests", "benches"] {
        visit(&root().join(folder), &mut |path| {
            files += 1;
            let code = fs::read_to_string(path).unwrap();
            let name = path.strip_prefix(root()).unwrap().display().to_string();
            let (lines, limit) = if is_test_file(&name) {
                (code.lines().count(), LONGEST_TEST_FILE)
            } else {
                (lines_without_tests(&code), LONGEST_FILE)
            };
            if lines > limit && !LONG_FILES.contains(&name.as_str()) {
                long.push(format!("{name}: {lines} lines, at most {limit}"));
            }
        });
    }
    assert!(files > 50, "only {files} files were looked at");
    assert!(long.is_empty(), "split them: {long:#?}");
}

/// Whether a file contains only tests: it is in a `tests` folder, or is a module of tests.
fn is_test_file(name: &str) -> bool {
    let folders = ["tests", "tests.rs"];
    Path::new(name)
        .iter()
        .any(|part| folders.contains(&part.to_str().unwrap()))
}

/// The number of lines before the module of tests, which is the last item of a file.
fn lines_without_tests(code: &str) -> usize {
    let lines: Vec<&str> = code.lines().collect();
    let is_start = |at: usize| {
        let module = lines
            .get(at + 1)
            .is_some_and(|line| line.starts_with("mod "));
        lines[at] == "#[cfg(test)]" && module && lines[at + 1].ends_with('{')
    };
    (0..lines.len())
        .find(|at| is_start(*at))
        .unwrap_or(lines.len())
}

#[test]
fn tests_at_the_end_of_a_file_do_not_count() {
    let code = "use a;\n\n#[cfg(test)]\nuse b;\n\nfn c() {}\n";
    assert_eq!(lines_without_tests(code), 6);
    let tests = "\n#[cfg(test)]\nmod tests {\n    #[test]\n    fn d() {}\n}\n";
    assert_eq!(lines_without_tests(&format!("{code}{tests}")), 7);
    assert!(is_test_file("crates/a/tests/b.rs") && is_test_file("crates/a/src/tests.rs"));
    assert!(!is_test_file("crates/a/src/tested.rs"));
}

#[test]
fn modules_stand_where_their_names_say() {
    let mut found = Vec::new();
    for folder in ["crates", "cubecl-kernels", "examples", "tests", "benches"] {
        visit(&root().join(folder), &mut |path| {
            let code = fs::read_to_string(path).unwrap();
            if code
                .lines()
                .any(|line| line.trim_start().starts_with("#[path"))
            {
                found.push(path.display().to_string());
            }
        });
    }
    assert!(found.is_empty(), "make a library of it: {found:#?}");
}

#[test]
fn comments_are_wrapped() {
    let mut long = Vec::new();
    for folder in ["crates", "cubecl-kernels", "examples", "tests", "benches"] {
        visit(&root().join(folder), &mut |path| {
            let code = fs::read_to_string(path).unwrap();
            for (number, line) in code.lines().enumerate() {
                let text = line.trim_start();
                let is_row = text.trim_start_matches(['/', '!', ' ']).starts_with('|');
                if text.starts_with("//") && !is_row && line.chars().count() > LONGEST_COMMENT {
                    long.push(format!("{}:{}", path.display(), number + 1));
                }
            }
        });
    }
    assert!(long.is_empty(), "wrap them: {long:#?}");
}

#[test]
fn unsafe_stands_where_foreign_code_is_called() {
    let mut found = Vec::new();
    for folder in ["crates", "cubecl-kernels", "examples", "benches"] {
        visit(&root().join(folder), &mut |path| {
            let code = fs::read_to_string(path).unwrap();
            let path = path.strip_prefix(root()).unwrap().display().to_string();
            let has_unsafe = lines_with_unsafe(&code) > 0;
            // An unchecked kernel launch is such a call, and the only one that a kernel's file may
            // contain.
            let launches = code.matches("::launch_unchecked(").count();
            let launch =
                path.starts_with("cubecl-kernels/src/") && lines_with_unsafe(&code) == launches;
            if has_unsafe && !launch && !path.starts_with("crates/megaburn-cuda/") {
                found.push(path);
            }
        });
    }
    assert_eq!(found, [""; 0]);
    for code in [
        "unsafe {",
        "x = unsafe{ f() }",
        "pub unsafe fn f()",
        "unsafe impl Send for A {}",
    ] {
        assert_eq!(lines_with_unsafe(code), 1, "{code}");
    }
    for code in [
        "unsafe extern \"C\" {",
        "unsafe trait A {}",
        "#[unsafe(no_mangle)]",
        "(unsafe",
    ] {
        assert_eq!(lines_with_unsafe(code), 1, "{code}");
    }
    for code in [
        "// unsafe",
        "an_unsafe_name",
        "unsafe_op_in_unsafe_fn",
        "\"unsafe\"",
    ] {
        assert_eq!(lines_with_unsafe(code), 0, "{code}");
    }
}

/// The number of lines with the keyword `unsafe`, whatever it applies to: a block, a function, an
/// `impl`, an `extern`, an attribute. Comments do not count.
fn lines_with_unsafe(code: &str) -> usize {
    let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == '"';
    let is_unsafe = |line: &str| {
        line.match_indices("unsafe").any(|(at, word)| {
            let before = &line[..at];
            let after = &line[at + word.len()..];
            !before.ends_with(is_name) && !after.starts_with(is_name)
        })
    };
    let code = code
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    code.filter(|line| is_unsafe(line)).count()
}

/// Calls `f` on every Rust source below a folder.
pub(crate) fn visit(folder: &Path, f: &mut impl FnMut(&Path)) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            visit(&path, f);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            f(&path);
        }
    }
}
