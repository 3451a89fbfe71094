//! Packed samples next to a reference that looks at every bin.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rstest::rstest;
use serde_json::json;

use super::*;
use crate::{
    blend::BlendedSampler,
    corpus::Corpus,
    dataset::TokenDataset,
    indexed::IndexedDataset,
    megatron::SequenceRange,
    preprocess::PreprocessConfig,
    sampler::Sampler,
    samples::{Sample, Samples},
    text_cache::TextCache,
    tokenizer::ByteTokenizer,
    union::UnionSampler,
};

mod damage;

const VOCAB: usize = 260;
const EOS: u32 = 257;

/// Random documents, each of which is one text or several. Some are empty, some very long.
fn random_documents(num_documents: usize) -> Vec<Vec<String>> {
    let text = |_| {
        let most = [0, 3, 20, 60, 300][fastrand::usize(..5)];
        let len = fastrand::usize(0..=most);
        (0..len).map(|_| fastrand::alphanumeric()).collect()
    };
    let document = |_| (0..[1, 1, 1, 3][fastrand::usize(..4)]).map(text).collect();
    (0..num_documents).map(document).collect()
}

/// Writes documents as a data set, with or without eos after each, and returns their tokens.
fn write(
    dir: &Path,
    name: &str,
    documents: &[Vec<String>],
    append_eod: bool,
) -> (Arc<IndexedDataset>, Vec<Vec<u32>>) {
    let lines = documents.iter().map(|texts| match texts.as_slice() {
        [text] => format!("{}\n", json!({ "text": text })),
        texts => format!("{}\n", json!({ "text": texts })),
    });
    let input = dir.join(format!("{name}.jsonl"));
    fs::write(&input, lines.collect::<String>()).unwrap();
    let config = PreprocessConfig::new(vec![input], dir.join(name));
    let config = config.with_append_eod(append_eod).with_force(true);
    config.run(&ByteTokenizer, |_| ()).unwrap();
    let set = Arc::new(IndexedDataset::open(dir.join(name)).unwrap());
    let tokens = (0..set.num_documents()).map(|index| {
        let tokens = set.document(index).unwrap().concat();
        tokens.into_iter().map(|token| token as u32).collect()
    });
    let tokens: Vec<Vec<u32>> = tokens.collect();
    for (tokens, texts) in tokens.iter().zip(documents) {
        assert_eq!(
            append_eod && !tokens.is_empty(),
            tokens.last() == Some(&EOS)
        );
        assert_eq!(
            texts.concat().len() + usize::from(tokens.last() == Some(&EOS)),
            tokens.len()
        );
    }
    (set, tokens)
}

/// The samples in their order without shuffling, as ranges of positions, by a search through all
/// bins for each document.
fn reference(documents: &[Range<u64>], seq_len: u64, multiple: u64) -> Vec<Vec<Range<u64>>> {
    let mut chunks = Vec::new();
    for document in documents {
        let mut begin = document.start;
        while begin + 1 < document.end {
            let end = document.end.min(begin + seq_len + 1);
            chunks.push(begin..end);
            begin = end - 1;
        }
    }
    chunks.sort_by_key(|chunk| (std::cmp::Reverse(chunk.end - chunk.start), chunk.start));
    // The bin that was changed last is the last one.
    let mut bins: Vec<Vec<Range<u64>>> = Vec::new();
    for chunk in chunks {
        let size = |chunk: &Range<u64>| (chunk.end - chunk.start - 1).next_multiple_of(multiple);
        let room = |bin: &Vec<Range<u64>>| seq_len.checked_sub(bin.iter().map(size).sum());
        let mut best: Option<(u64, usize)> = None;
        for (at, bin) in bins.iter().enumerate() {
            let room = room(bin).expect("a bin is never too full");
            if room >= size(&chunk) && best.is_none_or(|(least, _)| room <= least) {
                best = Some((room, at));
            }
        }
        let mut bin = best.map_or_else(Vec::new, |(_, at)| bins.remove(at));
        bin.push(chunk);
        bins.push(bin);
    }
    bins.sort_by_key(|bin| bin[0].start);
    bins
}

fn positions(documents: &[Vec<u32>]) -> Vec<Range<u64>> {
    let mut end = 0;
    let position = documents.iter().map(|tokens| {
        let begin = end;
        end += tokens.len() as u64;
        begin..end
    });
    position.collect()
}

fn samples(samples: &dyn Samples) -> Vec<Sample> {
    samples.batch(0..samples.num_samples()).unwrap()
}

/// The contents of the files of a folder, by name.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let Ok(entries) = fs::read_dir(folder) else {
        return BTreeMap::new();
    };
    let file = |path: PathBuf| (path.clone(), fs::read(path).unwrap());
    entries.map(|entry| file(entry.unwrap().path())).collect()
}

#[rstest]
fn samples_are_those_of_the_reference(
    #[values(48, 144, 16)] seq_len: u64,
    #[values(1, 16, 3)] multiple: u64,
    #[values(true, false)] append_eod: bool,
    #[values(0, 150)] num_documents: usize,
) {
    let seq_len = seq_len.next_multiple_of(multiple);
    let dir = tempfile::tempdir().unwrap();
    // One document has labels in any case, and one fills several samples.
    let mut documents = random_documents(num_documents);
    let giant = "giant ".repeat(seq_len as usize);
    documents.insert(fastrand::usize(..=num_documents), vec![giant]);
    let (set, tokens) = write(dir.path(), "set", &documents, append_eod);
    let positions = positions(&tokens);
    let expected = reference(&positions, seq_len, multiple);
    let config = PackedSamplerConfig::new(seq_len as usize).with_multiple(multiple as usize);
    let on_disk = TokenDataset::indexed(set, VOCAB);
    let in_memory = config.init(&on_disk, |event| panic!("{event:?}")).unwrap();
    let config = config.with_cache(dir.path().join("cache"));
    let cached = config.init(&on_disk, |_| ()).unwrap();
    let all = tokens.concat();
    for found in [&in_memory, &cached] {
        let tokens = |range: &Range<u64>| all[range.start as usize..range.end as usize].to_vec();
        let expected = expected
            .iter()
            .map(|bin| Sample::Documents(bin.iter().map(tokens).collect()));
        assert_eq!(samples(found), expected.collect::<Vec<_>>());
    }

    // Every token but the first of a document is a label once.
    let labels = expected.iter().flatten();
    let labels: Vec<u64> = labels
        .flat_map(|chunk| chunk.start + 1..chunk.end)
        .collect();
    let unique: BTreeSet<u64> = labels.iter().copied().collect();
    let wanted = positions
        .iter()
        .flat_map(|range| range.start + 1..range.end);
    assert_eq!(unique, wanted.collect());
    assert_eq!(labels.len(), unique.len());

    let windows = |range: &&Range<u64>| {
        let labels = range.start + 1..range.end;
        let windows = labels.map(|label| (label - 1) / seq_len);
        windows.collect::<BTreeSet<_>>().len() > 1
    };
    let len = |range: &Range<u64>| range.end - range.start;
    let num_documents = positions.iter().filter(|range| len(range) > 1).count() as u64;
    let stats = PackingStats {
        seq_len,
        num_samples: expected.len() as u64,
        num_documents,
        num_dropped: positions.len() as u64 - num_documents,
        num_labels: labels.len() as u64,
        num_cut: positions
            .iter()
            .filter(|range| len(range) > seq_len + 1)
            .count() as u64,
        num_cut_by_concatenation: positions.iter().filter(windows).count() as u64,
    };
    assert_eq!(in_memory.stats(), &stats);
    assert_eq!(cached.stats(), &stats);
    let num_positions = (stats.num_samples * seq_len) as f64;
    assert!(
        (stats.padding() * num_positions + stats.num_labels as f64 - num_positions).abs() < 1e-6
    );
}

#[rstest]
fn parts_of_a_data_set_have_the_documents_in_them(#[values(true, false)] append_eod: bool) {
    let dir = tempfile::tempdir().unwrap();
    let (set, tokens) = write(dir.path(), "set", &random_documents(60), append_eod);
    let whole = TokenDataset::indexed(set.clone(), VOCAB);
    let documents = positions(&tokens);
    let parts = SequenceRange::split(&set, &[5.0, 3.0, 2.0]).unwrap();
    let mut ranges: Vec<Range<u64>> = parts.iter().map(|part| part.tokens().unwrap()).collect();
    ranges.extend((0..20).map(|_| {
        let end = fastrand::u64(2..=whole.num_tokens());
        fastrand::u64(..end - 1)..end
    }));
    for range in ranges {
        let inside = documents.iter().map(|document| {
            let begin = document.start.clamp(range.start, range.end);
            begin - range.start..document.end.clamp(range.start, range.end) - range.start
        });
        let expected = reference(&inside.collect::<Vec<_>>(), 40, 4);
        let config = PackedSamplerConfig::new(40).with_multiple(4);
        let part = whole.part("some", range);
        match config.init(&part, |_| ()) {
            Ok(found) => {
                let tokens = |range: &Range<u64>| part.tokens_at(range.clone()).unwrap();
                let expected = expected
                    .iter()
                    .map(|bin| Sample::Documents(bin.iter().map(tokens).collect()));
                assert_eq!(samples(&found), expected.collect::<Vec<_>>());
            }
            Err(error) => {
                assert!(expected.is_empty(), "{error}");
                assert!(error.to_string().contains("no document of two tokens"));
            }
        }
    }
}

#[test]
fn a_text_in_memory_is_packed_like_one_in_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let texts: Vec<String> = random_documents(50).into_iter().flatten().collect();
    let lines = texts
        .iter()
        .map(|text| format!("{}\n", json!({ "text": text })));
    let path = dir.path().join("a.jsonl");
    fs::write(&path, lines.collect::<String>()).unwrap();
    let cache = TextCache::new(dir.path().join("cache"));
    let cached = cache.open(&path, &ByteTokenizer, |_| ()).unwrap();
    let corpus = Corpus::from_file(&path).unwrap();
    let in_memory = TokenDataset::new(&corpus, &ByteTokenizer).unwrap();
    let num_documents = corpus.documents().len();
    assert_eq!(in_memory.documents().count(), num_documents);
    for fraction in [0.0, 0.3] {
        for seq_len in [32, 50] {
            let config = PackedSamplerConfig::new(seq_len);
            let packed = |set: &TokenDataset| {
                let set = set.split(fraction).unwrap().train;
                config.init(&set, |_| ()).unwrap()
            };
            let (one, other) = (packed(&in_memory), packed(&cached));
            assert_eq!(samples(&one), samples(&other));
            let found = one.stats();
            assert_eq!(found.num_documents, other.stats().num_documents);
            assert!(
                fraction > 0.0 || found.num_documents + found.num_dropped == num_documents as u64
            );
        }
    }
}

/// A data set of random documents, and the settings of a packing with a cache.
fn case(dir: &Path) -> (TokenDataset, PackedSamplerConfig, PathBuf) {
    let (set, _) = write(dir, "set", &random_documents(80), true);
    let cache = dir.join("cache").join("indices");
    let config = PackedSamplerConfig::new(64)
        .with_multiple(4)
        .with_cache(&cache);
    (TokenDataset::indexed(set, VOCAB), config, cache)
}

#[test]
fn an_epoch_reads_every_sample_once_in_its_own_order() {
    let dir = tempfile::tempdir().unwrap();
    let (set, config, cache) = case(dir.path());
    let sequential = config.init(&set, |_| ()).unwrap();
    let num_samples = sequential.num_samples();
    let written = files(&cache);
    let mut orders = BTreeSet::new();
    for (seed, number) in [(5, 0), (6, 0), (5, 1)] {
        let config = config.clone().with_shuffle(seed, number);
        // Other seeds have the same bins.
        let shuffled = config.init(&set, |event| panic!("{event:?}")).unwrap();
        for epoch in 0..2 {
            let indices = epoch * num_samples..(epoch + 1) * num_samples;
            let positions = indices.clone().map(|index| shuffled.position(index));
            let order: Vec<u64> = positions
                .map(|(at, sample)| {
                    assert_eq!(at, epoch);
                    sample
                })
                .collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..num_samples).collect::<Vec<_>>());
            let index = fastrand::u64(..num_samples);
            let expected = sequential.sample(order[index as usize]).unwrap();
            assert_eq!(shuffled.sample(indices.start + index).unwrap(), expected);
            orders.insert(order);
        }
    }
    assert_eq!(orders.len(), 6);
    assert_eq!(files(&cache), written);
    let last = sequential.sample(num_samples - 1).unwrap();
    assert_eq!(sequential.sample(2 * num_samples - 1).unwrap(), last);
}

#[test]
fn packed_samples_are_mixed_with_others() {
    let dir = tempfile::tempdir().unwrap();
    let (set, config, _) = case(dir.path());
    let packed: Arc<dyn Samples> = Arc::new(config.with_shuffle(5, 0).init(&set, |_| ()).unwrap());
    let joined: Arc<dyn Samples> = Arc::new(Sampler::shuffled_source(set, 64, 5, 1).unwrap());
    let sources = vec![packed.clone(), joined.clone()];
    let blend = BlendedSampler::new(sources.clone(), Some(&[3.0, 1.0]), 5).unwrap();
    for index in 0..50 {
        let (source, number) = blend.source_at(index);
        let sample = blend.sample(index).unwrap();
        assert_eq!(matches!(sample, Sample::Documents(_)), source == 0);
        assert_eq!(sample, sources[source].sample(number).unwrap());
    }
    assert_ne!(blend.order_hash(), 0);
    let plain = BlendedSampler::new(vec![joined.clone(); 2], None, 5).unwrap();
    assert_eq!(
        plain.order_hash(),
        0,
        "runs of earlier versions have this one"
    );
    let union = UnionSampler::new(sources, 5).unwrap();
    let is_packed = |sample: &Sample| matches!(sample, Sample::Documents(_));
    let num_packed = samples(&union)
        .iter()
        .filter(|sample| is_packed(sample))
        .count();
    assert_eq!(num_packed as u64, packed.num_samples());
    assert_eq!(
        union.num_samples(),
        packed.num_samples() + joined.num_samples()
    );
}
