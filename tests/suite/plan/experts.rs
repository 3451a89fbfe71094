//! Plans and searches of models with experts.

use megaburn::{
    mesh::Layout,
    plan::{Gpu, SearchConfig},
    train::{TrainConfig, estimate::PartParams},
};

use super::{LLAMA, config, plan};

/// A model whose first block has no experts, with this number of experts in each of the others.
fn model(experts: usize, layers: usize) -> String {
    format!(
        "{LLAMA}[model.experts]\nnum = {experts}\ntop_k = 2\nffn = 512\nlayer_freq = \"([0]*1+[1]*{})\"",
        layers - 1
    )
    .replace(
        "[model]",
        &format!("[model]\nfamily = \"mixtral\"\nlayers = {layers}"),
    )
}

fn with_layout(text: &str, layout: &str) -> (TrainConfig, Layout) {
    let config = config(text, layout, 8, "data.seq_len=1024");
    let layout = config.layout(None).unwrap();
    (config, layout)
}

/// However many layouts there are, a block is built once for each way to split it, and the
/// parameters are those of the whole model.
#[test]
fn blocks_that_are_alike_are_built_once() {
    let text = model(8, 8);
    let mut parts = PartParams::default();
    let (mut layouts, mut shared_by) = (0, 0);
    for tp in [1, 2] {
        for pp in [1, 2, 4] {
            for ep in [1, 2, 4] {
                let sp = if tp > 1 { "-sp" } else { "" };
                let (config, layout) = with_layout(&text, &format!("tp{tp}-pp{pp}-dp4-ep{ep}{sp}"));
                let model = config.planned_model(&layout).unwrap();
                let stages = parts.of_stages(&config, &layout, &model).unwrap();
                assert_eq!(stages.len(), pp);
                layouts += 1;
                if tp == 1 {
                    shared_by += 1;
                    let of_experts: usize =
                        stages.iter().map(|stage| stage.expert_elements()).sum();
                    let all: usize = stages.iter().map(|stage| stage.elements()).sum();
                    let whole = model.whole_plan().unwrap().num_global();
                    assert_eq!(all - of_experts + ep * of_experts, whole, "{layout}");
                }
            }
        }
    }
    assert_eq!((layouts, shared_by), (18, 9));
    // For each tp: the block without experts, that with experts for each ep, and the ends of the
    // model on one stage, on the first and on the last one.
    assert_eq!(parts.num_built(), 2 * (1 + 3 + 3));
}

/// In an all-to-all over servers each rank sends through its own network adapter.
#[test]
fn experts_on_several_servers_wait_for_the_network() {
    let text = model(64, 4);
    let exposed = |ep: usize, top_k: usize| {
        let sets = format!("data.seq_len=1024 parallel.overlap=false model.experts.top_k={top_k}");
        let config = config(&text, &format!("dp64-ep{ep}"), 8, &sets);
        plan(config, Gpu::H100).time.communication_ms
    };
    // Two more rows for each token, in 8 micro-batches, 2 passes and 3 blocks, there and back.
    let rows = 2.0 * 1024.0 * (8 * 2 * 3 * 2) as f64;
    let bytes = rows * 4096.0 * 2.0;
    let more = |ep| exposed(ep, 4) - exposed(ep, 2);
    let network = 1e3 * bytes * 56.0 / 64.0 / (0.8 * Gpu::H100.network);
    assert!(
        (more(64) / network - 1.0).abs() < 1e-6,
        "{} {network}",
        more(64)
    );
    let nvlink = 1e3 * bytes * 7.0 / 8.0 / (0.72 * Gpu::H100.nvlink);
    assert!(
        (more(8) / nvlink - 1.0).abs() < 1e-6,
        "{} {nvlink}",
        more(8)
    );
}

/// What is found has the experts of each copy in as few servers as possible.
#[test]
fn a_search_keeps_experts_in_a_server() {
    let (start, _) = with_layout(&model(64, 4), "dp64");
    let found = SearchConfig::new(start, 64).search().unwrap();
    let best = &found.best[0];
    assert!(best.layout.ep * best.layout.etp <= 8, "{found}");
}

/// Thousands of layouts are tried, and few steps are simulated.
#[test]
fn a_search_of_thousands_of_gpus_simulates_few_steps() {
    let text = model(64, 16);
    let start = config(&text, "dp2048", 2, "data.seq_len=4096");
    let found = SearchConfig::new(start, 2048).with_top(1).search().unwrap();
    assert!(found.candidates > 2_000, "{found}");
    assert!(found.simulated < 200, "{found:?}");
    let refused: usize = found.refused.iter().map(|kind| kind.count).sum();
    let all = found.fit + found.slower + found.do_not_fit + refused;
    assert_eq!(found.candidates, all, "{found:?}");
}
