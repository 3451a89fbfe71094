//! The time and the memory of plans next to those of committed results.

use std::fs;

use megaburn::plan::{Gpu, Plan};

use super::{LLAMA, config, plan, root};

/// How far a predicted step may be from a measured one.
const TIME: f64 = 0.15;
/// How far predicted memory of tensors may be from what was polled.
const TENSORS: f64 = 0.05;
/// How far predicted memory may be from what the pools of the allocator had reserved after the last
/// step, which they do in pages as large as the largest tensor.
const RESERVED: f64 = 0.14;

/// A row of a result file: the text that shows that it is there, the run, and what was measured.
struct Row {
    file: &'static str,
    section: &'static str,
    text: &'static str,
    gpu: Gpu,
    model: &'static str,
    layout: &'static str,
    micro_batches: usize,
    sets: &'static str,
    ms: f64,
    gib: Option<f64>,
    /// The most that tensors took, where it was polled.
    tensors: Option<f64>,
}

const FOUR_LAYERS: &str = "
[model]
hidden = 4096
ffn = 14336
layers = 4
heads = 32
kv_heads = 8
vocab = 32000
tied = false
[train]
global_batch = 1
micro_batch = 1
dtype = \"bf16\"
";

const GPT2: &str = "
[model]
family = \"gpt2\"
vocab = 50257
hidden = 768
ffn = 3072
layers = 12
heads = 12
kv_heads = 12
[data]
seq_len = 1024
[train]
dtype = \"bf16\"
";

const QWEN2: &str = "
[model]
family = \"qwen2\"
vocab = 151936
hidden = 896
ffn = 4864
layers = 24
heads = 14
kv_heads = 2
rope_theta = 1e6
[data]
seq_len = 2048
[train]
dtype = \"bf16\"
";

const GPT_7B: &str = "
[model]
family = \"gpt2\"
vocab = 131073
hidden = 4096
ffn = 16384
layers = 8
heads = 32
kv_heads = 8
tied = false
[data]
seq_len = 8192
[train]
dtype = \"bf16\"
micro_batch = 1
";

const BERT_LARGE: &str = "
[model]
family = \"bert\"
vocab = 30522
hidden = 1024
ffn = 4096
layers = 24
heads = 16
norm_eps = 1e-12
[data]
seq_len = 512
[train]
dtype = \"bf16\"
";

/// A row of a table, whose cells may be padded, in `file` under the title `section`.
#[allow(clippy::too_many_arguments, reason = "a row of a table")]
const fn row(
    [file, section, text]: [&'static str; 3],
    gpu: Gpu,
    model: &'static str,
    [layout, sets]: [&'static str; 2],
    micro_batches: usize,
    ms: f64,
    gib: Option<f64>,
) -> Row {
    Row {
        file,
        section,
        text,
        gpu,
        model,
        layout,
        micro_batches,
        sets,
        ms,
        gib,
        tensors: None,
    }
}

/// A row of Llama-3-8B's shape, of the section in which the memory of tensors was polled.
const fn polled(
    text: &'static str,
    [layout, sets]: [&'static str; 2],
    micro_batches: usize,
    ms: f64,
    [gib, tensors]: [f64; 2],
) -> Row {
    Row {
        tensors: Some(tensors),
        ..row(
            ["layouts", POLLED, text],
            Gpu::H200,
            LLAMA,
            [layout, sets],
            micro_batches,
            ms,
            Some(gib),
        )
    }
}

const DP_OLD: &str = "data_parallel, 2026-11-22";
const POLLED: &str = "layouts and the memory of tensors, 2026-11-28";
const PIPES: &str = "layouts of Llama-3-8B with pipelines, 2026-11-27";

#[rustfmt::skip]
const ROWS: [Row; 51] = [
    row(["train_step", "train_step, 2026-11-22", "| megaburn, f32 masters | 51.3 |"], Gpu::H200, FOUR_LAYERS, ["tp1", "data.seq_len=4096"], 1, 51.3, Some(22.0)),
    row(["train_step", "train_step, 2026-11-22", "| 8192 tokens (cuDNN) | 98.8 |"], Gpu::H200, FOUR_LAYERS, ["tp1", "data.seq_len=8192"], 1, 98.8, Some(22.0)),
    row(["train_step", "train_step, 2026-11-22", "| 32768 tokens (cuDNN) | 530.3 |"], Gpu::H200, FOUR_LAYERS, ["tp1", "data.seq_len=32768"], 1, 530.3, Some(40.1)),
    row(["train_step", "train_step, 2026-11-26", "| megaburn, f32 masters | 54.7 |"], Gpu::H100, FOUR_LAYERS, ["tp1", "data.seq_len=4096"], 1, 54.7, Some(22.0)),
    row(["fp8", "fp8_step, 2026-11-27", "| megaburn, `precision.recipe = \"bf16\"` | 106.0 |"], Gpu::H100, FOUR_LAYERS, ["tp1", "data.seq_len=8192"], 1, 106.0, Some(23.0)),
    row(["fp8", "fp8_step, 2026-11-27", "| megaburn, `\"tensorwise\"` | 84.0 |"], Gpu::H100, FOUR_LAYERS, ["tp1", "data.seq_len=8192 precision.recipe=tensorwise"], 1, 84.0, Some(25.0)),
    row(["fp8", "fp8_step on two H200, 2026-11-27", "| 12 | megaburn, `\"tensorwise\"` | 250.0 |"], Gpu::H200, LLAMA, ["dp2", "data.seq_len=8192 model.layers=12 parallel.zero=2 precision.recipe=tensorwise"], 1, 250.0, Some(49.0)),
    row(["fp8", "fp8_step on two H200, 2026-11-27", "| 32 | megaburn, `\"tensorwise\"` | 595.0 |"], Gpu::H200, LLAMA, ["dp2", "data.seq_len=8192 model.layers=32 parallel.zero=2 precision.recipe=tensorwise"], 1, 595.0, Some(109.7)),
    row(["data_parallel", "data_parallel of 12 layers, 2026-11-27", "| alone | - | 324.4 |"], Gpu::H200, LLAMA, ["tp1", "data.seq_len=8192 model.layers=12"], 1, 324.4, Some(68.5)),
    row(["data_parallel", DP_OLD, "| zero 0 | yes | 344.6 |"], Gpu::H200, LLAMA, ["dp2", "data.seq_len=8192 model.layers=12"], 1, 344.6, Some(68.5)),
    row(["data_parallel", DP_OLD, "| zero 2 | yes | 331.1 |"], Gpu::H200, LLAMA, ["dp2", "data.seq_len=8192 model.layers=12 parallel.zero=2"], 1, 331.1, Some(49.0)),
    row(["data_parallel", DP_OLD, "| zero 2 | no | 345.4 |"], Gpu::H200, LLAMA, ["dp2", "data.seq_len=8192 model.layers=12 parallel.zero=2 parallel.overlap=false"], 1, 345.4, Some(50.9)),
    row(["data_parallel", DP_OLD, "| zero 3 | yes | 342.1 |"], Gpu::H200, LLAMA, ["dp2", "data.seq_len=8192 model.layers=12 parallel.zero=3"], 1, 342.1, Some(45.0)),
    row(["data_parallel", "data_parallel, 2026-11-25", "| zero 2 | yes | 341.9 |"], Gpu::H100, LLAMA, ["dp2", "data.seq_len=8192 model.layers=12 parallel.zero=2"], 1, 341.9, Some(47.0)),
    row(["data_parallel", "data_parallel, 2026-11-25", "| zero 3 | yes | 353.6 |"], Gpu::H100, LLAMA, ["dp2", "data.seq_len=8192 model.layers=12 parallel.zero=3"], 1, 353.6, Some(45.0)),
    row(["data_parallel", "data_parallel, 2026-11-27", "| zero 2 | yes | 800.7 |"], Gpu::H200, LLAMA, ["dp4", "data.seq_len=8192 model.layers=32 parallel.zero=2"], 1, 800.7, Some(80.3)),
    row(["data_parallel", "data_parallel, 2026-11-27", "| zero 3 | yes | 829.2 |"], Gpu::H200, LLAMA, ["dp4", "data.seq_len=8192 model.layers=32 parallel.zero=3"], 1, 829.2, Some(70.5)),
    row(["layouts", "layouts of Llama-3-8B with tensor parallelism, 2026-11-27", "| tp2-dp2-sp parallel.zero=1 | 4 | 1713.9 |"], Gpu::H200, LLAMA, ["tp2-dp2-sp", "data.seq_len=8192 model.layers=32 parallel.zero=1"], 4, 1713.9, Some(64.7)),
    row(["layouts", "layouts of Llama-3-8B with tensor parallelism, 2026-11-27", "| tp4-sp | 4 | 984.6 |"], Gpu::H200, LLAMA, ["tp4-sp", "data.seq_len=8192 model.layers=32"], 4, 984.6, Some(44.1)),
    row(["layouts", PIPES, "| tp2-pp2-sp | 8 | 1930.4 |"], Gpu::H200, LLAMA, ["tp2-pp2-sp", "data.seq_len=8192 model.layers=32"], 8, 1930.4, Some(52.9)),
    row(["layouts", PIPES, "| pp4 | 8 | 2177.9 |"], Gpu::H200, LLAMA, ["pp4", "data.seq_len=8192 model.layers=32"], 8, 2177.9, Some(76.4)),
    row(["layouts", PIPES, "| pp4 parallel.schedule=zb-v | 8 | 1754.6 |"], Gpu::H200, LLAMA, ["pp4", "data.seq_len=8192 model.layers=32 parallel.schedule=zb-v"], 8, 1754.6, Some(88.1)),
    row(["layouts", "layouts, 2026-11-23", "| pp2 | 32 | 5559.6 |"], Gpu::H200, LLAMA, ["pp2", "data.seq_len=8192 model.layers=12"], 32, 5559.6, Some(45.0)),
    row(["layouts", "layouts, 2026-11-23", "| pp2 parallel.schedule=zb-h1 | 8 | 1404.9 |"], Gpu::H200, LLAMA, ["pp2", "data.seq_len=8192 model.layers=12 parallel.schedule=zb-h1"], 8, 1404.9, Some(52.9)),
    row(["layouts", "layouts, 2026-11-23", "| pp2 recompute.method=\"uniform\" | 4 | 985.4 |"], Gpu::H200, LLAMA, ["pp2", "data.seq_len=8192 model.layers=12 recompute.method=uniform"], 4, 985.4, Some(39.2)),
    row(["context", "context_four_gpus, 2026-11-27", "| dp4 parallel.zero=2 | 1 | 519.2 |"], Gpu::H200, LLAMA, ["dp4", "data.seq_len=16384 model.layers=8 parallel.zero=2"], 1, 519.2, Some(47.0)),
    row(["context", "context_four_gpus, 2026-11-27", "| cp4 parallel.zero=2 parallel.cp_comm=[\"p2p\"] data.seq_len=65536 | 1 | 907.7 |"], Gpu::H200, LLAMA, ["cp4", "data.seq_len=65536 model.layers=8 parallel.zero=2 parallel.cp_comm=p2p"], 1, 907.7, Some(39.2)),
    row(["moe", "steps of Mixtral on four GPUs, 2026-11-27", "| dp4-ep4 parallel.zero=1 model.family=mixtral moe.force_balance=true | 4 | 245.1 |"], Gpu::H200, LLAMA, ["dp4-ep4", "data.seq_len=4096 model.layers=2 parallel.zero=1 model.family=mixtral moe.force_balance=true"], 4, 245.1, Some(27.4)),
    row(["moe", "steps of Qwen3-30B-A3B on four GPUs, 2026-11-27", "moe.force_balance=true | 4 | 224.3 |"], Gpu::H200, LLAMA, ["dp4-ep4", "data.seq_len=4096 model.layers=6 parallel.zero=1 model.family=qwen3_moe model.hidden=2048 model.heads=32 model.kv_heads=4 model.head_dim=128 model.ffn=6144 model.experts.ffn=768 model.experts.num=128 model.experts.top_k=8 moe.force_balance=true"], 4, 224.3, Some(25.5)),
    row(["models", "models, 2026-11-26", "| gpt2 16x1 | 33.6 |"], Gpu::H100, GPT2, ["tp1", "train.micro_batch=16"], 1, 33.6, Some(10.0)),
    row(["models", "models, 2026-11-26", "| qwen2 4x1 | 65.0 |"], Gpu::H100, QWEN2, ["tp1", "train.micro_batch=4"], 1, 65.0, Some(19.3)),
    row(["models", "models, 2026-11-27", "| gpt-7b 1x4 | 749.6 |"], Gpu::H100, GPT_7B, ["tp1", ""], 4, 749.6, Some(54.1)),
    row(["models", "models, 2026-11-27", "| bert-large 32x1 | 88.6 |"], Gpu::H100, BERT_LARGE, ["tp1", "train.micro_batch=32 data.dataset=bert"], 1, 88.6, Some(19.7)),
    polled("| 1 | 4 | 4096 | dp1 | 1 | 72.6 |", ["dp1", "data.seq_len=4096 model.layers=4"], 1, 72.6, [37.2, 32.2]),
    polled("| 1 | 4 | 8192 | dp1 precision.recipe=tensorwise | 1 | 110.5 |", ["dp1", "data.seq_len=8192 model.layers=4 precision.recipe=tensorwise"], 1, 110.5, [39.2, 32.6]),
    polled("| 1 | 6 | 8192 | dp1 | 4 | 672.0 |", ["dp1", "data.seq_len=8192 model.layers=6"], 4, 672.0, [50.9, 48.0]),
    polled("| 1 | 4 | 32768 | dp1 train.fused_linear_cross_entropy=true | 1 | 748.8 |", ["dp1", "data.seq_len=32768 model.layers=4 train.fused_linear_cross_entropy=true"], 1, 748.8, [52.9, 45.1]),
    polled("| 1 | 6 | 8192 | dp1 recompute.method=uniform | 2 | 419.6 |", ["dp1", "data.seq_len=8192 model.layers=6 recompute.method=uniform"], 2, 419.6, [47.0, 42.0]),
    polled("| 1 | 3 | 4096 | dp1 model.family=qwen3_moe model.hidden=2048 model.heads=32 model.kv_heads=4 model.head_dim=128 model.ffn=6144 model.experts.ffn=768 model.experts.num=64 model.experts.top_k=8 moe.force_balance=true | 2 | 66.1 |", ["dp1", "data.seq_len=4096 model.layers=3 model.family=qwen3_moe model.hidden=2048 model.heads=32 model.kv_heads=4 model.head_dim=128 model.ffn=6144 model.experts.ffn=768 model.experts.num=64 model.experts.top_k=8 moe.force_balance=true"], 2, 66.1, [29.4, 27.4]),
    polled("| 2 | 8 | 8192 | dp2 parallel.zero=0 | 1 | 255.8 |", ["dp2", "data.seq_len=8192 model.layers=8 parallel.zero=0"], 1, 255.8, [54.8, 49.8]),
    polled("| 2 | 8 | 8192 | dp2 parallel.zero=1 | 2 | 453.2 |", ["dp2", "data.seq_len=8192 model.layers=8 parallel.zero=1"], 2, 453.2, [45.0, 41.8]),
    polled("| 2 | 8 | 8192 | dp2 parallel.zero=2 | 1 | 245.2 |", ["dp2", "data.seq_len=8192 model.layers=8 parallel.zero=2"], 1, 245.2, [35.3, 33.1]),
    polled("| 2 | 8 | 8192 | dp2 parallel.zero=3 | 1 | 240.1 |", ["dp2", "data.seq_len=8192 model.layers=8 parallel.zero=3"], 1, 240.1, [33.3, 30.9]),
    polled("| 2 | 8 | 8192 | dp2 parallel.zero=2 precision.recipe=tensorwise | 1 | 179.2 |", ["dp2", "data.seq_len=8192 model.layers=8 parallel.zero=2 precision.recipe=tensorwise"], 1, 179.2, [37.2, 35.6]),
    polled("| 2 | 12 | 8192 | tp2-sp | 4 | 681.4 |", ["tp2-sp", "data.seq_len=8192 model.layers=12"], 4, 681.4, [40.2, 38.2]),
    polled("| 2 | 8 | 16384 | cp2 parallel.zero=1 data.seq_len=16384 | 1 | 270.3 |", ["cp2", "model.layers=8 parallel.zero=1 data.seq_len=16384"], 1, 270.3, [35.3, 33.1]),
    polled("| 2 | 12 | 8192 | pp2 | 8 | 1467.8 |", ["pp2", "data.seq_len=8192 model.layers=12"], 8, 1467.8, [47.0, 44.1]),
    polled("| 2 | 12 | 8192 | pp2 parallel.schedule=zb-v | 8 | 1351.7 |", ["pp2", "data.seq_len=8192 model.layers=12 parallel.schedule=zb-v"], 8, 1351.7, [58.7, 55.1]),
    polled("| 2 | 12 | 8192 | pp2 recompute.method=uniform | 4 | 978.2 |", ["pp2", "data.seq_len=8192 model.layers=12 recompute.method=uniform"], 4, 978.2, [38.5, 33.3]),
    polled("| 2 | 1 | 4096 | dp2-ep2 parallel.zero=1 model.family=mixtral moe.force_balance=true | 4 | 169.7 |", ["dp2-ep2", "data.seq_len=4096 model.layers=1 parallel.zero=1 model.family=mixtral moe.force_balance=true"], 4, 169.7, [29.4, 26.7]),
    polled("| 2 | 6 | 4096 | dp2-ep2 parallel.zero=1 model.family=qwen3_moe model.hidden=2048 model.heads=32 model.kv_heads=4 model.head_dim=128 model.ffn=6144 model.experts.ffn=768 model.experts.num=64 model.experts.top_k=8 moe.force_balance=true | 4 | 213.2 |", ["dp2-ep2", "data.seq_len=4096 model.layers=6 parallel.zero=1 model.family=qwen3_moe model.hidden=2048 model.heads=32 model.kv_heads=4 model.head_dim=128 model.ffn=6144 model.experts.ffn=768 model.experts.num=64 model.experts.top_k=8 moe.force_balance=true"], 4, 213.2, [28.4, 26.2]),
];

/// A text with one space between words, so that padded tables compare.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl Row {
    /// Checks that the row is in its section of the result file.
    fn is_committed(&self) -> bool {
        let path = root().join(format!("benches/results/{}.md", self.file));
        let page = fs::read_to_string(path).unwrap();
        let mut sections = page.split("\n## ");
        let section = sections.find(|section| section.lines().next() == Some(self.section));
        section.is_some_and(|section| words(section).contains(self.text))
    }

    fn plan(&self) -> Plan {
        plan(
            config(self.model, self.layout, self.micro_batches, self.sets),
            self.gpu,
        )
    }
}

/// The gibibytes of the fullest stage in the pools of the allocator, which results give.
fn reserved(plan: &Plan) -> f64 {
    let fullest = plan.fullest();
    (fullest.total_bytes - fullest.runtime_bytes) as f64 / f64::from(1 << 30)
}

/// The gibibytes of the fullest stage in tensors.
fn tensors(plan: &Plan) -> f64 {
    plan.fullest().tensors_bytes as f64 / f64::from(1 << 30)
}

/// The row of the table in `docs/plan.md`.
fn line(row: &Row, plan: &Plan) -> String {
    let name = match row.model {
        LLAMA => "Llama-3-8B",
        FOUR_LAYERS => "Llama-3-8B, 4 layers, vocabulary 32000",
        GPT2 => "GPT-2",
        QWEN2 => "Qwen2-0.5B",
        GPT_7B => "GPT 7B, 8 layers",
        _ => "BERT large",
    };
    let sets = match row.sets {
        "" => String::new(),
        sets => format!(" `{sets}`"),
    };
    let times = match row.micro_batches {
        1 => String::new(),
        times => format!(", {times} micro-batches"),
    };
    let off = 100.0 * (plan.time.step_ms / row.ms - 1.0);
    let cell = |gib: Option<f64>| gib.map_or(String::new(), |gib| format!("{gib:.1}"));
    let of_tensors = row.tensors.map_or(" | |".into(), |gib| {
        let planned = tensors(plan);
        let off = 100.0 * (planned / gib - 1.0);
        format!("{gib:.1} | {planned:.1} | {off:+.1}%")
    });
    format!(
        "| {name}, `{}`{times}{sets} ([{file}](../benches/results/{file}.md)) | {} | {:.1} ms | {:.1} ms \
        | {off:+.1}% | {of_tensors} | {} | {:.1} |",
        row.layout,
        row.gpu.name,
        row.ms,
        plan.time.step_ms,
        cell(row.gib),
        reserved(plan),
        file = row.file,
    )
}

/// Tensor cores of Hopper multiply blocks, slower than matrices with one scale; what is emulated takes
/// longer than bf16.
#[test]
fn recipes_that_are_emulated_are_planned_as_such() {
    let of = |gpu, recipe: &str| {
        let sets =
            format!("data.seq_len=8192 model.layers=12 parallel.zero=2 precision.recipe={recipe}");
        plan(config(LLAMA, "dp2", 1, &sets), gpu).time.step_ms
    };
    let [bf16, tensorwise, blockwise, mxfp8] =
        ["bf16", "tensorwise", "blockwise", "mxfp8"].map(|recipe| of(Gpu::H200, recipe));
    assert!(tensorwise < blockwise && blockwise < bf16 && bf16 < mxfp8);
    // Measured: `fp8.md`, "fp8 with scales of blocks".
    assert!((blockwise / 278.9 - 1.0).abs() < TIME, "{blockwise}");
    let b200: Gpu = "b200".parse().unwrap();
    assert!(of(b200, "blockwise") > of(b200, "bf16"));
}

/// Each row is committed, within the limits, and in the table of the page.
#[test]
fn plans_are_near_what_was_measured() {
    let mut lines = Vec::new();
    let mut off = Vec::new();
    for row in &ROWS {
        assert!(
            row.is_committed(),
            "{}: {} in {}",
            row.section,
            row.text,
            row.file
        );
        let plan = row.plan();
        let line = line(row, &plan);
        if (plan.time.step_ms / row.ms - 1.0).abs() > TIME {
            off.push(format!("time: {line}"));
        }
        if let Some(gib) = row.gib
            && (reserved(&plan) / gib - 1.0).abs() > RESERVED
        {
            off.push(format!("reserved: {line}"));
        }
        if let Some(gib) = row.tensors
            && (tensors(&plan) / gib - 1.0).abs() > TENSORS
        {
            off.push(format!("tensors: {line}"));
        }
        lines.push(line);
    }
    let lines = lines.join("\n");
    assert!(
        off.is_empty(),
        "too far off:\n{}\n\nall:\n{lines}",
        off.join("\n")
    );
    let page = fs::read_to_string(root().join("docs/plan.md")).unwrap();
    assert!(page.contains(&lines), "docs/plan.md must have:\n{lines}");
}

#[test]
fn the_page_has_every_gpu() {
    let page = fs::read_to_string(root().join("docs/plan.md")).unwrap();
    for gpu in Gpu::ALL {
        let fp8 = gpu
            .fp8
            .map_or("none".to_string(), |fp8| format!("{:.0}", fp8 / 1e12));
        let row = format!(
            "| {} ({}) | {:.0} | {fp8} | {:.1} GiB | {:.2} TB/s | {:.0} GB/s | {:.0} GB/s | {} |",
            gpu.name,
            gpu.title,
            gpu.bf16 / 1e12,
            gpu.memory_bytes as f64 / f64::from(1 << 30),
            gpu.memory_bandwidth / 1e12,
            gpu.nvlink / 1e9,
            gpu.network / 1e9,
            gpu.source
        );
        assert!(page.contains(&row), "docs/plan.md must have:\n{row}");
    }
}
