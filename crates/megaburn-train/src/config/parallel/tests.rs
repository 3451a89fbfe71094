use rstest::rstest;

use super::*;
use crate::{config::ConfigLayers, exit::Exit};

fn section(lines: &str) -> Result<ParallelConfig, TrainError> {
    let layers = ConfigLayers::new().with_text("p.toml", &format!("[parallel]\n{lines}"))?;
    Ok(layers.load()?.parallel)
}

#[rstest]
#[case("", None, "tp2-dp2-sp")]
#[case("", Some(8), "tp2-dp4-sp")]
#[case("", Some(3), "dp3")]
#[case("ranks = 5", None, "dp5")]
#[case("dp = 2", Some(2), "dp2")]
#[case("tp = 1", None, "dp4")]
#[case("tp = 4", None, "tp4-sp")]
#[case("sp = false", None, "tp2-dp2")]
#[case("pp = 2", None, "tp2-pp2-sp")]
#[case("dp = 4", None, "tp2-dp4-sp")]
#[case("tp = 8\nranks = 16", None, "tp8-dp2-sp")]
#[case("tp = 1\nranks = 1", None, "tp1")]
#[case("ep = 2", None, "tp2-dp2-ep2-sp")]
fn absent_degrees_follow_from_the_others(
    #[case] lines: &str,
    #[case] world: Option<usize>,
    #[case] layout: &str,
) {
    assert_eq!(
        section(lines).unwrap().layout(world).unwrap().to_string(),
        layout
    );
}

#[test]
fn a_layout_leaves_what_is_shared_out() {
    let layers = ConfigLayers::new().with_set("parallel.zero=1").unwrap();
    let layers = layers.with_set("parallel.zero_ranks=3").unwrap();
    let config = layers.with_layout("dp4").unwrap().load().unwrap();
    assert_eq!((config.parallel.dp, config.parallel.zero), (Some(4), 1));
    let error = config.layout(None).unwrap_err().to_string();
    assert!(
        error.contains("`parallel.zero_ranks` is 3: it must be a divisor of 4"),
        "{error}"
    );
}

#[rstest]
#[case("tp2", None, "tp2")]
#[case("tp2", Some(8), "tp2-dp4")]
#[case("tp2-dp2-sp", None, "tp2-dp2-sp")]
#[case("ep2", None, "dp2-ep2")]
#[case("tp1", None, "tp1")]
fn a_layout_text_becomes_a_section(
    #[case] text: &str,
    #[case] world: Option<usize>,
    #[case] layout: &str,
) {
    let section = ParallelConfig::from_layout(text).unwrap();
    assert_eq!(section.layout(world).unwrap().to_string(), layout);
}

#[rstest]
#[case("tp = 0", None, "`parallel.tp` is 0: it must be from 1 to 65535")]
#[case(
    "zero = 4",
    None,
    "`parallel.zero` is 4: it must be 0 (nothing is sharded), 1"
)]
#[case(
    "zero_ranks = 0",
    None,
    "`parallel.zero_ranks` is 0: it must be from 1 to"
)]
#[case(
    "bucket_size = 0",
    None,
    "`parallel.bucket_size` is 0: it must be at least 1"
)]
#[case("cp = 0", None, "`parallel.cp` is 0: it must be from 1 to 65535")]
#[case("pp = 0", None, "`parallel.pp` is 0: it must be from 1 to 65535")]
#[case("dp = 0", None, "`parallel.dp` is 0: it must be from 1 to 65535")]
#[case("ep = 0", None, "`parallel.ep` is 0: it must be from 1 to 65535")]
#[case(
    "etp = 65536",
    None,
    "`parallel.etp` is 65536: it must be from 1 to 65535"
)]
#[case("ranks = 0", None, "`parallel.ranks` is 0: it must be from 1 to 65535")]
#[case("tp = 1\nsp = true", None, "sequence parallelism (sp) needs tp > 1")]
#[case("tp = 2\ndp = 2", Some(8), "= 4 ranks, but there are 8")]
#[case(
    "tp = 3",
    Some(8),
    "3 does not divide the 8 ranks, so no dp uses all of them"
)]
#[case(
    "tp = 8",
    None,
    "does not divide the 4 ranks, so no dp uses all of them: choose another layout, or a multiple of 8 ranks; no launcher sets the number of ranks, so it is `parallel.ranks` = 4: change it, or set `parallel.dp`"
)]
fn a_section_that_is_no_layout_is_refused(
    #[case] lines: &str,
    #[case] world: Option<usize>,
    #[case] message: &str,
) {
    let error = section(lines)
        .and_then(|section| section.layout(world))
        .unwrap_err();
    assert!(error.to_string().contains(message), "{error}");
    assert_eq!(error.exit(), Exit::BadInput);
}
