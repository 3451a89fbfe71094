//! The table of contents has every page, and links lead somewhere.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use super::{Page, folder_of, pages};
use crate::house::rules::root;

/// The parts of the book, in order.
const PARTS: [&str; 8] = [
    "# First steps",
    "# Your data and model",
    "# Layouts",
    "# Memory and speed",
    "# When something goes wrong",
    "# Clusters",
    "# Coming from elsewhere",
    "# Reference",
];

#[test]
fn the_table_of_contents_has_every_page_once() {
    let summary = Page::read("docs/SUMMARY.md");
    let mut listed: BTreeMap<String, usize> = BTreeMap::new();
    for link in summary.links() {
        *listed.entry(format!("docs/{link}")).or_default() += 1;
    }
    for page in pages() {
        if page.name == "README.md" {
            continue;
        }
        let times = listed.remove(&page.name);
        assert_eq!(times, Some(1), "{} in docs/SUMMARY.md", page.name);
    }
    assert!(listed.is_empty(), "no such page: {listed:?}");
    let parts: Vec<&str> = summary.headings();
    assert_eq!(parts[0], "# Summary");
    assert_eq!(parts[1..], PARTS);
}

#[test]
fn the_introduction_names_every_page() {
    let introduction = Page::read("docs/README.md");
    let links = introduction.links();
    for page in pages() {
        if let Some(name) = page.name.strip_prefix("docs/")
            && name != "README.md"
        {
            assert!(
                links.iter().any(|link| link == name),
                "docs/README.md does not name {name}"
            );
        }
    }
}

#[test]
fn every_title_is_unique() {
    let mut titles: BTreeMap<String, String> = BTreeMap::new();
    for page in pages() {
        let before = titles.insert(page.title().to_lowercase(), page.name.clone());
        assert_eq!(before, None, "{} has the same title", page.name);
    }
}

/// The pages of the whole repository below a folder, by their paths.
fn pages_below(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(root().join(folder)).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let path = folder.join(&name);
        let is_foreign = ["target", "patches", "fixtures"].contains(&name.as_str());
        if is_foreign || name.starts_with('.') {
            continue;
        }
        if root().join(&path).is_dir() {
            pages_below(&path, found);
        } else if name.ends_with(".md") {
            found.push(path.to_str().unwrap().to_string());
        }
    }
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let mut names = Vec::new();
    pages_below(Path::new(""), &mut names);
    let mut followed = 0;
    let mut broken = Vec::new();
    for page in names.iter().map(|name| Page::read(name)) {
        for link in page.links() {
            if link.starts_with("https://") || link.starts_with("http://") {
                continue;
            }
            followed += 1;
            if let Some(why) = wrong(&page, &link) {
                broken.push(format!("{}: ({link}) {why}", page.name));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
    assert!(followed > 500, "only {followed} links were followed");
}

/// What is wrong with a link, if anything.
fn wrong(page: &Page, link: &str) -> Option<String> {
    let (path, anchor) = match link.split_once('#') {
        Some((path, anchor)) => (path, Some(anchor)),
        None => (link, None),
    };
    let target = match path {
        "" => PathBuf::from(&page.name),
        path => folder_of(&page.name).join(path),
    };
    if !root().join(&target).exists() {
        return Some("does not exist".into());
    }
    let anchor = anchor?;
    let name = target.to_str().unwrap();
    if !name.ends_with(".md") {
        return Some("has no headings".into());
    }
    let anchors = Page::read(name).anchors();
    (!anchors.contains(anchor)).then(|| format!("has no such heading; it has {anchors:?}"))
}

#[test]
fn a_broken_link_is_found() {
    let page = Page::read("docs/layouts.md");
    assert_eq!(wrong(&page, "#the-axes"), None);
    assert_eq!(wrong(&page, "memory.md#recomputation"), None);
    assert_eq!(wrong(&page, "../README.md"), None);
    for link in ["#the-axis", "memory.md#x", "memories.md", "../Cargo.toml#x"] {
        assert!(wrong(&page, link).is_some(), "{link}");
    }
}
