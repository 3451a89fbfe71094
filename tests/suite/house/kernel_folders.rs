//! Every operation of `cubecl-kernels` has one folder shape. Its README describes the parts.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::rules::{root, visit};

/// The parts that an operation has if it has them at all, each a file or a folder of this name.
const PARTS: [&str; 8] = [
    "mod",
    "options",
    "reference",
    "op",
    "fallback",
    "launch",
    "kernels",
    "tests",
];

/// The folder of device code that operations share.
const SHARED: &str = "kernel_parts";

/// The files and folders that an operation has besides the parts. A new one needs a reason that the
/// parts do not cover: a function of the API with its tests, or a type that several parts use.
const OWN: [(&str, &[&str]); 13] = [
    (
        "activation",
        &["clamped_swiglu", "geglu", "gelu", "squared_relu", "swiglu"],
    ),
    (
        "attention",
        &["biased", "fused", "largest_scores", "scores"],
    ),
    (
        "attention/partial",
        &["merge", "partial_attention", "sinks"],
    ),
    ("bias", &["column_sum"]),
    ("cross_entropy", &["fused_linear", "soft_cap"]),
    ("dropout", &["add", "key"]),
    (
        "linear/grouped",
        &[
            "choice",
            "gradients",
            "operands",
            "products",
            "quantized",
            "rows",
        ],
    ),
    ("moe", &["gradient", "overlapped_read"]),
    ("moe/router", &["choose", "logits", "routed"]),
    ("norms", &["layer_norm", "rms_norm"]),
    (
        "optimizer",
        &[
            "adamw",
            "bf16_out",
            "checks",
            "fp8_moment",
            "gradients",
            "lion",
            "remainder",
            "sgd",
        ],
    ),
    (
        "quantized",
        &[
            "amax",
            "counts",
            "format",
            "found",
            "grouped",
            "hadamard",
            "kept",
            "operands",
            "random_numbers",
            "recipe",
            "scale",
            "sent_weight",
            "sequence_shards",
        ],
    ),
    (
        "rope",
        &["checks", "long", "packed", "scaling", "table", "yarn"],
    ),
];

/// Folders that only hold operations and what these share.
const GROUPS: [&str; 1] = ["moe"];

fn sources() -> PathBuf {
    root().join("cubecl-kernels/src")
}

/// A source file: its path without `.rs` below `cubecl-kernels/src`, and its code without comments.
struct Source {
    path: Vec<String>,
    code: String,
}

impl Source {
    fn new(path: &str, code: &str) -> Self {
        let lines = code.lines().map(|line| line.split("//").next().unwrap());
        Self {
            path: path.split('/').map(String::from).collect(),
            code: lines.collect::<Vec<_>>().join("\n"),
        }
    }

    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        visit(&sources(), &mut |path| {
            let name = path.strip_prefix(sources()).unwrap().with_extension("");
            let code = fs::read_to_string(path).unwrap();
            all.push(Self::new(name.to_str().unwrap(), &code));
        });
        assert!(all.len() > 150, "only {} files were looked at", all.len());
        all
    }

    /// Whether the file is, or is below, the part of this name.
    fn is_in(&self, part: &str) -> bool {
        self.path.iter().any(|name| name == part)
    }

    /// What the file has that belongs in another part.
    fn misplaced(&self) -> Vec<&'static str> {
        let is_shared = self.path[0] == SHARED;
        let has = |text: &str| self.code.contains(text);
        let is_root = self.path.len() == 1;
        let is_for = |backend: &str| {
            has(&format!(" for {backend} {{")) || has(&format!(" for burn::backend::{backend} {{"))
        };
        let launches = has("::launch(") || has("::launch_unchecked(") || has("unsafe ");
        let found = [
            (
                has("#[cube(launch") && !self.is_in("kernels"),
                "a kernel outside of `kernels`",
            ),
            (
                has("#[cube]") && !self.is_in("kernels") && !is_shared,
                "device code outside of `kernels`",
            ),
            (
                launches && !self.is_in("launch"),
                "a launch outside of `launch`",
            ),
            (
                has("CubeTensor") && self.is_in("kernels"),
                "code of the host in `kernels`",
            ),
            (
                (has("FusedOp<") || has("MultiOutputOp<")) && !self.is_in("op"),
                "an operation under autodiff outside of `op`",
            ),
            (
                is_for("Flex") && !is_root && !self.is_in("fallback"),
                "the implementation of a CPU backend outside of `fallback`",
            ),
            (
                is_for("Cube") && !is_root && !self.is_in("launch"),
                "the implementation of a GPU backend outside of `launch`",
            ),
        ];
        found
            .into_iter()
            .filter_map(|(is_found, what)| is_found.then_some(what))
            .collect()
    }
}

/// A folder of an operation, or of several: it has a `mod.rs` and is not a part of another one.
fn is_operation(folder: &str) -> bool {
    let is_part = |name: &str| PARTS.contains(&name) || name == SHARED;
    !folder.is_empty() && !folder.split('/').any(is_part)
}

/// The names in each operation's folder.
fn operations(sources: &[Source]) -> Vec<(String, BTreeSet<String>)> {
    let mut folders = BTreeSet::new();
    for source in sources {
        for depth in 1..source.path.len() {
            folders.insert(source.path[..depth].join("/"));
        }
    }
    let names = |folder: &str| {
        let depth = folder.split('/').count();
        let below = sources
            .iter()
            .filter(|source| source.path.len() > depth && source.path[..depth].join("/") == folder);
        below.map(|source| source.path[depth].clone()).collect()
    };
    let folders = folders.into_iter().filter(|folder| is_operation(folder));
    folders
        .map(|folder| (folder.clone(), names(&folder)))
        .collect()
}

#[test]
fn kernels_and_launches_stand_in_their_parts() {
    let all = Source::all();
    let found: Vec<_> = all
        .iter()
        .filter(|source| !source.misplaced().is_empty())
        .map(|source| (source.path.join("/"), source.misplaced()))
        .collect();
    assert!(found.is_empty(), "move them: {found:#?}");
}

#[test]
fn operations_have_the_same_parts() {
    let operations = operations(&Source::all());
    let mut found = BTreeSet::new();
    for (folder, names) in &operations {
        assert!(names.contains("mod"), "{folder} has no mod.rs");
        for name in names {
            let is_known = PARTS.contains(&name.as_str());
            let nested = format!("{folder}/{name}");
            if !is_known && !operations.iter().any(|(other, _)| *other == nested) {
                found.insert(nested);
            }
        }
    }
    let own = OWN.iter();
    let own =
        own.flat_map(|(folder, names)| names.iter().map(move |name| format!("{folder}/{name}")));
    let own: BTreeSet<String> = own.collect();
    let unknown: Vec<_> = found.difference(&own).collect();
    assert!(
        unknown.is_empty(),
        "give them the name of a part: {unknown:#?}"
    );
    let gone: Vec<_> = own.difference(&found).collect();
    assert!(gone.is_empty(), "remove them from the list: {gone:#?}");
}

/// An operation inside of another one may be a part of that one's formula.
#[test]
fn operations_have_a_reference() {
    let operations = operations(&Source::all());
    assert!(operations.len() > 15, "only {}", operations.len());
    let has_reference = |folder: &Path| {
        let of_folder = operations
            .iter()
            .find(|(other, _)| Path::new(other) == folder);
        of_folder.is_some_and(|(_, names)| names.contains("reference"))
    };
    let without: Vec<_> = operations
        .iter()
        .map(|(folder, _)| folder.as_str())
        .filter(|folder| !GROUPS.contains(folder))
        .filter(|folder| !Path::new(folder).ancestors().any(has_reference))
        .collect();
    assert!(
        without.is_empty(),
        "write their formulas in plain tensors: {without:#?}"
    );
}

#[test]
fn what_stands_in_the_wrong_part_is_found() {
    let kernel = "#[cube(launch, address_type = \"dynamic\")]\nfn k() {}";
    for (path, code, count) in [
        ("sum/kernels", kernel, 0),
        ("sum/kernels/first", kernel, 0),
        ("sum/launch", kernel, 1),
        ("sum/mod", "#[cube]\nfn f() {}", 1),
        ("kernel_parts/reduce", "#[cube]\nfn f() {}", 0),
        ("sum/launch", "unsafe {\n    k::launch_unchecked(a)\n}", 0),
        ("sum/kernels", "k::launch(a)", 1),
        ("sum/kernels", "fn f(x: CubeTensor) {}", 1),
        ("sum/mod", "impl<B: Backend> FusedOp<B, 1> for Sum {}", 1),
        ("sum/op", "impl SumAll for burn::backend::Flex {", 1),
        ("sum/fallback", "impl SumAll for burn::backend::Flex {", 0),
        ("sum/launch", "impl SumAll for Cube {", 0),
        ("sum/fallback", "impl SumAll for Cube {", 1),
        ("sum/mod", "// #[cube] and unsafe { } in a comment", 0),
    ] {
        let source = Source::new(path, code);
        assert_eq!(source.misplaced().len(), count, "{path}: {code}");
    }
}
