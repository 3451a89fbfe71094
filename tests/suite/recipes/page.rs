//! The page of recipes, `docs/recipes.md`.

use megaburn::{
    plan::{Gpu, PlanConfig},
    train::ConfigLayers,
};

use super::{
    file::spaced,
    table::{Model, Recipe},
};

/// What stands above the tables.
const START: &str = "\
# Recipes: N GPUs and this model

This page and the files in [configs/recipes](../configs/recipes) are generated from `configs/recipes.toml`; a test plans
each of them and fails if one is out of date. A recipe is a complete configuration but for your data:

```text
megaburn plan configs/recipes/llama-3-70b-64xh100.toml
megaburn train --config configs/recipes/llama-3-70b-64xh100.toml --set data.path=DATA --set data.tokenizer=FOLDER
```

1. Find your model and the row with your GPUs. If there is none, take the nearest and see
   [other numbers of GPUs](#other-numbers-of-gpus).
2. Set `data.path` and `data.tokenizer` ([data.md](data.md)), and `train.steps` to what you can afford.
3. Start it: on one host as above, on several by a [launcher](clusters.md). The 70B has job files for 8 hosts of 8:
   [llama-3-70b.sbatch](clusters/llama-3-70b.sbatch) and [llama-3-70b.yaml](clusters/llama-3-70b.yaml).
4. Look at the first steps: `metrics.jsonl` has tokens, FLOPs and memory ([logs.md](logs.md)). Far from the table, see
   [what to change first](#what-to-change-first).

";

/// What stands below the tables.
const END: &str = "\
## What to change first

**It does not fit**, although it should by its plan. In this order:

1. `train.fused_linear_cross_entropy = true`, if it is not set: it costs one product with the output matrix.
2. `recompute.modules = [\"norm\", \"activation\"]`: a few percent of the time.
3. `parallel.zero = 2` without a pipeline, then 3; `optimizer.store_param_remainders = true` with any layout.
4. Twice the `tp`, up to 8, or twice the `pp`.
5. `recompute.method = \"uniform\"`: up to a third more time.

`megaburn plan` tries these changes and lists the fastest that fit. [memory.md](memory.md) has all others.

**It is slow.** `megaburn profile` says where the time of a step goes ([profile.md](profile.md)); `megaburn doctor` finds slow
GPUs and links ([doctor.md](doctor.md)).

| most is lost in | change |
|---|---|
| communication of `tp` | less `tp` and more `pp`, or `cp` for long sequences |
| communication of `dp` | a larger `train.global_batch`; `parallel.zero` 1 instead of 3; `parallel.zero_ranks` within a host |
| communication of `ep` | `ep` within a host; fewer GPUs for each copy of the experts |
| the bubble | a larger `train.global_batch`; more `parallel.chunks`; `parallel.schedule = \"zb-v\"` where memory is left |
| the host | a larger `train.micro_batch` |
| products, at a low share of the peak | less `tp`; FP8 ([fp8.md](fp8.md)) |

**The batch is not yours.** It is `train.global_batch` samples whatever the layout is, so change it together with
`optimizer.lr`. It must be a multiple of `dp` times `train.micro_batch`; with `parallel.schedule = \"interleaved\"`, the
micro-batches of a rank must also be a multiple of `pp`.

**The experts do not balance.** `experts` in `metrics.jsonl` has the busiest one of each layer; plans assume balance
([experts.md](experts.md#load-balancing)).

## Other numbers of GPUs

Twice as many GPUs: the same file with `parallel.ranks` doubled doubles `dp`, as long as the batch divides. For any other
number, and before a long run in any case, let the program search:

```text
megaburn search configs/recipes/llama-3-70b-64xh100.toml --gpus 128 --gpu h100
megaburn search configs/recipes/llama-3-8b-8xh100.toml --gpus 8 --measure 3 --write fastest.toml
```

## Where the numbers are from

- **Sizes** are those of the published `config.json` or paper that each file names. A test compares both, and the number
  of parameters.
- **Batches, sequence lengths and learning rates** are those of the papers where they say them, and otherwise of the
  recipes of Megatron-LM (commit d98e8a64) and Megatron-Bridge (commit 067f987d). Each table says which.
- **Layouts** were chosen by `megaburn plan` among those that `megaburn search` tries. Each leaves 5% of the memory free
  at least. Dense models on one host are at most 5% slower than what `megaburn search` finds. They were not measured,
  except where the last column says so.
- **One step of each family** at 1/64 of its width, with the settings of a recipe and every axis of its layout, is
  trained by the tests on rank threads of a CPU.
";

/// A run that NVIDIA measured with Megatron-Bridge.
struct Peer {
    /// A recipe of the model.
    recipe: &'static str,
    run: &'static str,
    /// The layout of the run, and the settings in which it differs from the recipe.
    layout: &'static str,
    sets: &'static [&'static str],
    /// Tokens per second of each GPU.
    measured: f64,
}

const PEERS: [Peer; 5] = [
    Peer {
        recipe: "llama-3-70b-64xh100-fp8",
        run: "64 x h100, FP8, tp4 pp8, 5 chunks, 256 samples",
        layout: "tp4-pp8-dp2-sp",
        sets: &["train.global_batch=256"],
        measured: 1664.0,
    },
    Peer {
        recipe: "llama-3.1-405b-512xh100-fp8",
        run: "1024 x h100, FP8, tp8 cp2 pp8, 8 chunks, 1536 samples",
        layout: "tp8-cp2-pp8-dp8-sp",
        sets: &["train.global_batch=1536", "parallel.chunks=8"],
        measured: 328.0,
    },
    Peer {
        recipe: "qwen3-30b-a3b-16xh100",
        run: "16 x h100, FP8, ep16, 1024 samples",
        layout: "dp16-ep16",
        sets: &["precision.recipe=tensorwise"],
        measured: 8960.0,
    },
    Peer {
        recipe: "qwen3-235b-a22b-256xh100",
        run: "256 x h100, FP8, tp2 pp8 ep32, 4 chunks, 8192 samples",
        layout: "tp2-pp8-dp16-ep32-sp",
        sets: &[
            "train.global_batch=8192",
            "precision.recipe=tensorwise",
            "parallel.chunks=4",
        ],
        measured: 1712.0,
    },
    Peer {
        recipe: "deepseek-v3-512xh100",
        run: "1024 x h100, FP8, tp2 pp8 ep64, 4 chunks, 8192 samples (container 25.09)",
        layout: "tp2-pp8-dp64-ep64-sp",
        sets: &[
            "train.global_batch=8192",
            "precision.recipe=tensorwise",
            "parallel.chunks=4",
            "recompute.method=none",
            "recompute.modules=[\"norm\",\"activation\"]",
        ],
        measured: 1297.0,
    },
];

/// What stands above the table of [`PEERS`].
const COMPARED: &str = "
## Next to Megatron-Bridge

Runs over several hosts that NVIDIA measured, from `docs/performance-summary-archive.md` of Megatron-Bridge (container
26.04.01), next to plans of the same layout, batch and precision, and to the recipes of this page. These are other
systems: the table shows whether plans are plausible. NVIDIA's experts are on several hosts. Its dispatcher sends a token
once to each host and from there over NVLink; that of this program sends it over the network to each GPU that has experts
of it. So such runs are planned slower than NVIDIA's, and the recipes keep experts within a host. The plan of the recipe
of Qwen3 30B-A3B is faster than NVIDIA's run: its experts are small, and a step of it on one host took 13% longer than its
plan ([plan.md](plan.md#time)).

| recipe | its tok/s/GPU | NVIDIA's run | measured tok/s/GPU | planned | planned / measured |
|---|---|---|---|---|---|
";

impl Peer {
    /// Tokens per second of each GPU in the plan of NVIDIA's run.
    fn planned(&self, recipe: &Recipe) -> f64 {
        let layers = ConfigLayers::new()
            .with_text("recipe", &recipe.text)
            .unwrap();
        let set = |layers: ConfigLayers, set: &&str| layers.with_set(set).unwrap();
        let layers = self.sets.iter().fold(layers, set);
        let config = layers.with_layout(self.layout).unwrap().load().unwrap();
        let layout = config.layout(None).unwrap();
        let plan = PlanConfig::new(config, layout).with_gpu(Gpu::H100).plan();
        plan.unwrap().tokens_per_second_per_gpu
    }
}

fn compared(recipes: &[Recipe]) -> String {
    let mut text = COMPARED.to_string();
    for peer in PEERS {
        let mut recipes = recipes.iter();
        let recipe = recipes.find(|recipe| recipe.row.name() == peer.recipe);
        let recipe = recipe.unwrap();
        let (planned, own) = (
            peer.planned(recipe),
            recipe.plan().tokens_per_second_per_gpu,
        );
        let Peer {
            recipe,
            run,
            measured,
            ..
        } = peer;
        let ratio = planned / measured;
        text += &format!(
            "| {recipe} | {own:.0} | {run} | {measured:.0} | {planned:.0} | {ratio:.2} |\n"
        );
    }
    text
}

/// The text of the page.
pub(super) fn text(recipes: &[Recipe]) -> String {
    let mut text = START.to_string();
    text += "| model | parameters | GPUs |\n|---|---|---|\n";
    let mut names: Vec<&str> = recipes.iter().map(|recipe| &*recipe.row.model).collect();
    names.dedup();
    for name in &names {
        let (model, own) = of(recipes, name);
        let links = own.iter().map(|recipe| {
            let kind = recipe.row.variant.as_deref().unwrap_or_default();
            let on = format!("{} {kind}", recipe.row.on.replacen('x', " x ", 1));
            format!("[{}]({})", on.trim_end(), path(recipe))
        });
        text += &format!(
            "| [{}](#{}) | {} | {} |\n",
            model.title,
            anchor(&model.title),
            spaced(model.parameters),
            links.collect::<Vec<_>>().join(", ")
        );
    }
    text += HOW_SURE;
    for name in &names {
        let (model, own) = of(recipes, name);
        text += &section(model, &own);
    }
    text + END + &compared(recipes)
}

/// What the columns of the tables mean.
const HOW_SURE: &str = "
## The tables

| column | what it is |
|---|---|
| GiB | planned memory of the fullest rank, and that of the GPU |
| step | planned time of a step |
| tok/s/GPU | tokens per second of each GPU |
| MFU | FLOPs of the model as a share of the GPU's peak in bf16, also in FP8 |
| 1T tokens | days for 10^12 tokens, without evaluations, checkpoints and failures |
| how sure | **measured**: a step of this model was measured on this GPU, as the notes below the table say |
| | **one host**: other steps on up to 4 of these GPUs were measured within 12% of their plans ([plan.md](plan.md#time)) |
| | **network assumed**: several hosts, with 80% of 400 Gbit/s for each GPU (200 Gbit/s with A100s); no such run was measured |
| | **GPU assumed**: no step was measured on this GPU; it is assumed to reach the shares of its peaks that an H100 reaches |

";

/// A model and its recipes.
fn of<'a>(recipes: &'a [Recipe], name: &str) -> (&'static Model, Vec<&'a Recipe>) {
    let own: Vec<_> = recipes
        .iter()
        .filter(|recipe| recipe.row.model == name)
        .collect();
    (own[0].model, own)
}

fn path(recipe: &Recipe) -> String {
    format!("../configs/recipes/{}.toml", recipe.row.name())
}

/// The anchor of a heading.
fn anchor(title: &str) -> String {
    let kept = title
        .chars()
        .filter(|c| c.is_alphanumeric() || " -".contains(*c));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

fn section(model: &Model, own: &[&Recipe]) -> String {
    let mut text = format!("## {}\n\n{}\n\n", model.title, model.schedule);
    text += "| GPUs | layout | settings | GiB | step | tok/s/GPU | MFU | 1T tokens | how sure |\n";
    text += "|---|---|---|---|---|---|---|---|---|\n";
    for recipe in own {
        text += &line(recipe);
    }
    for recipe in own {
        text += &format!("\n- **{}**: {}", recipe.row.name(), recipe.row.why);
        if let Some(measured) = &recipe.row.measured {
            text += &format!(" Measured: {measured}");
        }
    }
    text + "\n\n"
}

fn line(recipe: &Recipe) -> String {
    let plan = recipe.plan();
    let gib = |bytes: f64| bytes / f64::from(1 << 30);
    let fullest = plan.memory.iter().map(|memory| memory.total_bytes).max();
    let seconds = plan.time.step_ms / 1e3;
    let step = if seconds < 10.0 {
        format!("{seconds:.2} s")
    } else {
        format!("{seconds:.1} s")
    };
    let days = 1e12 / plan.tokens_per_second_per_gpu / plan.gpus as f64 / 86400.0;
    format!(
        "| [{}]({}) | `{}` | {} | {:.1} of {:.1} | {step} | {:.0} | {:.0}% | {days:.0} days | {} |\n",
        recipe.row.on.replacen('x', " x ", 1),
        path(recipe),
        plan.layout,
        settings(recipe),
        gib(fullest.unwrap_or(0) as f64),
        gib(plan.gpu.memory_bytes as f64),
        plan.tokens_per_second_per_gpu,
        100.0 * plan.mfu,
        how_sure(recipe),
    )
}

/// The settings of a recipe that its model does not have.
fn settings(recipe: &Recipe) -> String {
    let mut all = Vec::new();
    for (section, table) in &recipe.row.set {
        for (name, value) in table.as_table().unwrap() {
            let value = value.to_string().replace([' ', '"'], "");
            // A layout of stages is long, and the file has it.
            let value = if value.len() > 30 { "..." } else { &value };
            all.push(format!("`{section}.{name}={value}`"));
        }
    }
    all.join(" ")
}

fn how_sure(recipe: &Recipe) -> &'static str {
    let gpu = recipe.plan().gpu;
    if recipe.row.measured.is_some() {
        "measured"
    } else if !gpu.is_measured {
        "GPU assumed"
    } else if recipe.plan().gpus > gpu.gpus_per_node {
        "network assumed"
    } else {
        "one host"
    }
}
