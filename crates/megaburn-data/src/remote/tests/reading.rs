use std::collections::HashSet;
use std::ops::Range;
use std::thread::{self, scope};
use std::time::Instant;

use megaburn_store::{Location, Version};
use rstest::rstest;
use serde_json::Value;

use super::*;
use crate::{
    dataset::TokenDataset,
    indexed::merge,
    megatron::{GptDatasetConfig, SequenceRange},
    part::lock_folder,
    remote::RemoteFile,
    samples::Samples,
};

/// The tokens of the fixture as an object that is read directly.
fn remote_file(fixture: &Fixture, config: &ObjectStoreConfig) -> RemoteFile {
    let object = Location::open(&fixture.url(), "a data set", &config.store)
        .unwrap()
        .object(".bin")
        .unwrap();
    let version: Version = object.version().unwrap();
    RemoteFile::new(object, version, config)
}

/// Waits for what another thread does.
fn until(is_done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_done() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        thread::yield_now();
    }
}

/// The ranges that the server was asked for, which it forgets.
fn ranges(fixture: &Fixture) -> Vec<Range<u64>> {
    let requests = fixture.server.requests().into_iter();
    requests.filter_map(|request| request.range).collect()
}

fn bytes_of(fixture: &Fixture) -> Vec<u8> {
    fs::read(fixture.prefix().with_extension("bin")).unwrap()
}

#[rstest]
#[case(0)]
#[case(2_000)]
#[case(60_001)]
fn tokens_are_those_of_the_local_files(#[case] num_bytes: usize, #[values(4, 1000)] blocks: usize) {
    let fixture = Fixture::new(num_bytes.max(1));
    let local = fixture.local();
    let config = fixture.config().with_num_blocks(blocks);
    let remote = IndexedDataset::open_with(fixture.url(), &config).unwrap();
    remote.check().unwrap();
    assert_eq!(remote.num_tokens(), local.num_tokens());
    for _ in 0..60 {
        let begin = fastrand::u64(..=local.num_tokens());
        let longest = local.num_tokens().min(begin + fastrand::u64(..9000));
        let range = begin..fastrand::u64(begin..=longest);
        let expected = local.tokens_at(range.clone(), 260).unwrap();
        assert_eq!(remote.tokens_at(range, 260).unwrap(), expected);
    }
    for _ in 0..10 {
        let index = fastrand::u64(..local.num_documents());
        assert_eq!(
            remote.document(index).unwrap(),
            local.document(index).unwrap()
        );
    }
    assert_eq!(all(&remote), all(&local));
    assert_eq!(fixture.retries(), [""; 0]);
}

#[test]
fn memory_has_at_most_the_blocks_of_the_configuration() {
    let fixture = Fixture::new(100_000);
    let bytes = bytes_of(&fixture);
    for num_blocks in [0, 1, 2, 5] {
        let config = fixture.config().with_num_blocks(num_blocks);
        let file = remote_file(&fixture, &config);
        let read = |at: usize, count: usize| {
            let mut buffer = vec![0; count];
            file.read_exact_at(&mut buffer, at as u64).unwrap();
            assert_eq!(buffer, bytes[at..at + count]);
            let (num_bytes, num_found) = file.blocks().size();
            assert!(num_bytes <= 4096 * num_blocks && num_found <= num_blocks);
        };
        scope(|scope| {
            scope.spawn(|| (0..90_000).step_by(1500).for_each(|at| read(at, 1500)));
            scope.spawn(|| (0..90_000).step_by(7000).for_each(|at| read(at, 7000)));
            scope.spawn(|| (0..40).for_each(|_| read(fastrand::usize(..80_000), 3000)));
        });
    }
}

#[test]
fn reads_that_follow_each_other_fetch_each_block_once_and_ahead() {
    let fixture = Fixture::new(100_000);
    let file = remote_file(&fixture, &fixture.config());
    fixture.server.requests();
    // Samples overlap by a token. The first read follows none, so it fetches its own bytes.
    let mut buffer = vec![0; 1002];
    for at in 0..5 {
        file.read_exact_at(&mut buffer, 1000 * at).unwrap();
    }
    // The fifth read ends in block 1, so block 2 was asked for, and arrives.
    until(|| file.blocks().size().0 == 3 * 4096);
    let mut asked = ranges(&fixture);
    asked.sort_by_key(|range| (range.start, range.end));
    assert_eq!(asked, [0..1002, 0..4096, 4096..8192, 8192..12288]);
    // A block that was read ahead is not asked for again.
    file.read_exact_at(&mut buffer[..190], 8192).unwrap();
    let asked = ranges(&fixture);
    assert!(asked.iter().all(|range| range.start >= 12288), "{asked:?}");
}

#[test]
fn a_block_that_fails_ahead_is_asked_for_when_it_is_read() {
    let fixture = Fixture::new(50_000);
    let file = remote_file(&fixture, &fixture.config());
    let bytes = bytes_of(&fixture);
    let mut buffer = vec![0; 4096];
    for block in 0..10 {
        // Block 0 is read alone, and 1 brings 2 ahead.
        if block == 5 {
            until(|| fixture.server.num_faults() == 0);
        }
        let at = 4096 * block;
        file.read_exact_at(&mut buffer, at as u64).unwrap();
        assert_eq!(buffer, bytes[at..at + 4096]);
        if block == 3 {
            fixture.server.fail(".bin", Fault::Reset);
        }
    }
    assert_eq!(fixture.retries(), [""; 0]);
}

#[test]
fn one_long_read_fetches_ahead_too() {
    let fixture = Fixture::new(100_000);
    let file = remote_file(&fixture, &fixture.config());
    let bytes = bytes_of(&fixture);
    let mut buffer = vec![0; 90_000];
    file.read_exact_at(&mut buffer[..10], 0).unwrap();
    file.read_exact_at(&mut buffer, 10).unwrap();
    assert_eq!(buffer, bytes[10..90_010]);
    let asked = ranges(&fixture);
    let whole = |block: u64| {
        asked
            .iter()
            .filter(|r| r.start == 4096 * block && r.end > 10)
            .count()
    };
    assert!(
        (0..90_010 / 4096).all(|block| whole(block) == 1),
        "{asked:?}"
    );
}

#[test]
fn other_reads_fetch_only_their_bytes() {
    let fixture = Fixture::new(400_000);
    let config = fixture.config().with_num_blocks(2);
    let file = remote_file(&fixture, &config);
    fixture.server.requests();
    let mut buffer = vec![0; 500];
    // These are far from each other, and one of them is in two blocks.
    let begins = [0, 200_000, 4000 + (100 << 10), 300_000];
    begins
        .iter()
        .for_each(|at| file.read_exact_at(&mut buffer, *at).unwrap());
    let asked = ranges(&fixture);
    assert_eq!(asked, begins.map(|at| at..at + 500));
    assert_eq!(file.blocks().size(), (0, 0));
}

/// The bytes of the index that the server was asked for since the last call.
fn index_bytes(fixture: &Fixture) -> u64 {
    let requests = fixture.server.requests().into_iter();
    let of_index = requests.filter(|request| request.path.ends_with(".idx"));
    let ranges = of_index.filter_map(|request| request.range);
    ranges.map(|range| range.end - range.start).sum()
}

#[test]
fn of_several_that_wait_for_the_index_one_downloads_it() {
    let fixture = Fixture::new(3_000);
    let lock = lock_folder(&fixture.cache(), &mut || Ok(())).unwrap();
    let waiting: Arc<Mutex<HashSet<usize>>> = Arc::default();
    scope(|scope| {
        for number in 0..4 {
            let noted = waiting.clone();
            let config = fixture.config().on_event(move |event| {
                if let ObjectStoreEvent::Waiting { .. } = event {
                    noted.lock().unwrap().insert(number);
                }
            });
            let url = fixture.url();
            scope.spawn(move || IndexedDataset::open_with(url, &config).unwrap());
        }
        until(|| waiting.lock().unwrap().len() == 4);
        assert_eq!(index_bytes(&fixture), 0);
        drop(lock);
    });
    let path = fixture.prefix().with_extension("idx");
    assert_eq!(index_bytes(&fixture), fs::metadata(path).unwrap().len());
}

#[test]
fn the_index_is_downloaded_once_per_version() {
    let fixture = Fixture::new(3_000);
    let size = fs::metadata(fixture.prefix().with_extension("idx"))
        .unwrap()
        .len();
    (0..3).for_each(|_| assert_eq!(all(&fixture.open().unwrap()), all(&fixture.local())));
    assert_eq!(index_bytes(&fixture), size, "three opened data sets");
    let names = names_of(&fixture.cache());
    assert_eq!(names.len(), 1, "{names:?}");
    assert!(names[0].ends_with("-web.idx"), "{names:?}");
    let events = fixture.events.lock().unwrap().clone();
    let copied = events.iter().filter_map(|event| match event {
        ObjectStoreEvent::Downloaded(num_bytes) => Some(*num_bytes),
        _ => None,
    });
    assert_eq!(copied.sum::<u64>(), size);
    // A copy that was cut is made again, and what a killed process left is removed.
    let path = fixture.cache().join(&names[0]);
    fs::write(&path, "MMIDIDX").unwrap();
    fs::write(
        fixture.cache().join(format!("{}.unfinished-1-0", names[0])),
        "x",
    )
    .unwrap();
    fs::write(fixture.cache().join("note.idx"), "mine").unwrap();
    assert_eq!(all(&fixture.open().unwrap()), all(&fixture.local()));
    assert_eq!(index_bytes(&fixture), size);
    // Another version has another name.
    fixture.upload("/dir/web");
    assert_eq!(all(&fixture.open().unwrap()), all(&fixture.local()));
    let mut names = names_of(&fixture.cache());
    names.sort();
    assert_eq!(names.len(), 3, "{names:?}");
    assert!(names.contains(&"note.idx".into()), "{names:?}");
}

#[test]
fn the_description_fingerprint_and_tokenizer_are_those_of_the_local_files() {
    let fixture = Fixture::new(50_000);
    let (local, remote) = (fixture.local(), fixture.open().unwrap());
    assert_eq!(remote.description().unwrap(), local.description().unwrap());
    assert_eq!(remote.fingerprint().unwrap(), local.fingerprint().unwrap());
    remote.check_tokenizer(&ByteTokenizer).unwrap();
    // A description of other files does not count, and without one the tokens are read.
    fixture
        .server
        .put("/dir/web.megaburn", b"{\"index_xxh3\": \"0\"}");
    fs::remove_file(fixture.prefix().with_extension("megaburn")).unwrap();
    let remote = fixture.open().unwrap();
    assert_eq!(remote.description(), None::<Value>);
    assert_eq!(
        remote.fingerprint().unwrap(),
        fixture.local().fingerprint().unwrap()
    );
    // A server may deny what does not exist.
    fixture.server.fail(".megaburn", Fault::Status(403));
    assert_eq!(fixture.open().unwrap().description(), None::<Value>);
}

#[test]
fn samples_in_both_orders_are_those_of_the_local_files() {
    let fixture = Fixture::new(20_000);
    let cache = |name: &str| fixture.dir.path().join(name);
    let gpt = |set: IndexedDataset, cache: PathBuf| {
        let config = GptDatasetConfig::new(64, 260, cache).with_num_samples(200);
        config
            .build(&SequenceRange::all(Arc::new(set)), |_| ())
            .unwrap()
    };
    let local = gpt(fixture.local(), cache("one"));
    let remote = gpt(fixture.open().unwrap(), cache("two"));
    for index in 0..200 {
        assert_eq!(remote.tokens(index).unwrap(), local.tokens(index).unwrap());
    }
    let local = TokenDataset::indexed(Arc::new(fixture.local()), 260);
    let remote = TokenDataset::indexed(Arc::new(fixture.open().unwrap()), 260);
    for index in 0..local.num_tokens() / 64 - 1 {
        assert_eq!(
            remote.sample(64, index).unwrap(),
            local.sample(64, index).unwrap()
        );
    }
}

#[test]
fn a_data_set_can_be_merged_from_a_url() {
    let fixture = Fixture::new(30_000);
    let out = fixture.dir.path().join("all");
    let sets = [fixture.open().unwrap(), fixture.local()];
    merge(&sets, &out, false).unwrap();
    let merged = all(&IndexedDataset::open(&out).unwrap());
    assert_eq!(
        merged,
        [all(&fixture.local()), all(&fixture.local())].concat()
    );
    let error = merge(&sets, Path::new("s3://bucket/all"), false).unwrap_err();
    assert!(
        error.to_string().contains("it is a URL; write to files"),
        "{error}"
    );
}
