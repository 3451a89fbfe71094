//! Runs on data sets in Megatron-LM's format, on several of them, and on cached text.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use megaburn::{
    data::{
        ByteTokenizer, GptDatasetConfig, IndexedDataset, PreprocessConfig, SampleLog, Samples,
        SequenceRange,
    },
    report::metrics::{MetricsRecord, read_metrics},
    train::{
        ConfigLayers, RunData, TrainConfig,
        config::{DataOrder, SourceConfig},
    },
};
use megaburn_test_support::{
    run::Run,
    text::{fresh_seed, write_random_documents},
};
use rstest::rstest;

use crate::runs::{
    child::Ranks,
    resume::{assert_goes_on, train},
};

/// A data set of random documents, and its prefix.
pub(super) fn data_set(run: &Run, name: &str, num_documents: u64) -> String {
    let text = run.path(&format!("{name}.jsonl"));
    write_random_documents(&text, num_documents, 90, fresh_seed() ^ num_documents);
    encode(run, text, name)
}

fn encode(run: &Run, text: PathBuf, name: &str) -> String {
    let out = run.path(name);
    let config = PreprocessConfig::new(vec![text], out.clone()).with_append_eod(true);
    config
        .with_plain_text(true)
        .run(&ByteTokenizer, |_| ())
        .unwrap();
    out.display().to_string()
}

pub(super) fn source(path: &str, weight: Option<f64>, name: Option<&str>) -> SourceConfig {
    SourceConfig {
        path: path.into(),
        weight,
        name: name.map(String::from),
        ..SourceConfig::default()
    }
}

/// A configuration of the run without data.
pub(super) fn config(run: &Run, layout: &str, steps: u64) -> TrainConfig {
    let mut config = run.config(layout, steps);
    config.data.path = None;
    config
}

fn mixed(run: &Run, layout: &str) -> TrainConfig {
    let mut config = config(run, layout, 20);
    config.data.train = [("a", 0.7), ("b", 0.2), ("c", 0.1)]
        .map(|(name, weight)| source(&run.path(name).display().to_string(), Some(weight), None))
        .to_vec();
    config.data.split = Some("9,1".into());
    config
}

#[test]
fn a_data_set_trains_as_the_text_that_it_was_encoded_from() {
    let run = Run::new();
    let prefix = encode(&run, run.path("text.txt"), "set");
    let losses = |path: &str| {
        let run = Run::new();
        let mut config = run.config("tp1", 4);
        config.data.path = Some(path.into());
        config.data.validation_fraction = 0.0;
        // The eos after the last document adds no sample of this length.
        config.data.seq_len = 17;
        train(config, 4, 4).losses
    };
    let text = run.path("text.txt").display().to_string();
    let expected = losses(&text);
    for path in [
        prefix.clone(),
        format!("{prefix}.bin"),
        format!("{prefix}.idx"),
    ] {
        assert_eq!(losses(&path), expected, "{path}");
    }
}

#[test]
fn cached_text_trains_as_text_in_memory() {
    let text = Run::new();
    let run = |cache_dir: Option<PathBuf>| {
        let run = Run::new();
        let mut args = run.args("tp2-sp", 8, &[]);
        if let Some(folder) = cache_dir {
            args.extend([
                "--set".into(),
                format!("data.cache_dir={}", folder.display()),
            ]);
        }
        let text = text.path("text.txt").display().to_string();
        args.extend(["--data".into(), text]);
        let ended = Ranks::threads(&args).finish().remove(0);
        let evals: Vec<_> = read_metrics(run.path("run/metrics.jsonl")).unwrap();
        let evals = evals.into_iter().filter_map(|record| match record {
            MetricsRecord::Eval(eval) => Some((eval.step, eval.eval_loss.to_bits())),
            MetricsRecord::Step(_) => None,
        });
        (run.numbers(), evals.collect::<Vec<_>>(), ended)
    };
    let cache = text.path("cache");
    let in_memory = run(None);
    assert_eq!(in_memory.1.len(), 2);
    let mut times = Vec::new();
    for _ in 0..2 {
        let cached = run(Some(cache.clone()));
        assert_eq!((&cached.0, &cached.1), (&in_memory.0, &in_memory.1));
        let mut files: Vec<_> = fs::read_dir(&cache)
            .unwrap()
            .map(|file| file.unwrap())
            .collect();
        files.sort_by_key(|file| file.file_name());
        let modified = files
            .iter()
            .map(|file| file.metadata().unwrap().modified().unwrap());
        let is_first = times.is_empty();
        times.push(modified.collect::<Vec<_>>());
        let stderr = &cached.2.stderr;
        assert_eq!(stderr.contains("encoding "), is_first, "{stderr}");
        let bits = |stdout: &str| {
            stdout
                .lines()
                .find(|line| line.contains("bits per byte"))
                .map(String::from)
        };
        assert_eq!(bits(&cached.2.stdout), bits(&in_memory.2.stdout));
    }
    assert_eq!(times[0].len(), 3);
    assert_eq!(times[0], times[1], "the second run encodes nothing");
}

#[test]
fn a_mixture_continues_in_the_middle_under_other_layouts() {
    let whole = Run::new();
    for (name, num_documents) in [("a", 400), ("b", 90), ("c", 150)] {
        data_set(&whole, name, num_documents);
    }
    let expected = train(mixed(&whole, "tp2-dp2-sp"), 20, 0);
    for layout in ["tp1", "dp4", "tp2-pp2"] {
        let mut first = mixed(&whole, "tp2-dp2-sp");
        let half = Run::new();
        first.run.dir = half.path("run").display().to_string();
        let mut second = mixed(&whole, layout);
        second.run.dir = first.run.dir.clone();
        train(first, 9, 9);
        let resumed = train(second, 20, 0);
        assert_goes_on(&resumed, &expected, 9, layout);
        let of = |log: &SampleLog| log.entries().filter(|(index, _)| *index >= 72).collect();
        let [found, wanted]: [Vec<_>; 2] = [of(&resumed.samples), of(&expected.samples)];
        assert_eq!(wanted.len(), 88);
        assert_eq!(found, wanted, "{layout}");
    }
}

#[test]
fn every_evaluation_has_its_own_loss() {
    let run = Run::new();
    let [a, b, c] = [("a", 400), ("b", 200), ("c", 200)].map(|(name, n)| data_set(&run, name, n));
    let mut config = config(&run, "tp1", 8);
    config.data.train = vec![source(&a, None, None)];
    config.data.valid = vec![
        source(&b, None, Some("web")),
        source(&c, None, None),
        source(&a, None, Some("web")),
    ];
    config.data.test = vec![source(&c, None, Some("held out"))];
    fs::write(run.path("mixed.toml"), config.to_toml()).unwrap();
    let path = run.path("mixed.toml").display().to_string();
    let args = ["--config", &path].map(String::from);
    let stdout = Ranks::threads(&args).finish().remove(0).stdout;
    let records = read_metrics(run.path("run/metrics.jsonl")).unwrap();
    let evals = records.into_iter().filter_map(|record| match record {
        MetricsRecord::Eval(eval) => Some((eval.step, eval.data.unwrap(), eval.eval_loss)),
        MetricsRecord::Step(_) => None,
    });
    let evals: Vec<_> = evals.collect();
    let names: Vec<_> = evals
        .iter()
        .map(|(step, name, _)| (*step, name.as_str()))
        .collect();
    let expected = [(7, "web"), (7, "c"), (8, "web"), (8, "c"), (8, "held out")];
    assert_eq!(names, expected);
    // The same data has the same loss under another name.
    assert_eq!(evals[3].2, evals[4].2);
    assert_ne!(evals[2].2, evals[3].2);
    assert!(stdout.contains("evaluation after step 7: loss"), "{stdout}");
    assert!(stdout.contains(" on held out"), "{stdout}");
    assert!(
        stdout.contains(&format!("validation loss {:.4}", evals[2].2)),
        "{stdout}"
    );
}

#[test]
fn megatrons_order_is_read_by_every_layout() {
    let run = Run::new();
    let prefix = data_set(&run, "a", 60);
    let of = |layout: &str, steps: u64| {
        let mut config = config(&run, layout, steps);
        config.data.path = Some(prefix.clone());
        config.data.order = DataOrder::Megatron;
        config.data.split = Some("90,10".into());
        config.data.cache_dir = Some(run.path("cache").display().to_string());
        config.train.steps = steps;
        config
    };
    // Two epochs and a half.
    let set = Arc::new(IndexedDataset::open(&prefix).unwrap());
    let [range, ..] = SequenceRange::split(&set, &[90.0, 10.0]).unwrap();
    let num_tokens = range.tokens().unwrap();
    let steps = (num_tokens.end - num_tokens.start) * 5 / 2 / 16 / 8;
    let expected = GptDatasetConfig::new(16, 260, run.path("other")).with_num_samples(steps * 8);
    let expected = expected.build(&range, |_| ()).unwrap();
    assert_eq!(expected.num_epochs(), 3);
    let mut log = SampleLog::new();
    for index in 0..steps * 8 {
        log.record(index, &expected.tokens(index).unwrap()).unwrap();
    }
    let read = train(of("tp2-dp2-sp", steps), steps, steps / 2);
    assert!(read.samples == log);
    // Another number of epochs is another order from the first sample on.
    let resume = |steps| {
        let config = of("tp1", steps);
        let text = config.to_toml();
        let layers = ConfigLayers::new().with_text("again", &text).unwrap();
        fs::write(run.path("again.toml"), layers.load().unwrap().to_toml()).unwrap();
        let path = run.path("again.toml").display().to_string();
        let args = ["--config", &path, "--steps", &steps.to_string()].map(String::from);
        Ranks::threads(&args).wait_all().remove(0)
    };
    let refused = resume(steps * 2);
    assert!(
        refused
            .stderr
            .contains("the number of epochs that train.steps needs"),
        "{refused:#?}"
    );
    assert_eq!(resume(steps).code, Some(0));
}

#[rstest]
#[case("data.tokenizer = {bpe:?}", "was encoded by another tokenizer")]
#[case(
    "data.order = \"megatron\"",
    "`data.order` is megatron: it must be `megaburn` with"
)]
#[case(
    "data.split = \"0,1\"",
    "`data.split` is 0,1: it must be weights of which the first"
)]
#[case(
    "data.split = \"9,1\"\ndata.valid = [{path = \"x\"}]",
    "`data.valid` is a list: it must be a list without"
)]
#[case("data.split = \"999999,1\"", "none of the")]
#[case(
    "data.split = \"1,2,3,4\"",
    "`data.split` is 1,2,3,4: it must be up to three numbers of 0 or more"
)]
#[case(
    "data.split = \"8,-1\"",
    "`data.split` is 8,-1: it must be up to three"
)]
#[case("data.split = \"\"", "`data.split` is empty: it must be up to three")]
#[case(
    "data.fim = {no_prefix = \"\"}",
    "`data.fim.no_prefix` is empty: it must be some text"
)]
#[case(
    "data.fim = {middle = \"m\"}",
    "`data.fim.prefix` is missing: it must be given together"
)]
#[case(
    "data.valid = [{path = \"x\", name = \"\"}]",
    "a list with the name \"\""
)]
#[case(
    "data.train = [{path = \"x\"}]",
    "`data.train` is a list: it must be empty if --data or"
)]
#[case(
    "data.valid = [{path = \"x\", weight = 0}]",
    "`data.valid` is a list with weight 0"
)]
#[case("data.valid = [{path = \"x\", wight = 1}]", "unknown field `wight`")]
#[case(
    "data.valid = [{path = \"no/such\"}]",
    "data file `no/such` does not exist"
)]
#[case(
    "data.test = [{path = \"x\"}, {path = \"x\"}]",
    "`data.test` is a list with x twice"
)]
#[case(
    "data.valid = [{path = \"a/x\"}, {path = \"b/x\"}]",
    "`data.valid` is a list with x twice"
)]
#[case(
    "data.valid = [{path = \"x\"}]\ndata.test = [{path = \"a/x\"}]",
    "`data.test` is a list with x"
)]
#[case(
    "data.valid = [{path = \"x\", name = \"test\"}]\ndata.split = \"8,0,2\"",
    "`data.valid` is a list with test, which is the name"
)]
#[case(
    "data.valid = [{path = \"x\", epochs = 0}]",
    "`data.valid` is a list with epochs 0: it must be a list with positive epochs"
)]
#[case(
    "data.valid = [{path = \"x\", epochs = 1, weight = 1}]",
    "`data.valid` is a list with both weight and epochs of x"
)]
#[case(
    "data.valid = [{path = \"x\", split = \"9,1\"}]",
    "`data.valid` is a list with a split"
)]
fn a_setting_that_the_data_cannot_have_is_named(#[case] line: &str, #[case] message: &str) {
    let run = Run::new();
    let prefix = data_set(&run, "a", 60);
    let tokenizers = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tokenizers");
    let bpe = tokenizers.join("byte-level");
    let line = line.replace("{bpe:?}", &format!("{bpe:?}"));
    let text = format!("data.path = {prefix:?}\n{line}");
    let config = ConfigLayers::new()
        .with_file(run.path("config.toml"))
        .unwrap();
    let config = config.with_text("line", &text).and_then(ConfigLayers::load);
    let loaded = config.and_then(|config| RunData::load(&config));
    let error = loaded.unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

#[rstest]
#[case(".bin", "has")]
#[case(".idx", "shorter than")]
fn a_truncated_data_set_is_named(#[case] ending: &str, #[case] message: &str) {
    let run = Run::new();
    let prefix = data_set(&run, "a", 60);
    let path = format!("{prefix}{ending}");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len().min(700) / 30]).unwrap();
    let mut ended = Ranks::threads(&run.args("tp1", 2, &[&format!("data.path={prefix}")]));
    let ended = ended.wait_all().remove(0);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.stderr.contains(message), "{ended:#?}");
    assert!(
        ended.stderr.contains(&path) || ended.stderr.contains(&prefix),
        "{ended:#?}"
    );
    assert!(!run.path("run").exists(), "nothing is written");
}

#[test]
fn megatrons_order_without_weights_is_refused_if_it_ends_before_the_run() {
    let run = Run::new();
    let mut config = config(&run, "tp1", 2);
    let sets = [("a", 60), ("b", 50)].map(|(name, number)| data_set(&run, name, number));
    config.data.train = sets.iter().map(|path| source(path, None, None)).collect();
    config.data.order = DataOrder::Megatron;
    config.data.validation_fraction = 0.0;
    config.data.cache_dir = Some(run.path("cache").display().to_string());
    fs::write(run.path("mixed.toml"), config.to_toml()).unwrap();
    let path = run.path("mixed.toml").display().to_string();
    let start = |steps: &str| {
        let args = ["--config", &path, "--steps", steps].map(String::from);
        Ranks::threads(&args).wait_all().remove(0)
    };
    let refused = start("5000");
    assert_eq!(refused.code, Some(2), "{refused:#?}");
    assert!(
        refused.stderr.contains("the run needs 40000; give weights"),
        "{refused:#?}"
    );
    assert_eq!(start("2").code, Some(0));
}
