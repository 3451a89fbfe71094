//! Checkpoints in a folder of each host: what a host fetches of the files that only others have.

use std::{fs, os::unix::fs::MetadataExt, path::PathBuf};

use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::{
    Checkpoint, NamedTensor, NeededChunks, Retention, find_latest, list_checkpoint, save,
};
use megaburn_collective::ProcessGroups;
use megaburn_mesh::{Axis, Layout, ShardSpec};
use rstest::rstest;

use crate::{
    chunks::{remove_chunks, set_chunk_bytes},
    cluster::{Cluster, flip},
    model::{Random, names, snapshot},
    zero::{CHUNK, expected, fetched_in, folders, load, save_zero, try_load},
};

#[rstest]
fn only_chunks_that_a_host_reads_and_lacks_are_sent(
    #[values(0, 1, 2, 3)] zero: u8,
    #[values(
        ("dp4", "dp4", 0), ("tp2-dp2", "tp2-dp2", 1), ("tp2-dp2", "dp4", 0), ("dp4", "tp4", 1)
    )]
    case: (&str, &str, usize),
) {
    let (saved, loaded, replicas) = case;
    let mut cluster = Cluster::new(saved, &[0, 0, 1, 2], replicas);
    save_zero(&cluster, zero, 0, 3);
    let folders = folders(&cluster, 3);
    set_chunk_bytes(&folders, CHUNK);
    let before: Vec<_> = (0..3).map(|host| cluster.ranks_on(host, 3)).collect();
    cluster.layout = loaded.parse::<Layout>().unwrap();
    let expected = expected(&cluster, zero, 3);
    if zero == 3 && saved == loaded {
        assert_eq!(expected, [0; 3], "each host reads its own files");
    } else {
        assert!(expected.iter().sum::<u64>() > 0);
    }
    assert_eq!(load(&cluster, zero), Some((3, expected.clone())));
    let after: Vec<_> = (0..3).map(|host| cluster.ranks_on(host, 3)).collect();
    assert_eq!(before, after, "no file was copied whole");
    for (folder, bytes) in folders.iter().zip(expected) {
        assert_eq!(fetched_in(folder).is_empty(), bytes == 0);
    }
    // The next start finds the chunks.
    assert_eq!(load(&cluster, zero), Some((3, vec![0; 3])));
}

/// A host that needs all of a file has all chunks, but they are no copy of the file.
#[test]
fn fetched_chunks_do_not_count_as_the_file() {
    for replicas in [0, 1] {
        let cluster = Cluster::new("dp3", &[0, 1, 2], replicas);
        save_zero(&cluster, 0, 0, 1);
        save_zero(&cluster, 0, 0, 2);
        let folders = folders(&cluster, 2);
        set_chunk_bytes(&folders, CHUNK);
        assert_eq!(load(&cluster, 0).unwrap().0, 2);
        let name = "rank-00001.safetensors";
        let whole = fs::read(folders[1].join(name)).unwrap();
        let fetched = folders[0].join(format!("{name}.fetched"));
        assert!(fs::read(&fetched).unwrap() == whole);
        for folder in &folders {
            let _ = fs::remove_file(folder.join(name));
        }
        assert_eq!(load(&cluster, 0).unwrap().0, 1, "the older one");
        let error = Checkpoint::open(&folders[0]).unwrap_err().to_string();
        assert!(error.contains("is missing"), "{error}");
    }
}

/// What a kill or a power loss during a fetch can leave, and damage.
#[test]
fn only_chunks_that_are_not_intact_are_fetched_again() {
    let cluster = Cluster::new("tp2-dp2", &[0, 0, 1, 1], 0);
    save_zero(&cluster, 1, 0, 1);
    let folders = folders(&cluster, 1);
    set_chunk_bytes(&folders, CHUNK);
    let (_, all) = load(&cluster, 1).unwrap();
    let files = fetched_in(&folders[1]);
    let file = &files[0];
    let whole = fs::read(file).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize + 8;
    let chunk = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 4;
        bytes
    };
    let mut random = Random::fresh();
    // A byte of a weight: the other chunks are holes or intact.
    let is_set = |at: &usize| whole[*at] != 0;
    let at = (header..whole.len())
        .filter(is_set)
        .nth(random.below(100) as usize)
        .unwrap();
    fs::write(file, chunk(at)).unwrap();
    let (_, again) = load(&cluster, 1).unwrap();
    assert_eq!(again[0], 0);
    assert!(
        again[1] > header as u64 && again[1] <= (header + CHUNK) as u64,
        "{again:?}"
    );
    assert!(fs::read(file).unwrap() == whole);
    let cut = random.below(whole.len() as u64) as usize;
    let torn = {
        let mut bytes = whole.clone();
        bytes[cut..].fill(0);
        bytes
    };
    let longer = [&whole[..], &[7; 10]].concat();
    for left in [
        Vec::new(),
        whole[..cut].to_vec(),
        torn,
        chunk(3),
        chunk(20),
        longer,
    ] {
        fs::write(file, left).unwrap();
        let (_, again) = load(&cluster, 1).unwrap();
        assert!(again[0] == 0 && again[1] <= all[1], "{again:?} of {all:?}");
        assert_eq!(fs::metadata(file).unwrap().len(), whole.len() as u64);
        assert_eq!(load(&cluster, 1).unwrap().1, [0, 0]);
    }
    fs::remove_file(file).unwrap();
    assert!(load(&cluster, 1).unwrap().1[1] > 0);
    assert!(fs::read(file).unwrap() == whole);
}

#[rstest]
fn a_chunk_that_is_damaged_when_it_is_sent_is_refused(#[values(0, 1)] replicas: usize) {
    let cluster = Cluster::new("dp3", &[0, 1, 2], replicas);
    save_zero(&cluster, 2, 0, 1);
    save_zero(&cluster, 2, 0, 2);
    let folders = folders(&cluster, 2);
    set_chunk_bytes(&folders, CHUNK);
    // Each host gets chunks of the file of another one, and no host has more than two files.
    let damage = |groups: &ProcessGroups| {
        if groups.world.rank() == 0 {
            for (rank, folder) in folders.iter().enumerate() {
                let path = folder.join(format!("rank-{rank:05}.safetensors"));
                let mut bytes = fs::read(&path).unwrap();
                let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize + 8;
                bytes[header..].iter_mut().for_each(|byte| *byte ^= 1);
                fs::write(path, bytes).unwrap();
            }
        }
        groups.world.barrier().unwrap();
    };
    let found = try_load(&cluster, 2, damage);
    let texts: Vec<String> = found
        .into_iter()
        .map(|rank| rank.unwrap_err().to_string())
        .collect();
    assert!(
        texts.iter().any(|text| text.contains("sent it")),
        "{texts:?}"
    );
    assert!(
        texts.iter().any(|text| text.contains("tensor `model.fc")),
        "{texts:?}"
    );
    // The next start takes the copies, or the checkpoint before.
    assert_eq!(load(&cluster, 2).unwrap().0, 1 + replicas as u64);
}

/// A damaged file is not sent, also not in part, if another host has a copy.
#[test]
fn chunks_come_from_an_intact_copy() {
    let cluster = Cluster::new("dp4", &[0, 1, 2, 3], 1);
    save_zero(&cluster, 1, 0, 1);
    let folders = folders(&cluster, 1);
    set_chunk_bytes(&folders, CHUNK);
    for (rank, folder) in folders.iter().enumerate() {
        flip(&folder.join(format!("rank-{rank:05}.safetensors")));
    }
    assert_eq!(load(&cluster, 1).unwrap().0, 1);
    assert_eq!(load(&cluster, 1), Some((1, vec![0; 4])));
}

/// The system refuses to follow a link to itself, as it refuses to read a bad block.
#[test]
fn chunks_that_cannot_be_read_are_fetched_again() {
    let cluster = Cluster::new("dp2", &[0, 1], 0);
    save_zero(&cluster, 2, 0, 1);
    let (_, all) = load(&cluster, 2).unwrap();
    for folder in folders(&cluster, 1) {
        let file = &fetched_in(&folder)[0];
        fs::remove_file(file).unwrap();
        std::os::unix::fs::symlink(file, file).unwrap();
    }
    assert_eq!(load(&cluster, 2), Some((1, all)));
    assert_eq!(load(&cluster, 2), Some((1, vec![0; 2])));
}

/// Chunks go with their checkpoint, and when the file itself comes.
#[test]
fn fetched_chunks_are_removed_when_they_are_not_needed() {
    let mut cluster = Cluster::new("dp3", &[0, 1, 2], 0);
    save_zero(&cluster, 2, 0, 1);
    load(&cluster, 2).unwrap();
    let first = folders(&cluster, 1);
    assert!(first.iter().all(|folder| fetched_in(folder).len() == 2));
    cluster.replicas = 1;
    load(&cluster, 2).unwrap();
    for (host, folder) in first.iter().enumerate() {
        assert_eq!(cluster.ranks_on(host, 1).len(), 2);
        assert_eq!(fetched_in(folder).len(), 1);
    }
    // The manifest is damaged, so the folder is set aside with the chunks in it.
    fs::write(first[2].join("manifest.json"), "{").unwrap();
    let (step, bytes) = load(&cluster, 2).unwrap();
    assert!(step == 1 && bytes[2] > 0 && fetched_in(&first[2]).len() == 1);
    save_zero(&cluster, 2, 1, 2);
    let aside = |name: &String| name.starts_with("step-00000001.damaged-");
    for host in 0..3 {
        let left = names(&cluster.folder(host));
        let left: Vec<_> = left.iter().filter(|name| !aside(name)).collect();
        assert_eq!(left, ["step-00000002"]);
    }
}

/// The user has copied the files to all hosts, so nothing has to be sent.
#[test]
fn fetched_chunks_are_removed_when_nothing_is_fetched() {
    let cluster = Cluster::new("dp2", &[0, 1], 0);
    save_zero(&cluster, 0, 0, 1);
    load(&cluster, 0).unwrap();
    let folders = folders(&cluster, 1);
    assert!(folders.iter().all(|folder| fetched_in(folder).len() == 1));
    for (from, to) in [(0, 1), (1, 0)] {
        let name = format!("rank-{from:05}.safetensors");
        fs::copy(folders[from].join(&name), folders[to].join(&name)).unwrap();
    }
    assert_eq!(load(&cluster, 0), Some((1, vec![0; 2])));
    assert!(folders.iter().all(|folder| fetched_in(folder).is_empty()));
}

/// A checkpoint of an older version has no hashes of chunks.
#[test]
fn files_without_hashes_of_chunks_are_copied_whole() {
    let cluster = Cluster::new("tp2-dp2", &[0, 1, 1, 2], 0);
    save_zero(&cluster, 1, 0, 1);
    let folders = folders(&cluster, 1);
    remove_chunks(&folders);
    assert!(load(&cluster, 1).unwrap().1.iter().all(|bytes| *bytes > 0));
    for (host, folder) in folders.iter().enumerate() {
        assert_eq!(fetched_in(folder), [""; 0].map(PathBuf::from));
        // The other rank of the same tensor-parallel group, or both, is on another host.
        assert!(cluster.ranks_on(host, 1).len() >= 2);
    }
    assert_eq!(load(&cluster, 1), Some((1, vec![0; 3])));
}

/// Moments of other ranks take no space on a host that reads only the weights.
#[test]
fn what_is_not_fetched_is_a_hole() {
    let cluster = Cluster::new("dp2", &[0, 1], 0);
    let shape = |name: &str| {
        if name == "model.w" {
            vec![16, 64]
        } else {
            vec![512, 512]
        }
    };
    let run = |is_save: bool| {
        let ranks = cluster.run(|place, groups| {
            let shards = ["model.w", "exp_avg.w"]
                .map(|name| (name, ShardSpec::whole(&shape(name), Axis::Tp, 0, 1)));
            if is_save {
                let named = shards.iter().map(|(name, shard)| {
                    let data = TensorData::full(shard.local_shape(), 1.5_f32);
                    NamedTensor::new(*name, shard, data)
                });
                save(
                    place,
                    &Retention::newest(0),
                    None,
                    groups,
                    &snapshot(1),
                    named,
                )?;
                return Ok(0);
            }
            let latest = find_latest(place, &groups.world)?;
            let mut checkpoint = latest.checkpoint.unwrap();
            let (name, shard) = &shards[0];
            let mut needed = NeededChunks::default();
            checkpoint.add_needed(&mut needed, name, shard, 0..1024);
            let bytes = checkpoint.fetch(place, &groups.world, &needed)?;
            let read = checkpoint.read(name, shard, DType::F32)?;
            assert!(
                read.as_slice::<f32>()
                    .unwrap()
                    .iter()
                    .all(|value| *value == 1.5)
            );
            Ok(bytes)
        });
        ranks.into_iter().map(Result::unwrap).sum::<u64>()
    };
    run(true);
    let bytes = run(false);
    assert!((4 << 10..8 << 10).contains(&bytes), "{bytes}");
    let mut num_files = 0;
    for folder in folders(&cluster, 1) {
        for file in fetched_in(&folder) {
            let found = fs::metadata(&file).unwrap();
            assert!(found.len() > 500 << 10, "{}", found.len());
            assert!(found.blocks() * 512 < 64 << 10, "{}", found.blocks());
            let whole = names(&folder)
                .into_iter()
                .filter(|name| !name.ends_with(".fetched"));
            let whole = whole.map(|name| fs::metadata(folder.join(name)).unwrap().len());
            let listed = list_checkpoint(&folder).num_bytes;
            assert!(listed < whole.sum::<u64>() + (64 << 10), "{listed}");
            num_files += 1;
        }
    }
    assert!(num_files > 0);
}
