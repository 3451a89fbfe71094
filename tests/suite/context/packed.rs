//! Documents and sequences that are not split evenly over ranks: assigned to ranks as needed,
//! padded, or exchanged differently in each layer; and the cases that are refused.

use std::sync::Arc;

use burn::prelude::Device;
use megaburn::{
    collective::{GroupOptions, ProcessGroups, RankFailure, run_threads},
    mesh::Layout,
    train::{ConfigLayers, RunData, TrainError, Trainer},
};
use rstest::rstest;

use crate::context::grid::{Model, Texts};
use megaburn_test_support::layout_grid::STEPS;

/// Losses (also of MTP depths) and gradient norms of three steps and an evaluation.
pub(crate) fn with_evaluation(text: &str, layout: &str) -> Result<Vec<f64>, String> {
    let config = ConfigLayers::new()
        .with_text("dynamic", text)
        .and_then(ConfigLayers::load);
    let config = Arc::new(config.map_err(|error| error.to_string())?);
    let layout: Layout = layout.parse().unwrap();
    let data = Arc::new(RunData::load(&config).unwrap());
    let options = GroupOptions {
        seed: config.run.seed,
        ..Default::default()
    };
    let ranks = run_threads(layout.world_size(), options, |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let device = Device::flex().autodiff();
        let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
        let mut numbers = Vec::new();
        for _ in 0..STEPS {
            let step = trainer.step()?;
            numbers.extend([step.loss, step.grad_norm, step.tokens as f64]);
            numbers.extend(step.mtp_losses);
        }
        let evaluated = trainer.evaluate()?;
        numbers.push(evaluated.eval_loss);
        numbers.extend(evaluated.mtp_losses);
        Ok::<_, TrainError>(numbers)
    });
    let ranks: Result<Vec<_>, _> = ranks.into_iter().collect();
    Ok(ranks.map_err(|error| error.to_string())?.swap_remove(0))
}

const LAYOUTS: [&str; 9] = [
    "tp1",
    "dp2",
    "cp2",
    "dp3",
    "dp2-cp2",
    "dp5",
    "dp8",
    "tp2-dp4-sp",
    "tp2-cp2-dp2",
];
const STAGES: [u8; 3] = [0, 2, 3];
const COMMS: [&str; 5] = ["auto", "p2p", "all_gather", "a2a", "a2a2+p2p"];

/// The ZeRO stage differs from layout to layout and from exchange to exchange. Every pair of values
/// of two of them occurs.
#[rstest]
fn documents_are_dealt_out_to_as_many_ranks_as_they_need(
    #[values(0, 1, 2, 3, 4, 5, 6, 7, 8)] layout: usize,
) {
    let stage = |comm: usize| STAGES[(layout + comm) % STAGES.len()];
    let ways = (0..).zip(COMMS).map(|(index, comm)| (stage(index), comm));
    assert_documents_as_on_one_rank(LAYOUTS[layout], ways);
}

#[test]
#[ignore = "it takes minutes"]
fn documents_of_the_whole_product_are_dealt_out_to_as_many_ranks_as_they_need() {
    for layout in LAYOUTS {
        let ways = STAGES.map(|zero| COMMS.map(|comm| (zero, comm)));
        assert_documents_as_on_one_rank(layout, ways.into_iter().flatten());
    }
}

/// Compares `layout` with one rank, under each pair of a ZeRO stage and an exchange.
fn assert_documents_as_on_one_rank(
    layout: &str,
    ways: impl IntoIterator<Item = (u8, &'static str)>,
) {
    let texts = Texts::write();
    let data = texts.path(true);
    let of: Layout = layout.parse().unwrap();
    let ranks = of.dp * of.cp;
    // With several ranks, documents are longer than any rank takes alone.
    let heads = [16, 16];
    let batch = 2 * of.dp;
    let model = Model {
        heads,
        layers: 2,
        seq_len: 64,
        batch,
        packed: Some(4),
    };
    let most = 64 / (1 << ranks.min(4).ilog2()) + 8;
    let one_rank = model.text(&data, 1);
    let expected = with_evaluation(&one_rank, "tp1").unwrap();
    for (zero, comm) in ways {
        let text = format!(
            "{one_rank}\n[parallel]\ncp_comm = [{comm:?}]\nmax_tokens_per_rank = {most}\nzero = {}\nbucket_size = 3000",
            if ranks > 1 { zero } else { 0 },
        );
        let again = if zero == 3 {
            "\n[recompute]\nmethod = \"uniform\""
        } else {
            ""
        };
        let text = text + again;
        let what = format!("{layout}, zero {zero}, {comm}");
        let found = with_evaluation(&text, layout).expect(&what);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let relative = (found - expected).abs() / expected;
            assert!(relative <= 1e-5, "{what}, {index}: {found}, not {expected}");
        }
    }
}

#[rstest]
#[case(
    "dp2",
    "max_tokens_per_rank = 16",
    "`parallel.max_tokens_per_rank` is 16: it must be at least 32"
)]
#[case(
    "dp6",
    "max_tokens_per_rank = 64\ncp_comm = [\"a2a\"]",
    "`parallel.cp_comm` is a2a: it must be p2p or all_gather, or a2aN+p2p"
)]
#[case(
    "cp4",
    "cp_pad = true\n[train]\nattention_dropout = 0.1\n[data]\ndocuments = false\nseq_len = 60",
    "`train.attention_dropout` is 0.1: it must be 0 if sequences are padded"
)]
#[case(
    "pp2",
    "max_tokens_per_rank = 64",
    "`parallel.max_tokens_per_rank` is 64: it must be absent with a pipeline"
)]
#[case(
    "cp2",
    "max_tokens_per_rank = 64\ncp_comm = [\"p2p\", \"a2a\"]",
    "it must be absent if parallel.cp_comm is set per layer"
)]
#[case(
    "cp2",
    "max_tokens_per_rank = 64\n[train]\nhidden_dropout = 0.1",
    "`train.hidden_dropout` is 0.1: it must be 0 if documents"
)]
#[case(
    "cp2",
    "max_tokens_per_rank = 64\n[data]\ndocuments = false",
    "it must be absent without data.documents"
)]
#[case(
    "cp3",
    "cp_pad = false\n[data]\ndocuments = false",
    "sequence length 64 is not divisible by 2 x cp = 6"
)]
#[case(
    "cp4",
    "cp_comm = [\"a2a\"]",
    "`parallel.cp_comm` is a2a: it must be p2p or all_gather, or a2aN+p2p"
)]
#[case(
    "cp4",
    "cp_comm = [\"a2a3+p2p\"]",
    "`parallel.cp_comm` is a2a3+p2p: it must be a2aN+p2p"
)]
#[case(
    "cp2",
    "cp_comm = [\"p2p\", \"p2p\", \"p2p\"]",
    "one for each of the model's 2"
)]
fn what_ranks_cannot_share_is_one_error(
    #[case] layout: &str,
    #[case] keys: &str,
    #[case] message: &str,
) {
    let texts = Texts::write();
    let data = texts.path(true);
    let model = Model {
        heads: [4, 2],
        layers: 2,
        seq_len: 64,
        batch: 12,
        packed: Some(8),
    };
    // A later text overrides keys of an earlier one.
    let config = ConfigLayers::new()
        .with_text("model", &model.text(&data, 1))
        .unwrap();
    let config = config
        .with_text("keys", &format!("[parallel]\n{keys}"))
        .unwrap();
    let config = config.with_layout(layout).unwrap().load().unwrap();
    let layout: Layout = layout.parse().unwrap();
    let error = config
        .layout(Some(layout.world_size()))
        .map(|_| config)
        .and_then(|config| {
            let config = Arc::new(config);
            let options = GroupOptions::default();
            let data = Arc::new(RunData::load(&config)?);
            let ranks = run_threads(layout.world_size(), options, |world| {
                let groups = ProcessGroups::new(&world, layout)?;
                let device = Device::flex().autodiff();
                let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
                trainer.step().map(drop)
            });
            // Every rank reports the same error.
            let mut errors = ranks.into_iter().map(|rank| match rank {
                Err(RankFailure::Failed(error)) => error,
                other => panic!("{other:?}"),
            });
            let first = errors.next().expect("there is a rank");
            assert!(errors.all(|error| error.to_string() == first.to_string()));
            Err::<(), _>(first)
        });
    let error = error.unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

#[rstest]
fn documents_are_the_same_tokens_where_rows_are_padded(
    #[values("tp4-cp2-sp", "tp2-cp2-sp", "cp3")] layout: &str,
) {
    let texts = Texts::write();
    let data = texts.path(true);
    let model = Model {
        heads: [4, 2],
        layers: 2,
        seq_len: 60,
        batch: 2,
        packed: Some(12),
    };
    let text = format!("{}\n[parallel]\ncp_pad = true", model.text(&data, 1));
    let found = with_evaluation(&text, layout).unwrap();
    let expected = with_evaluation(&model.text(&data, 2), "tp1").unwrap();
    for (found, expected) in found.iter().zip(&expected) {
        assert!(
            (found - expected).abs() <= 1e-5 * expected,
            "{layout}: {found}, not {expected}"
        );
    }
}

#[rstest]
fn layers_exchange_as_each_is_told_and_sequences_are_padded(
    #[values(60, 62, 57)] seq_len: usize,
    #[values("cp4", "tp2-cp2-sp", "cp3-pp2")] layout: &str,
) {
    let texts = Texts::write();
    let data = texts.path(false);
    let model = Model {
        heads: [8, 8],
        layers: 4,
        seq_len,
        batch: 2,
        packed: None,
    };
    let comms = "cp_comm = [\"p2p\", \"all_gather\", \"auto\", \"p2p\"]\ncp_pad = true";
    let text = format!("{}\n[parallel]\n{comms}", model.text(&data, 1));
    let found = with_evaluation(&text, layout).unwrap();
    let expected = with_evaluation(&model.text(&data, 2), "tp1").unwrap();
    for (found, expected) in found.iter().zip(&expected) {
        assert!(
            (found - expected).abs() <= 1e-5 * expected,
            "{layout}: {found}, not {expected}"
        );
    }
}
