//! Checkpoints in a folder of each host: the loss of a folder, damage, kills and failures.

use std::{
    fs,
    path::{Path, PathBuf},
};

use megaburn_checkpoint::{Advance, Hosts, Place, find_latest, prepare};
use megaburn_collective::{GroupOptions, run_threads};
use rstest::rstest;

use crate::{
    cluster::{Cluster, flip},
    model::{begin_rank, names},
};

#[test]
fn each_host_has_the_files_of_its_ranks_and_copies_of_the_host_before() {
    for is_async in [false, true] {
        let cluster = Cluster::new("tp2-dp3", &[0, 0, 1, 1, 2, 2], 1);
        cluster.save(2, &[1, 2, 3], is_async);
        let kept = ["step-00000002", "step-00000003"].map(String::from);
        assert_eq!(cluster.steps(), [kept.clone(), kept.clone(), kept]);
        assert_eq!(cluster.ranks_on(0, 3), [0, 1, 4, 5]);
        assert_eq!(cluster.ranks_on(1, 3), [0, 1, 2, 3]);
        assert_eq!(cluster.ranks_on(2, 2), [2, 3, 4, 5]);
        let mut of_hosts = (0..3).map(|host| cluster.folder(host).join("step-00000003"));
        let manifest = |path: PathBuf| fs::read(path.join("manifest.json")).unwrap();
        let first = manifest(of_hosts.next().unwrap());
        assert!(of_hosts.all(|path| manifest(path) == first));
        assert_eq!(cluster.load(), (Some(3), vec![]));
    }
}

#[test]
fn a_run_continues_when_any_one_host_has_lost_its_folder() {
    for hosts in [vec![0, 0, 1, 1], vec![0, 1, 1, 2]] {
        for lost in 0..3 {
            let cluster = Cluster::new("tp2-dp2", &hosts, 1);
            if lost >= cluster.num_hosts() {
                continue;
            }
            cluster.save(0, &[5, 6], true);
            let before: Vec<_> = (0..cluster.num_hosts())
                .map(|host| cluster.ranks_on(host, 6))
                .collect();
            fs::remove_dir_all(cluster.folder(lost)).unwrap();
            assert_eq!(cluster.load(), (Some(6), vec![]));
            // The host has its files again, and those that it keeps for others.
            let after: Vec<_> = (0..cluster.num_hosts())
                .map(|host| cluster.ranks_on(host, 6))
                .collect();
            for (before, after) in before.iter().zip(&after) {
                assert!(
                    before.iter().all(|rank| after.contains(rank)),
                    "{before:?} {after:?}"
                );
            }
            // So the next host may be lost.
            fs::remove_dir_all(cluster.folder((lost + 1) % cluster.num_hosts())).unwrap();
            assert_eq!(cluster.load(), (Some(6), vec![]));
            cluster.save(1, &[7], false);
            assert_eq!(cluster.load(), (Some(7), vec![]));
        }
    }
}

#[test]
fn without_copies_a_lost_folder_is_named() {
    let cluster = Cluster::new("tp2", &[0, 1], 0);
    cluster.save(0, &[1], false);
    assert_eq!(cluster.ranks_on(0, 1), [0]);
    fs::remove_dir_all(cluster.folder(1)).unwrap();
    let why = "none of the 2 hosts has an intact `rank-00001.safetensors`";
    assert_eq!(cluster.load(), (None, vec![why.to_string()]));
    assert_eq!(names(&cluster.folder(0)), ["step-00000001"]);
}

#[test]
fn a_damaged_file_is_replaced_by_the_copy_of_another_host() {
    let cluster = Cluster::new("dp2-tp2", &[0, 0, 1, 1], 1);
    cluster.save(0, &[1, 2], false);
    let file = cluster
        .folder(1)
        .join("step-00000002/rank-00002.safetensors");
    let whole = fs::read(&file).unwrap();
    flip(&file);
    assert_eq!(cluster.load(), (Some(2), vec![]));
    assert_eq!(fs::read(&file).unwrap(), whole);
    flip(&cluster.folder(0).join("step-00000002/manifest.json"));
    assert_eq!(cluster.load(), (Some(2), vec![]));
    // The folder whose manifest was damaged is still there, under another name.
    let aside = |name: &String| name.starts_with("step-00000002.damaged-");
    assert!(names(&cluster.folder(0)).iter().any(aside));
    // With both copies damaged, the checkpoint before is used.
    for host in 0..2 {
        flip(
            &cluster
                .folder(host)
                .join("step-00000002/rank-00003.safetensors"),
        );
    }
    let (step, refused) = cluster.load();
    assert_eq!((step, refused.len()), (Some(1), 1));
    assert!(refused[0].starts_with("none of the 2 hosts has an intact `rank-00003"));
}

#[test]
fn a_kill_between_the_commits_of_two_hosts_leaves_the_newer_one() {
    for replicas in [0, 1] {
        for committed in [0, 1] {
            let cluster = Cluster::new("tp2", &[0, 1], replicas);
            cluster.save(0, &[1, 2], true);
            // The other host's folder has its temporary name and its mark still.
            let other = cluster.folder(1 - committed);
            let unfinished = other.join("step-00000002.tmp-1f-2a");
            fs::rename(other.join("step-00000002"), &unfinished).unwrap();
            let mark = "megaburn writes this folder\nfor a run, whose next start removes it\n";
            fs::write(unfinished.join(".megaburn-owner"), mark).unwrap();
            assert_eq!(cluster.load(), (Some(2), vec![]), "{replicas} {committed}");
            // Without a host that has the name, it was never complete.
            for host in 0..2 {
                let of_host = cluster.folder(host);
                let unfinished = of_host.join("step-00000002.tmp-1f-2a");
                fs::rename(of_host.join("step-00000002"), &unfinished).unwrap();
                fs::write(unfinished.join(".megaburn-owner"), mark).unwrap();
            }
            assert_eq!(cluster.load(), (Some(1), vec![]), "{replicas} {committed}");
            assert_eq!(cluster.steps(), [["step-00000001"], ["step-00000001"]]);
        }
    }
}

#[test]
fn hosts_with_another_checkpoint_of_the_step_get_the_one_of_most_hosts() {
    let cluster = Cluster::new("dp3", &[0, 1, 2], 1);
    cluster.save(0, &[4], false);
    let old = cluster.folder(1).join("step-00000004");
    let kept = cluster.dir.path().join("kept");
    fs::rename(&old, &kept).unwrap();
    // The same step from another past of the run, here under another layout.
    let other = Cluster::new("cp3", &[0, 1, 2], 1);
    other.save(0, &[4], false);
    fs::rename(other.folder(1).join("step-00000004"), &old).unwrap();
    assert_eq!(cluster.load(), (Some(4), vec![]));
    let manifest = |path: &Path| fs::read(path.join("manifest.json")).unwrap();
    assert_eq!(manifest(&old), manifest(&kept));
    let aside = |name: &String| name.starts_with("step-00000004.damaged-");
    assert!(names(&cluster.folder(1)).iter().any(aside));
}

/// Whether a copy or the manifest cannot be written on a host.
#[rstest]
#[case("rank-00001.safetensors")]
#[case("manifest.json")]
fn a_failure_on_one_host_leaves_nothing_of_the_checkpoint_on_any(#[case] file: &str) {
    let cluster = Cluster::new("tp2-dp2", &[0, 0, 1, 1], 1);
    cluster.save(0, &[1], true);
    let errors = cluster.run(|place, groups| {
        let mut save = begin_rank(place, 0, 2, groups)?;
        if groups.world.rank() == 2 {
            let unfinished = names(place.dir());
            let unfinished = unfinished.iter().find(|name| name.contains(".tmp-"));
            // The file cannot get its name.
            let path = place.dir().join(unfinished.unwrap()).join(file);
            fs::create_dir_all(path.join("full")).unwrap();
        }
        groups.world.barrier()?;
        let error = loop {
            match save.advance(groups) {
                Ok(Advance::Done) => panic!("it was saved"),
                Ok(_) => {}
                Err(error) => break error.to_string(),
            }
        };
        Ok(error)
    });
    for (rank, error) in errors.into_iter().enumerate() {
        let error = error.unwrap();
        assert!(error.contains(file), "rank {rank}: {error}");
    }
    assert_eq!(cluster.steps(), [["step-00000001"], ["step-00000001"]]);
    cluster.save(0, &[2], true);
    assert_eq!(cluster.load(), (Some(2), vec![]));
}

/// Ranks may be on more or fewer hosts at the next start, and files keep as many copies.
#[test]
fn a_run_continues_on_other_hosts() {
    let mut cluster = Cluster::new("tp2-dp2", &[0, 1, 2, 2], 1);
    cluster.save(0, &[1], false);
    for hosts in [[0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 2, 3]] {
        cluster.hosts = hosts.to_vec();
        assert_eq!(cluster.load(), (Some(1), vec![]), "{hosts:?}");
    }
    for lost in 0..4 {
        fs::remove_dir_all(cluster.folder(lost)).unwrap();
        assert_eq!(cluster.load(), (Some(1), vec![]), "without {lost}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_taken_from_another_host_or_ends_the_start() {
    use std::os::unix::fs::symlink;
    // The system refuses to follow a link to itself, which says nothing about a file.
    let spoil = |cluster: &Cluster, host: usize| {
        let file = cluster
            .folder(host)
            .join("step-00000002/rank-00001.safetensors");
        fs::remove_file(&file).unwrap();
        symlink(&file, &file).unwrap();
    };
    let cluster = Cluster::new("tp2", &[0, 1], 1);
    cluster.save(0, &[1, 2], false);
    spoil(&cluster, 1);
    assert_eq!(cluster.load(), (Some(2), vec![]));
    let file = cluster
        .folder(1)
        .join("step-00000002/rank-00001.safetensors");
    assert!(
        fs::symlink_metadata(file).unwrap().is_file(),
        "it was replaced"
    );
    for host in 0..2 {
        spoil(&cluster, host);
    }
    let found = cluster.run(|place, groups| find_latest(place, &groups.world).map(drop));
    for error in found {
        let text = error.unwrap_err().to_string();
        assert!(
            text.contains("no older checkpoint is used instead"),
            "{text}"
        );
    }
}

#[test]
fn a_folder_that_is_not_of_one_host_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let errors = |path: &(dyn Fn(usize) -> PathBuf + Sync), names: [&str; 2]| {
        let ranks = run_threads(2, GroupOptions::default(), |world| {
            let hosts = Hosts::find(&world, names[world.rank()], 1)?;
            let place = Place::of_each_host(path(world.rank()), hosts);
            prepare(&place, &world)
        });
        let texts = ranks.into_iter().map(|rank| rank.unwrap_err().to_string());
        texts.collect::<Vec<_>>()
    };
    let same = |_: usize| dir.path().join("same");
    for text in errors(&same, ["a", "b"]) {
        assert!(text.contains("is the same folder on hosts"), "{text}");
        assert!(text.contains("put {host} into the path"), "{text}");
    }
    let other = |rank: usize| {
        let path = dir.path().join(format!("other-{rank}"));
        fs::create_dir_all(&path).unwrap();
        path
    };
    for text in errors(&other, ["a", "a"]) {
        assert!(
            text.contains("rank 1 on host a does not see the folder"),
            "{text}"
        );
    }
    assert_eq!(names(&dir.path().join("same")), [""; 0]);
}
