//! Invalid layouts and pipelines, and their error messages.

use rstest::rstest;

use crate::{config::refused::assert_refused, runs::child::Ranks};
use megaburn_test_support::run::Run;

#[rstest]
#[case::heads("tp3", &[], "layout `tp3`: attention heads 4 is not divisible by tp 3")]
#[case::sequence(
    "tp4-sp",
    &["data.seq_len=18"],
    "sequence length 18 is not divisible by tp x cp = 4"
)]
#[case::batch("dp3", &[], "`train.global_batch` is 8: it must be a multiple of")]
#[case::no_layout("tp2-xp2", &[], "`xp2` is not a known axis or flag")]
#[case::stages(
    "pp3",
    &[],
    "2 layers cannot fill 3 pipeline stages: every stage needs one, except the ends where the embedding or the loss counts as a layer; choose more layers or fewer stages (`model.layers`; pp of `--layout`, `parallel.pp`; `parallel.chunks`)"
)]
#[case::chunks("pp2", &["parallel.chunks=2"], "2 layers cannot fill 4 pipeline stages")]
#[case::kind("pp2", &["parallel.schedule=zb-h2"], "unknown variant `zb-h2`")]
#[case::forward("pp2", &["parallel.schedule=forward-only"], "it must be a training schedule: gpipe")]
#[case::few_micro_batches(
    "pp2",
    &["parallel.micro_batch_group=3", "parallel.chunks=2", "model.layers=4", "train.global_batch=2"],
    "micro-batch group size 3 exceeds the 2 micro-batches (`parallel.micro_batch_group`; `train.global_batch`, `train.micro_batch`)"
)]
#[case::group(
    "pp2",
    &["parallel.micro_batch_group=3", "parallel.chunks=2", "model.layers=4", "train.global_batch=4"],
    "4 micro-batches in groups of 3 leave 1, but a pipeline of 2 ranks needs 0 or at least 2 in the last group: change the number of micro-batches or the group size (`parallel.micro_batch_group`; `train.global_batch`, `train.micro_batch`)"
)]
#[case::stages_of_text(
    "pp2",
    &["parallel.pipeline_layout=E|t|tL"],
    "it has 3 stages, but pp times chunks is 2 (`parallel.pipeline_layout`)"
)]
#[case::prediction("pp2", &["parallel.pipeline_layout='Ett,m|L'", "model.mtp_layers=1"], "stage 0 has an MTP depth (m), which only the last stage can have, before L (`parallel.pipeline_layout`)")]
#[case::predictions("pp2", &["parallel.pipeline_layout='Et|tmL'"], "`model.mtp_layers` is 0: it must be 1, the number of `m` in parallel.pipeline_layout, or the layout must have no `m`")]
#[case::mtp_depths("pp2", &["model.mtp_layers=16"], "`model.mtp_layers` is 16: it must be less than data.seq_len 16: no token has a label further ahead")]
#[case::first(
    "pp2",
    &["parallel.first_stage_layers=2"],
    "2 layers cannot fill 2 pipeline stages with 2 in the first: every stage needs one, except the ends where the embedding or the loss counts as a layer, and every layer needs a stage; choose other numbers (`parallel.first_stage_layers`, `parallel.last_stage_layers`; "
)]
#[case::context("cp3", &[], "sequence length 16 is not divisible by 2 x cp = 6; the zigzag split \
                            cuts 2 x cp chunks: change the sequence length, or pad it \
                            (`parallel.cp_pad = true`)")]
#[case::heads_to_share("cp4", &["parallel.cp_comm=a2a"], "`parallel.cp_comm` is a2a: it must be p2p or all_gather, or a2aN+p2p with an N that divides the 4 query and the 2 key/value heads of a rank")]
#[case::groups("cp4", &["parallel.cp_comm=a2a3+p2p"], "`parallel.cp_comm` is a2a3+p2p: it must be a2aN+p2p with an N that divides 4, the ranks that share a sequence")]
#[case::long_documents("tp4-cp2-sp", &["data.documents=true", "data.seq_len=24", "data.document_multiple=8", "parallel.max_tokens_per_rank=14"], "`parallel.max_tokens_per_rank` is 14: it must be at least 16, or there must be more ranks")]
#[case::vocabulary("tp1", &["model.vocab=259"], "`model.vocab` is 259: it must be at least the 260 token ids of data.tokenizer = \"byte\": remove model.vocab")]
#[case::long_samples("tp1", &["data.seq_len=20000"], "one sample of sequence length 20000 needs 20001")]
#[case::experts("ep2", &[], "layout `dp2-ep2`: ep 2 and etp 1 shard experts, but the model has no experts: remove them")]
#[case::indivisible_experts("ep3", &["model.family=mixtral", "train.global_batch=6"], "experts 8 is not divisible by ep 3; choose an ep that divides the experts")]
#[case::whole_sequences("tp2", &["model.family=mixtral"], "tp 2 with experts needs sequence parallelism, or every expert sees each token 2 times; add `-sp`")]
fn a_layout_that_cannot_be_is_named(
    #[case] layout: &str,
    #[case] sets: &[&str],
    #[case] message: &str,
) {
    let run = Run::new();
    let ended = Ranks::threads(&run.args(layout, 1, sets))
        .wait_all()
        .remove(0);
    assert_refused(&ended, message);
    assert!(
        !run.path("run").exists(),
        "a refused run leaves nothing behind"
    );
}

#[rstest]
#[case::schedule(
    &["schedule=1f1b", "chunks=2"],
    "1f1b with 2 chunks per rank: it has 1 chunk per rank; for more, use interleaved (`parallel.schedule`, `parallel.chunks`)"
)]
#[case::vee(&["schedule=zb-v", "chunks=3"], "zb-v with 3 chunks per rank: it has 2 chunks per rank, the second on the")]
#[case::no_chunks(&["chunks=0"], "`parallel.chunks` is 0: it must be from 1 to 65535")]
#[case::no_groups(
    &["micro_batch_group=2"],
    "1f1b has no micro-batch groups, but a group size of 2 is set: remove it (`parallel.micro_batch_group`, `parallel.schedule`)"
)]
#[case::layers(&["pipeline_layout=Et|L"], "`Et|L`: it has 1 layers (t), but the model has 2")]
#[case::letter(&["pipeline_layout=Ex|tL"], "`x` at 1 is not one of E t m L | ( ) * , (`parallel.pipe")]
#[case::loss(&["pipeline_layout=EtL|t"], "it must begin with its only E and end with its only L")]
#[case::both(
    &["pipeline_layout='Et|tL'", "first_stage_layers=1"],
    "remove the layer counts of the first and last stage and the options that count the embedding and the loss as layers (`parallel.pipeline_layout`; `parallel.first_stage_layers`, "
)]
#[case::first(
    &["first_stage_layers=3"],
    "`parallel.first_stage_layers` is 3: it must be at most the model's 2 layers (model.layers)"
)]
#[case::last(
    &["first_stage_layers=1", "last_stage_layers=2"],
    "`parallel.last_stage_layers` is 2: it must be at most 1: the model has 2 layers (model.layers)"
)]
fn what_no_pipeline_can_be_is_named_with_and_without_one(
    #[values("tp1", "pp2")] layout: &str,
    #[case] sets: &[&str],
    #[case] message: &str,
) {
    let run = Run::new();
    let sets: Vec<_> = sets.iter().map(|set| format!("parallel.{set}")).collect();
    let sets: Vec<_> = sets.iter().map(String::as_str).collect();
    let ended = Ranks::threads(&run.args(layout, 1, &sets))
        .wait_all()
        .remove(0);
    assert_refused(&ended, message);
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    assert!(
        !run.path("run").exists(),
        "a refused run leaves nothing behind"
    );
}

#[test]
fn what_another_pipeline_can_be_is_no_mistake_without_one() {
    let run = Run::new();
    let sets = [
        "parallel.pipeline_layout=E|t|tL",
        "parallel.chunks=3",
        "parallel.schedule=gpipe",
    ];
    let ended = Ranks::threads(&run.args("tp1", 1, &sets))
        .finish()
        .remove(0);
    for key in ["pipeline_layout", "chunks", "schedule"] {
        let note = format!("parallel.{key} has no effect");
        assert!(ended.stdout.contains(&note), "{ended:?}");
    }
}

#[rstest]
#[case(
    "tp2-dp2",
    3,
    "layout `tp2-dp2` needs tp 2 x cp 1 x pp 1 x dp 2 = 4 ranks, but there are 3: start that \
    many, or"
)]
#[case("tp2", 3, "2 does not divide the 3 ranks, so no dp uses all of them")]
#[case("pp2", 3, "2 does not divide the 3 ranks, so no dp uses all of them")]
#[case(
    "pp2",
    1,
    "2 does not divide the 1 ranks, so no dp uses all of them: choose another layout, or a \
    multiple of 2"
)]
fn a_world_of_another_size_than_the_layout_is_named(
    #[case] layout: &str,
    #[case] world_size: usize,
    #[case] message: &str,
) {
    let run = Run::new();
    // All ranks start: a rank that fails waits half a minute for those that never arrive.
    for ended in Ranks::processes(world_size, &run.args(layout, 1, &[])).wait_all() {
        assert_refused(&ended, message);
    }
}
