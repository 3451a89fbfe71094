//! Rules for the manifests of the crates that are published.

use std::path::Path;

use cargo_metadata::{Dependency, DependencyKind, MetadataCommand, Package};

use super::rules::root;

/// What keeps crates.io from taking a crate, or its readers from finding it.
fn faults(package: &Package) -> Vec<String> {
    let mut found = Vec::new();
    let mut refuse = |is_wrong: bool, what: &str| {
        if is_wrong {
            found.push(format!("{}: {what}", package.name));
        }
    };
    let is_empty = |text: &Option<String>| text.as_ref().is_none_or(String::is_empty);
    refuse(is_empty(&package.description), "no description");
    refuse(is_empty(&package.license), "no license");
    refuse(is_empty(&package.repository), "no repository");
    refuse(package.categories.is_empty(), "no category");
    let keywords = &package.keywords;
    let are_few = (1..=5).contains(&keywords.len());
    refuse(!are_few, "not 1 to 5 keywords");
    let is_long = keywords.iter().any(|word| word.len() > 20);
    refuse(is_long, "a keyword of more than 20 characters");
    let readme = package.readme.as_ref().map(|path| {
        let folder = package.manifest_path.parent().unwrap();
        folder.join(path)
    });
    let is_there = readme.is_some_and(|path| Path::new(&path).is_file());
    refuse(!is_there, "no README");
    let needs_version = |dependency: &&Dependency| {
        dependency.path.is_some() && dependency.kind != DependencyKind::Development
    };
    for dependency in package.dependencies.iter().filter(needs_version) {
        let name = &dependency.name;
        let is_own = dependency.req.matches(&package.version);
        let is_any = dependency.req.comparators.is_empty();
        refuse(
            is_any || !is_own,
            &format!("give `{name}` the version {}", package.version),
        );
    }
    found
}

#[test]
fn crates_can_be_published() {
    let metadata = MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .no_deps()
        .exec()
        .unwrap();
    let published = metadata
        .packages
        .iter()
        .filter(|package| package.publish.is_none());
    let published: Vec<_> = published.collect();
    assert!(published.len() > 15, "{} crates", published.len());
    let found: Vec<_> = published.into_iter().flat_map(faults).collect();
    assert!(found.is_empty(), "{found:#?}");
}
