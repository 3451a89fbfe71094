//! The rules for hosts and for what ranks share, on facts that differ between ranks.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use megaburn::doctor::{
    Diagnosis, DoctorConfig, GpuFacts, HostFacts, LibraryFacts, Limit, RankFacts, judge,
};
use rstest::rstest;

use super::{examine, only, roomy};

/// Ranks on hosts of two, with nothing wrong.
fn facts(ranks: usize) -> Vec<RankFacts> {
    let of = |rank: usize| RankFacts {
        rank,
        host: ["a", "b"][rank / 2].into(),
        program: "0.1.0".into(),
        machine: HostFacts {
            ranks: 2,
            ..roomy()
        },
        libraries: vec![LibraryFacts {
            name: "NCCL".into(),
            version: Some("2.27.3".into()),
            file: Some("/usr/lib/libnccl.so.2".into()),
            ..LibraryFacts::default()
        }],
        gpu: Some(GpuFacts {
            index: rank % 2,
            name: "NVIDIA H100 80GB HBM3".into(),
            ..GpuFacts::default()
        }),
        clock_ahead_seconds: rank.is_multiple_of(2).then_some(0.002),
        ..RankFacts::default()
    };
    (0..ranks).map(of).collect()
}

fn with(change: impl Fn(&mut RankFacts)) -> Diagnosis {
    let mut facts = facts(4);
    change(&mut facts[2]);
    judge(facts)
}

#[test]
fn ranks_that_are_alike_have_no_findings() {
    let diagnosis = with(|_| {});
    assert!(diagnosis.is_well, "{diagnosis}");
    let text = diagnosis.to_string();
    assert!(
        text.starts_with("ranks    4 ranks: a (ranks 0-1), b (ranks 2-3)\n"),
        "{text}"
    );
    assert!(
        text.contains("2 hosts within 2.0 ms of each other"),
        "{text}"
    );
    assert!(
        text.contains("NCCL 2.27.3 (/usr/lib/libnccl.so.2)"),
        "{text}"
    );
}

#[rstest]
#[case("program", |rank: &mut RankFacts| rank.program = "0.2.0".into(), "0.1.0 on ranks 0-1, 3, 0.2.0 on rank 2")]
#[case("libraries", |rank: &mut RankFacts| rank.libraries[0].version = Some("2.26.2".into()), "NCCL 2.27.3 on ranks 0-1, 3, 2.26.2 on rank 2")]
#[case("libraries", |rank: &mut RankFacts| {
    rank.libraries[0].version = None;
    rank.libraries[0].error = Some("install NCCL".into());
}, "NCCL on ranks 2")]
#[case("clock", |rank: &mut RankFacts| rank.clock_ahead_seconds = Some(-3.5), "host b is 3.50 s behind host a")]
#[case("environment", |rank: &mut RankFacts| drop(rank.machine.environment.insert("NCCL_IB_HCA".into(), "mlx5".into())), "NCCL_IB_HCA is not set on ranks 0-1, 3, \"mlx5\" on rank 2")]
#[case("open files", |rank: &mut RankFacts| rank.machine.open_files = Some(Limit::Of(256)), "256 at most on host b")]
#[case("locked memory", |rank: &mut RankFacts| rank.machine.locked_bytes = Some(Limit::Of(8 << 20)), "8.0 MiB at most on host b")]
#[case("shared memory", |rank: &mut RankFacts| rank.machine.shm_free_bytes = Some(60 << 20), "60.0 MiB of 32.0 GiB free in /dev/shm on host b")]
#[case("memory", |rank: &mut RankFacts| rank.machine.available_bytes = Some(1 << 30), "1.0 GiB of 64.0 GiB available on host b")]
#[case("threads", |rank: &mut RankFacts| rank.machine.rayon_threads = Some("16".into()), "16 cores on host b for 2 ranks, RAYON_NUM_THREADS=16 for each")]
#[case("threads", |rank: &mut RankFacts| rank.machine.rayon_threads = Some("all".into()), "RAYON_NUM_THREADS=all")]
fn what_differs_or_is_short_is_one_finding(
    #[case] check: &str,
    #[case] change: fn(&mut RankFacts),
    #[case] value: &str,
) {
    let diagnosis = with(change);
    let found = only(&diagnosis, check);
    assert!(found.value.contains(value), "{diagnosis}");
}

#[test]
fn a_variable_that_slows_everything_is_a_finding_even_if_all_have_it() {
    let mut facts = facts(4);
    for rank in &mut facts {
        let environment = &mut rank.machine.environment;
        environment.insert("CUDA_LAUNCH_BLOCKING".into(), "1".into());
        environment.insert("NCCL_P2P_DISABLE".into(), "1".into());
    }
    let diagnosis = judge(facts);
    only(&diagnosis, "environment");
    assert!(
        diagnosis
            .to_string()
            .contains("note     environment   NCCL_P2P_DISABLE")
    );
}

#[test]
fn an_xid_is_attributed_to_the_gpu_at_its_address() {
    let diagnosis = with(|rank| {
        rank.machine.xids = Some([("0000:1b:00".to_string(), [79].into())].into());
        if let Some(gpu) = &mut rank.gpu {
            gpu.pci_address = Some("0000:1B:00.0".into());
        }
    });
    let found = only(&diagnosis, "xid");
    assert!(
        found
            .value
            .contains("rank 2 (host b, GPU 0): the driver logged Xid 79")
    );
}

fn examine_folder(ranks: usize, folder: impl Fn(usize) -> std::path::PathBuf + Sync) -> Diagnosis {
    examine(ranks, |rank| {
        let config = DoctorConfig::new().with_host(format!("h{rank}"));
        (config.with_folder(folder(rank)), None)
    })
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

#[test]
fn a_shared_folder_is_left_as_it_was_found() {
    let folder = tempfile::tempdir().unwrap();
    // A run would make the folders below.
    let diagnosis = examine_folder(3, |_| folder.path().join("runs/a"));
    let text = diagnosis.to_string();
    assert!(
        text.contains("is shared by all ranks: 1 MiB written"),
        "{text}"
    );
    assert!(is_empty(folder.path()));
}

#[test]
fn a_folder_that_is_another_one_on_some_host_is_named() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let diagnosis = examine_folder(3, |rank| folders[rank / 2].path().into());
    let found: Vec<_> = diagnosis
        .findings()
        .filter(|found| found.check == "folder")
        .collect();
    assert_eq!(found.len(), 1, "{diagnosis}");
    assert!(
        found[0]
            .value
            .starts_with("rank 2 (host h2) does not see in "),
        "{diagnosis}"
    );
    assert!(folders.iter().all(|folder| is_empty(folder.path())));
}

#[test]
fn a_folder_that_cannot_be_written_is_a_finding() {
    let folder = tempfile::tempdir().unwrap();
    let readonly = folder.path().join("file/below");
    fs::write(folder.path().join("file"), "").unwrap();
    // The nearest that exists is a file, which also root cannot write into.
    let diagnosis = examine_folder(2, |_| readonly.clone());
    let found: Vec<_> = diagnosis.findings().map(|found| &found.value).collect();
    assert!(
        found
            .iter()
            .any(|value| value.contains("rank 0 (host h0): cannot make a folder in")),
        "{diagnosis}"
    );
    // Root may write into a folder without that permission, so this is only for other users.
    let mode = fs::Permissions::from_mode(0o500);
    fs::set_permissions(folder.path(), mode).unwrap();
    if fs::write(folder.path().join("probe"), "").is_err() {
        let diagnosis = examine_folder(2, |_| folder.path().into());
        assert!(!diagnosis.is_well, "{diagnosis}");
    }
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
}

/// A small tmpfs in a mount namespace of its own; skipped where the system refuses one.
#[test]
fn a_full_file_system_is_a_finding() {
    let program = env!("CARGO_BIN_EXE_megaburn-under-test");
    let script = format!(
        "set -e\ndir=$(mktemp -d)\nmount -t tmpfs -o size=512k doctor-test $dir || exit 77\n\
         {program} doctor --quick --folder $dir\n"
    );
    let ended = std::process::Command::new("unshare")
        .args(["--mount", "sh", "-c", &script])
        .env("RAYON_NUM_THREADS", "1")
        .output();
    let Ok(ended) = ended else { return };
    let text = String::from_utf8_lossy(&ended.stdout);
    if !text.contains("result ") {
        let why = String::from_utf8_lossy(&ended.stderr);
        eprintln!("skipped: no mount namespace: {why}");
        return;
    }
    assert_eq!(ended.status.code(), Some(1), "{text}");
    assert!(text.contains("No space left on device"), "{text}");
    assert!(text.contains("free in /tmp"), "{text}");
}
