//! `configs/recipes.toml`, and the files and the page that are generated from it.

mod file;
mod one_step;
mod page;
mod table;

use std::{env, fs, path::Path};

use megaburn::{
    models::DecoderConfig,
    plan::{HEADROOM, SearchConfig},
};
use serde_json::Value;

use table::{RECIPES, TABLE};

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// How the files are written anew.
const WRITE: &str = "UPDATE_RECIPES=1 cargo test --test suite recipes";

fn is_update() -> bool {
    env::var_os("UPDATE_RECIPES").is_some_and(|value| value == "1")
}

/// Compares a generated file, or writes it.
fn assert_is(path: &str, text: &str) {
    let path = root().join(path);
    if is_update() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == text,
        "{} is out of date; run `{WRITE}`",
        path.display()
    );
}

#[test]
fn the_generated_files_are_up_to_date() {
    for recipe in RECIPES.iter() {
        let path = format!("configs/recipes/{}.toml", recipe.row.name());
        assert_is(&path, &recipe.text);
    }
    assert_is("docs/recipes.md", &page::text(&RECIPES));
    let mut found: Vec<String> = fs::read_dir(root().join("configs/recipes"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort();
    let mut known: Vec<_> = TABLE
        .recipes
        .iter()
        .map(|row| format!("{}.toml", row.name()))
        .collect();
    known.sort();
    assert_eq!(found, known, "remove what is not in the table, by hand");
}

#[test]
fn a_model_is_the_published_one() {
    for (name, model) in &TABLE.models {
        let recipe = RECIPES.iter().find(|recipe| recipe.row.model == *name);
        let config = &recipe
            .unwrap_or_else(|| panic!("no recipe has {name}"))
            .config;
        // Pass 0 token ids, because a recipe sets its own vocabulary.
        let own = config.model.decoder(config.data.longest_seq_len(), 0);
        let parameters = own.whole_plan().unwrap().num_global();
        assert_eq!(parameters, model.parameters, "{name}");
        let json: Value = serde_json::from_str(&model.published).unwrap();
        let published = DecoderConfig::from_hf(&json, Path::new("config.json")).unwrap();
        assert!(own.max_seq_len <= published.max_seq_len, "{name}");
        let published = DecoderConfig {
            max_seq_len: own.max_seq_len,
            // Files do not say how weights were drawn.
            init_std: own.init_std,
            ..published
        };
        assert_eq!(own, published, "{name}");
    }
}

/// Every recipe, which was read strictly from its text, has the layout of the table and leaves
/// enough memory free.
#[test]
fn every_recipe_fits_and_has_a_run_of_its_own() {
    assert!(RECIPES.len() > 40, "only {} recipes", RECIPES.len());
    for recipe in RECIPES.iter() {
        let name = recipe.row.name();
        let config = &recipe.config;
        assert_eq!(config.run.dir, format!("runs/{name}"));
        assert_eq!(config.train.dtype.to_string(), "bf16");
        let plan = recipe.plan();
        assert_eq!(plan.layout.to_string(), recipe.row.layout, "{name}");
        assert_eq!(plan.gpus, recipe.row.gpus(), "{name}");
        let least = HEADROOM * plan.gpu.memory_bytes as f64;
        for stage in &plan.memory {
            let free = stage.headroom_bytes as f64;
            assert!(
                free >= least,
                "{name}: stage {}: {free} of {least}",
                stage.stage
            );
        }
        // Tensor parallelism needs NVLink.
        assert!(plan.layout.tp <= plan.gpu.gpus_per_node, "{name}");
        // The pipeline is filled: no recipe loses a tenth of its time there.
        assert!(
            plan.bubble_fraction < 0.1,
            "{name}: {}",
            plan.bubble_fraction
        );
        let is_fp8 = config.precision.recipe.to_string() != "bf16";
        assert_eq!(
            is_fp8,
            recipe.row.variant.as_deref() == Some("fp8"),
            "{name}"
        );
    }
}

/// Slurm and Kubernetes start as many ranks as the recipe of the 70B has GPUs, and give a step and
/// a save the time that they take.
#[test]
fn the_job_files_of_the_70b_have_the_gpus_of_its_recipe() {
    let name = "llama-3-70b-64xh100";
    let recipe = RECIPES.iter().find(|recipe| recipe.row.name() == name);
    let recipe = recipe.unwrap();
    let read = |ending| {
        let path = root().join(format!("docs/clusters/llama-3-70b.{ending}"));
        fs::read_to_string(path).unwrap()
    };
    let number = |text: &str, key: &str| -> usize {
        let rest = text.split_once(key).unwrap_or_else(|| panic!("no {key}")).1;
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap()
    };
    let (slurm, kubernetes) = (read("sbatch"), read("yaml"));
    for text in [&slurm, &kubernetes] {
        assert!(text.contains(&format!("configs/recipes/{name}.toml")));
    }
    let nodes = number(&slurm, "#SBATCH --nodes=");
    let tasks = number(&slurm, "#SBATCH --ntasks-per-node=");
    assert_eq!(nodes * tasks, recipe.row.gpus());
    assert_eq!(tasks, number(&slurm, "#SBATCH --gpus-per-node="));
    let hosts = number(&kubernetes, "--nnodes ");
    for key in ["completions: ", "parallelism: "] {
        assert_eq!(hosts, number(&kubernetes, key));
    }
    let ranks = number(&kubernetes, "--nproc ");
    assert_eq!(ranks, number(&kubernetes, "nvidia.com/gpu: "));
    assert_eq!(hosts * ranks, recipe.row.gpus());
    let seconds = recipe.plan().time.step_ms / 1e3;
    for grace in [
        number(&slurm, "--signal=USR1@"),
        number(&kubernetes, "terminationGracePeriodSeconds: "),
    ] {
        assert!(grace as f64 > 5.0 * seconds, "{grace} of {seconds}");
    }
}

/// Names the recipes whose names contain `RECIPE` for which a search finds something faster, which
/// goes into the table by hand.
///
/// ```text
/// RECIPE=llama-3-8b cargo test --release --test suite recipes::search -- --ignored --nocapture
/// ```
#[test]
#[ignore = "a search of hundreds of GPUs takes long"]
fn searches_find_nothing_much_faster() {
    let wanted = env::var("RECIPE").unwrap_or_default();
    let mut slower = Vec::new();
    for recipe in RECIPES
        .iter()
        .filter(|recipe| recipe.row.name().contains(&wanted))
    {
        let row = recipe.row;
        let found = SearchConfig::new(recipe.config.clone(), row.gpus())
            .with_gpu(row.gpu())
            .search()
            .unwrap();
        let (own, best) = (recipe.plan().time.step_ms, &found.best[0]);
        if best.step_ms < 0.95 * own {
            slower.push(format!(
                "{}: {own:.0} ms, but {:.0} with {}",
                row.name(),
                best.step_ms,
                best.flags
            ));
        }
    }
    assert!(slower.is_empty(), "{slower:#?}");
}
