//! Rules for the imports inside a crate.

use std::{collections::BTreeMap, fs, path::Path};

use super::rules::{root, visit};

/// The path of a module or item, from the root of its crate.
type ItemPath = Vec<String>;

/// An item of a `use` statement, or an item that it re-exports.
#[derive(Debug, PartialEq)]
struct Import {
    path: ItemPath,
    /// The name that it has in the module.
    name: String,
    is_public: bool,
}

/// The imports of the modules of a crate, each of which is a file.
struct Crate(BTreeMap<ItemPath, Vec<Import>>);

#[test]
fn no_two_files_import_each_other() {
    let mut found = Vec::new();
    for (name, sources) in crates() {
        for (one, other) in sources.circles() {
            found.push(format!(
                "{name}: {} <-> {}",
                one.join("::"),
                other.join("::")
            ));
        }
    }
    assert!(
        found.is_empty(),
        "move what both need into the file where it belongs: {found:#?}"
    );
}

#[test]
fn names_are_imported_from_their_modules() {
    let mut found = Vec::new();
    for (name, sources) in crates() {
        for (module, import) in sources.root_imports() {
            found.push(format!("{name}: {}: {import}", module.join("::")));
        }
    }
    assert!(
        found.is_empty(),
        "lib.rs re-exports these for other crates: {found:#?}"
    );
}

/// The crates, by folder.
fn crates() -> Vec<(String, Crate)> {
    let mut folders: Vec<_> = fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    folders.push(root().join("cubecl-kernels"));
    let name = |folder: &Path| {
        let name = folder.strip_prefix(root()).unwrap();
        name.display().to_string()
    };
    let crates: Vec<_> = folders
        .iter()
        .map(|folder| (name(folder), Crate::read(&folder.join("src"))))
        .collect();
    assert!(
        crates.len() > 8,
        "only {} crates were looked at",
        crates.len()
    );
    crates
}

impl Crate {
    /// Reads the sources of a crate, without its tests.
    fn read(folder: &Path) -> Self {
        let mut modules = BTreeMap::new();
        visit(folder, &mut |path| {
            let place = path.strip_prefix(folder).unwrap().with_extension("");
            let mut module: ItemPath = place
                .iter()
                .map(|part| part.to_str().unwrap().to_string())
                .collect();
            if module
                .iter()
                .any(|part| part.ends_with("tests") || part == "testing")
            {
                return;
            }
            if module
                .last()
                .is_some_and(|name| ["lib", "main", "mod"].contains(&name.as_str()))
            {
                module.pop();
            }
            modules.insert(module, imports(&fs::read_to_string(path).unwrap()));
        });
        Self(modules)
    }

    /// The path from the root of what `path` means in a module; `None` outside of the crate.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<ItemPath> {
        let first = path.first()?;
        let supers = path.iter().take_while(|part| *part == "super").count();
        let mut full = match first.as_str() {
            "crate" => path[1..].to_vec(),
            "self" => [module, &path[1..]].concat(),
            "super" => [&module[..module.len() - supers], &path[supers..]].concat(),
            _ => {
                let full = [module, path].concat();
                self.0
                    .contains_key(&full[..=module.len()])
                    .then_some(full)?
            }
        };
        if full.last().is_some_and(|part| part == "self") {
            full.pop();
        }
        Some(full)
    }

    /// The module that defines an item, behind all re-exports; `None` outside of the crate.
    fn home(&self, path: &[String]) -> Option<ItemPath> {
        let depth = (0..=path.len())
            .rev()
            .find(|depth| self.0.contains_key(&path[..*depth]))?;
        let (module, rest) = path.split_at(depth);
        let Some(name) = rest.first() else {
            return Some(module.to_vec());
        };
        let Some(import) = self.0[module].iter().find(|import| import.name == *name) else {
            return Some(module.to_vec());
        };
        let target = self.absolute(module, &import.path)?;
        if target == path[..=depth] {
            return Some(module.to_vec());
        }
        self.home(&[&target, &rest[1..]].concat())
    }

    /// Whether a file imports from another one. The re-exports of a module's own submodules do not
    /// count.
    fn imports_from(&self, one: &ItemPath, other: &ItemPath) -> bool {
        self.0[one].iter().any(|import| {
            let Some(path) = self.absolute(one, &import.path) else {
                return false;
            };
            let is_reexport = import.is_public && other.starts_with(one) && path.starts_with(one);
            !is_reexport && self.home(&path).as_ref() == Some(other)
        })
    }

    /// The pairs of files that import each other.
    fn circles(&self) -> Vec<(&ItemPath, &ItemPath)> {
        let pairs = self
            .0
            .keys()
            .flat_map(|one| self.0.keys().map(move |other| (one, other)));
        let both = |one, other| self.imports_from(one, other) && self.imports_from(other, one);
        pairs
            .filter(|(one, other)| one < other && both(one, other))
            .collect()
    }

    /// The imports of names that the crate's root re-exports, with the modules that have them.
    fn root_imports(&self) -> Vec<(&ItemPath, String)> {
        let root = ItemPath::new();
        let exports: Vec<_> = self.0[&root]
            .iter()
            .filter(|import| import.is_public && self.absolute(&root, &import.path).is_some())
            .map(|import| &import.name)
            .collect();
        let mut found = Vec::new();
        for (module, imports) in self.0.iter().filter(|(module, _)| !module.is_empty()) {
            for import in imports {
                let path = self.absolute(module, &import.path).unwrap_or_default();
                let Some(first) = path.first() else { continue };
                if exports.contains(&first) && !self.0.contains_key(&path[..1]) {
                    found.push((module, import.path.join("::")));
                }
            }
        }
        found
    }
}

/// The imports of a file up to its module of tests.
fn imports(code: &str) -> Vec<Import> {
    let code: Vec<&str> = code
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect();
    let code = code.join("\n");
    let end = code.find("#[cfg(test)]\nmod ").filter(|at| {
        let line = code[*at..].lines().nth(1);
        line.is_some_and(|line| line.ends_with('{'))
    });
    let mut found = Vec::new();
    for statement in code[..end.unwrap_or(code.len())].split_inclusive(';') {
        let Some(statement) = statement.strip_suffix(';') else {
            continue;
        };
        // The statement begins at the last line that starts with `use`, after what precedes it.
        let Some(start) = statement.lines().rev().position(|line| {
            let line = line.trim_start();
            line.starts_with("use ") || line.starts_with("pub") && line.contains(" use ")
        }) else {
            continue;
        };
        let lines: Vec<&str> = statement.lines().collect();
        let text = lines[lines.len() - 1 - start..].join(" ");
        let Some((visibility, tree)) = text.split_once("use ") else {
            continue;
        };
        // A string may have a line that starts with this word.
        let is_tree = |c: char| c.is_alphanumeric() || "_:{},* ".contains(c);
        if !tree.chars().all(is_tree) || tree.contains('{') != tree.contains('}') {
            continue;
        }
        let is_public = !visibility.trim().is_empty();
        for (path, name) in leaves(&[], tree.trim()) {
            found.push(Import {
                path,
                name,
                is_public,
            });
        }
    }
    found
}

/// The items of a `use` tree below `prefix`, each with its name.
fn leaves(prefix: &[String], tree: &str) -> Vec<(ItemPath, String)> {
    if let Some((before, inner)) = tree.split_once('{') {
        let inner = inner.rsplit_once('}').unwrap().0;
        let before = before.split("::").map(str::trim);
        let before = before.filter(|part| !part.is_empty()).map(String::from);
        let prefix: ItemPath = prefix.iter().cloned().chain(before).collect();
        let parts = top_level_parts(inner);
        return parts
            .into_iter()
            .flat_map(|part| leaves(&prefix, part))
            .collect();
    }
    let (path, alias) = match tree.split_once(" as ") {
        Some((path, alias)) => (path, Some(alias.trim().to_string())),
        None => (tree, None),
    };
    let path = path.split("::").map(|part| part.trim().to_string());
    let path: ItemPath = prefix.iter().cloned().chain(path).collect();
    let last = path.iter().rev().find(|part| *part != "self");
    let name = alias.unwrap_or_else(|| last.cloned().unwrap_or_default());
    vec![(path, name)]
}

/// Splits at the commas that are in no braces.
fn top_level_parts(text: &str) -> Vec<&str> {
    let mut depth = 0;
    let parts = text.split(|c| {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    });
    parts
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .collect()
}

#[test]
fn imports_are_found_in_all_their_forms() {
    let path = |text: &str| -> ItemPath { text.split("::").map(String::from).collect() };
    let code = "use std::fmt; // a comment\n\npub use one::{A, two::{self, B as C}};\n\
        pub(crate) use crate::three::D;\nfn f() {\n    use super::E;\n}\n\
        #[cfg(test)]\nmod tests {\n    use super::F;\n}\n";
    let expected = [
        ("std::fmt", "fmt", false),
        ("one::A", "A", true),
        ("one::two::self", "two", true),
        ("one::two::B", "C", true),
        ("crate::three::D", "D", true),
        ("super::E", "E", false),
    ];
    let expected = expected.map(|(of, name, is_public)| Import {
        path: path(of),
        name: name.into(),
        is_public,
    });
    assert_eq!(imports(code), expected);
}

#[test]
fn circles_and_imports_through_the_root_are_found() {
    let files = [
        ("", "pub use a::A;\npub use b::deep::B;"),
        ("a", "use crate::B;"),
        ("b", "mod deep;\npub(crate) use deep::B;"),
        ("b::deep", "use crate::a::A;\nuse super::super::c;"),
        ("c", "use crate::b::B as Other;"),
        ("d", "use crate::c::f;\nuse super::A;"),
    ];
    let modules = files.map(|(module, code)| {
        let path = module.split("::").filter(|part| !part.is_empty());
        (path.map(String::from).collect(), imports(code))
    });
    let sources = Crate(BTreeMap::from(modules));
    let circles = sources.circles();
    let circles = circles
        .iter()
        .map(|(one, other)| [one.join("::"), other.join("::")]);
    assert_eq!(
        circles.collect::<Vec<_>>(),
        [["a", "b::deep"], ["b::deep", "c"]]
    );
    let through_root = sources.root_imports();
    let through_root = through_root
        .iter()
        .map(|(module, import)| (module.join("::"), import.as_str()));
    let expected = [("a".into(), "crate::B"), ("d".into(), "super::A")];
    assert_eq!(through_root.collect::<Vec<_>>(), expected);
}
