//! Checks `docs/`, the README and other pages: quoted code and paths must exist, and commands must
//! run.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use megaburn::{
    models::{DecoderConfig, Family, decoder::Positions},
    parallel::{Activation, NormKind, QkNormKind},
};
use rstest::rstest;

use crate::{
    house::rules::{FLOORS, visit},
    runs::child::Ranks,
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_path_buf()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// The blocks of a page that are fenced as `language`.
pub(crate) fn blocks(page: &str, language: &str) -> Vec<String> {
    let fence = format!("```{language}\n");
    page.split(&fence)
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap().to_string())
        .collect()
}

#[test]
fn the_page_on_families_quotes_the_source() {
    let mut sources = Vec::new();
    for folder in ["crates", "examples", "tests"] {
        visit(&root().join(folder), &mut |path| {
            sources.push(fs::read_to_string(path).unwrap())
        });
    }
    let quoted = blocks(&read("docs/families.md"), "rust");
    assert!(quoted.len() > 5, "only {} blocks", quoted.len());
    for block in quoted {
        assert!(
            sources.iter().any(|source| source.contains(&block)),
            "nowhere:\n{block}"
        );
    }
}

/// The paths that a page names in backticks: texts with a slash or a file extension.
fn paths(page: &str) -> Vec<&str> {
    let is_path = |text: &&str| {
        let endings = [".md", ".py", ".rs", ".toml"];
        let has_ending = endings.iter().any(|ending| text.ends_with(ending));
        !text.contains(' ') && (text.contains('/') || has_ending)
    };
    page.split('`').skip(1).step_by(2).filter(is_path).collect()
}

#[test]
fn the_architecture_names_only_files_that_exist() {
    let page = read("ARCHITECTURE.md");
    assert!(!page.contains("```"), "a code block is no path");
    let found = paths(&page);
    assert!(found.len() > 80, "only {} paths", found.len());
    let is_missing = |path: &&str| !root().join(path).exists();
    let missing: Vec<&str> = found.into_iter().filter(is_missing).collect();
    assert!(missing.is_empty(), "moved or removed: {missing:#?}");
}

#[test]
fn the_architecture_has_every_crate_on_its_floor() {
    let page = read("ARCHITECTURE.md");
    for (name, floor) in FLOORS {
        let row = format!("| {floor} | `{name}` | `");
        assert!(
            page.contains(&row),
            "ARCHITECTURE.md has no row that begins {row}"
        );
    }
}

#[test]
fn ci_checks_the_oldest_rust() {
    let toolchain = format!("toolchain: \"{}\"", env!("CARGO_PKG_RUST_VERSION"));
    let workflow = read(".github/workflows/ci.yml");
    assert!(workflow.contains(&toolchain), "ci.yml has no {toolchain}");
}

/// Code without indentation, doc comment markers and the lines that rustdoc hides.
pub(crate) fn bare(code: &str) -> String {
    let lines = code.lines().map(|line| {
        let line = line.trim();
        let marks = ["//!", "///"];
        let text = marks.iter().find_map(|mark| line.strip_prefix(mark));
        text.unwrap_or(line).trim()
    });
    let shown: Vec<&str> = lines.filter(|line| !line.starts_with("# ")).collect();
    shown.join("\n")
}

#[test]
fn pages_of_crates_quote_code_that_is_compiled() {
    let mut sources = Vec::new();
    for folder in ["crates", "cubecl-kernels", "examples"] {
        visit(&root().join(folder), &mut |path| {
            sources.push(bare(&fs::read_to_string(path).unwrap()))
        });
    }
    let mut folders = vec![root().join("cubecl-kernels")];
    let crates = fs::read_dir(root().join("crates")).unwrap();
    folders.extend(crates.map(|entry| entry.unwrap().path()));
    let mut quoted = 0;
    for folder in folders {
        let page = fs::read_to_string(folder.join("README.md"))
            .unwrap_or_else(|error| panic!("{}/README.md: {error}", folder.display()));
        for block in blocks(&page, "rust") {
            quoted += 1;
            let block = bare(&block);
            assert!(
                sources.iter().any(|source| source.contains(&block)),
                "{}/README.md shows what is nowhere:\n{block}",
                folder.display()
            );
        }
    }
    assert!(quoted > 8, "only {quoted} blocks");
}

/// The first cells of a row in the table of parts, and what the row states about head norms and
/// tied matrices.
fn cells(config: &DecoderConfig) -> [&'static str; 6] {
    let norm = match config.norm {
        NormKind::Rms => "RMSNorm",
        NormKind::Layer => "LayerNorm",
    };
    let positions = match config.positions {
        Positions::Rotary(_) => "rotary",
        Positions::Learned => "learned",
        Positions::Alibi(_) => "ALiBi",
        Positions::Relative(_) => "relative bias",
        Positions::None => "none",
    };
    let activation = match config.activation {
        Activation::SwiGlu => "SwiGLU",
        Activation::GeluTanh => "GELU-tanh",
        Activation::Gelu => "GELU",
        Activation::Relu => "ReLU",
        Activation::GeGlu => "GeGLU",
        Activation::GeGluTanh => "GeGLU-tanh",
        Activation::ClampedSwiGlu => "clamped SwiGLU",
        Activation::SquaredRelu => "squared ReLU",
    };
    let biases = match (config.qkv_bias, config.output_bias, config.mlp_bias) {
        (false, false, false) => "none",
        (true, false, false) => "queries, keys, values",
        (true, true, true) => "all",
        other => panic!("name the biases {other:?}"),
    };
    let yes_or_no = |yes| if yes { "yes" } else { "no" };
    [
        norm,
        positions,
        activation,
        biases,
        match config.qk_norm {
            None => "no",
            Some(QkNormKind::Head) => "yes",
            Some(QkNormKind::Width) => "width",
            Some(QkNormKind::L2) => "L2",
        },
        yes_or_no(config.tied),
    ]
}

#[test]
fn the_table_of_parts_has_every_family() {
    let page = read("docs/families.md");
    let rows: Vec<&str> = page
        .lines()
        .filter(|line| line.starts_with("| `"))
        .collect();
    assert_eq!(rows.len(), Family::BUILT_IN.len());
    for family in Family::BUILT_IN {
        let name = format!("`{family}`");
        let row = rows
            .iter()
            .find(|row| row.contains(&name))
            .unwrap_or_else(|| panic!("{name}"));
        let row: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let found = [row[1], row[2], row[3], row[4], row[5], row[7]];
        for (found, expected) in found.into_iter().zip(cells(&family.template())) {
            let says = found == expected || found.starts_with(&format!("{expected}, "));
            assert!(says, "{name}: `{found}`, and the template has {expected}");
        }
    }
}

/// Runs all commands of a page, in a folder that looks like a clone with a release build.
#[rstest]
#[case::context("docs/context.md")]
#[case::experts("docs/experts.md")]
#[case::families("docs/families.md")]
#[case::huggingface("docs/huggingface.md")]
#[case::mtp("docs/mtp.md")]
fn the_commands_run_as_they_stand(#[case] page: &str) {
    let commands: String = blocks(&read(page), "sh")
        .iter()
        .flat_map(|block| block.split_inclusive('\n'))
        .filter(|line| !line.starts_with("cargo build "))
        .collect();
    assert!(commands.contains("megaburn verify "), "{commands}");

    let clone = tempfile::tempdir().unwrap();
    let at = |name: &str| clone.path().join(name);
    fs::create_dir_all(at("target/release")).unwrap();
    symlink(
        env!("CARGO_BIN_EXE_megaburn-under-test"),
        at("target/release/megaburn"),
    )
    .unwrap();
    symlink(root().join("tests"), at("tests")).unwrap();
    fs::write(
        at("corpus.txt"),
        "The river goes on. In the evening they sat. ".repeat(400),
    )
    .unwrap();
    Ranks::shell(&commands, clone.path()).finish();
}

/// The environment that a scheduler sets for a process, and its translation to torchrun's
/// variables.
#[rstest]
#[case::slurm(
    "SLURM_PROCID=9 SLURM_NTASKS=16 SLURM_LOCALID=1 SLURM_NTASKS_PER_NODE=8",
    true
)]
#[case::open_mpi(
    "OMPI_COMM_WORLD_RANK=9 OMPI_COMM_WORLD_SIZE=16 OMPI_COMM_WORLD_LOCAL_RANK=1 \
     OMPI_COMM_WORLD_LOCAL_SIZE=8",
    true
)]
#[case::mpich("PMI_RANK=9 PMI_SIZE=16 MPI_LOCALRANKID=1", false)]
fn a_job_tells_each_process_which_rank_it_is(#[case] names: &str, #[case] tells_host: bool) {
    let script = format!("env -i {names} docs/clusters/as-rank.sh /usr/bin/env");
    let ended = Ranks::shell(&script, &root()).finish().remove(0);
    let found = |name: &str| ended.stdout.lines().any(|line| line == name);
    assert!(
        ["RANK=9", "WORLD_SIZE=16", "LOCAL_RANK=1"]
            .into_iter()
            .all(found),
        "{ended:?}"
    );
    assert_eq!(found("LOCAL_WORLD_SIZE=8"), tells_host, "{ended:?}");
}

#[test]
fn every_job_file_is_named_and_is_a_script() {
    let page = read("docs/clusters.md");
    for entry in fs::read_dir(root().join("docs/clusters")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(
            page.contains(&format!("(clusters/{name})")),
            "{name} is not in docs/clusters.md"
        );
        if name != "as-rank.sh" {
            let file = read(&format!("docs/clusters/{name}"));
            assert!(
                file.contains("MEGABURN_JOB_TOKEN"),
                "{name} gives the job no token"
            );
        }
        if !name.ends_with(".yaml") {
            Ranks::shell(&format!("bash -n docs/clusters/{name}"), &root()).finish();
        }
    }
}
