//! Runs that lose a host and train on without it until it comes back.

use std::{fs, path::PathBuf, time::Instant};

use megaburn::collective::free_port;
use nix::sys::signal::{Signal, kill};
use rstest::rstest;
use serde_json::Value;

use super::restarts::process_of_rank;
use crate::runs::child::{PATIENCE, Ranks};
use megaburn_test_support::run::Run;

const MEGABURN: &str = env!("CARGO_BIN_EXE_megaburn-under-test");
const STEPS: u64 = 50;

/// The launchers of a job with two hosts of one rank each, on this host.
struct Hosts<'a> {
    run: &'a Run,
    ports: [String; 2],
    /// Whether each host has a folder of its own for checkpoints, and copies of the other's.
    have_folders: bool,
}

impl<'a> Hosts<'a> {
    fn new(run: &'a Run, have_folders: bool) -> Self {
        fs::create_dir(run.path("faults")).unwrap();
        let ports = [(); 2].map(|()| free_port().unwrap().to_string());
        Self {
            run,
            ports,
            have_folders,
        }
    }

    /// The folder of a host, if it has one.
    fn folder(&self, host: &str) -> Option<PathBuf> {
        let folder = self.run.path(&format!("memory/{host}"));
        self.have_folders.then_some(folder)
    }

    /// Starts the launcher of a host. The layout leaves the data-parallel size open: it follows the
    /// number of ranks.
    fn start(&self, node: &str) -> Ranks {
        self.start_layout(node, "tp1")
    }

    /// Starts the launcher of a host. Steps take some time, so that the run does not end too soon.
    fn start_layout(&self, node: &str, layout: &str) -> Ranks {
        let faults = format!("FAULT_FOLDER={}", self.run.path("faults").display());
        let host = format!("MEGABURN_HOST=host-{node}");
        let [master, agents] = &self.ports;
        let mut args = vec![
            "launch",
            "--nproc",
            "1",
            "--nnodes",
            "2",
            "--node-rank",
            node,
        ];
        args.extend(["--master-addr", "127.0.0.1", "--master-port", master]);
        args.extend(["--agent-port", agents, "--job-token", "of this test"]);
        args.extend(["--restarts", "5", "--min-nnodes", "1", "--", "env", &faults]);
        args.extend([&host, "FAULT_STEP_MS=10", MEGABURN, "train"]);
        let folder = self.folder("{host}");
        let folder = folder.map(|dir| format!("train.local_checkpoint_dir={}", dir.display()));
        let mut sets = vec![
            "train.checkpoint_interval=5",
            "train.timeout_seconds=4",
            "model.family=faulty",
        ];
        sets.extend(folder.as_deref());
        let train = self.run.args(layout, STEPS, &sets);
        args.extend(train.iter().map(String::as_str));
        Ranks::command(&args)
    }
}

/// The layout of each start in the metrics, and the step from which it continued.
fn starts(run: &Run) -> Vec<(String, u64)> {
    let text = fs::read_to_string(run.path("run/metrics.jsonl")).unwrap_or_default();
    let lines = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let start = |line: Value| {
        line.get("start")?;
        let layout = line["layout"].as_str()?.to_string();
        Some((layout, line["from_step"].as_u64()?))
    };
    lines.filter_map(start).collect()
}

/// A host is killed, or gives no sign of life any more. One that has its folder of checkpoints in memory
/// has lost it when it comes back: it gets its state from the other one.
#[rstest]
fn a_lost_host_does_not_end_the_run_and_joins_when_it_is_back(
    #[values((false, false), (true, true))] case: (bool, bool),
) {
    let (have_folders, is_silent) = case;
    let (run, undisturbed) = (Run::new(), Run::new());
    fs::copy(run.path("text.txt"), undisturbed.path("text.txt")).unwrap();
    let hosts = Hosts::new(&undisturbed, have_folders);
    let mut both = ["0", "1"].map(|node| hosts.start(node));
    both.iter_mut().for_each(|host| drop(host.finish()));

    let hosts = Hosts::new(&run, have_folders);
    let [mut first, second] = ["0", "1"].map(|node| hosts.start(node));
    first.wait_until(|| run.steps().len() >= 7);
    let process = process_of_rank(0, &run).expect("it runs");
    let lost = Instant::now();
    match is_silent {
        true => {
            let of_rank = process_of_rank(1, &run).expect("it runs");
            kill(of_rank, Signal::SIGSTOP).unwrap();
            second.signal(0, Signal::SIGSTOP);
        }
        false => second.signal(0, Signal::SIGKILL),
    }
    first.wait_until(|| starts(&run).len() == 2);
    if !is_silent {
        assert!(lost.elapsed().as_secs() < 10, "{:?}", lost.elapsed());
    }
    let before = run.steps().len();
    first.wait_until(|| run.steps().len() > before);
    drop(second);
    if let Some(folder) = hosts.folder("host-1") {
        fs::remove_dir_all(folder).unwrap();
    }
    let mut second = hosts.start("1");
    first.wait_until(|| starts(&run).len() == 3);
    assert_eq!(process_of_rank(0, &run), Some(process));
    let deadline = Instant::now() + PATIENCE;
    let [ended, of_second] = [&mut first, &mut second].map(|host| host.wait(0, deadline));
    assert_eq!(
        (ended.code, of_second.code),
        (Some(0), Some(0)),
        "{ended:?}"
    );
    for line in [
        "1 of 2 hosts train until others come",
        "2 of 2 hosts are available: the ranks save",
    ] {
        assert!(ended.stderr.contains(line), "{line}: {ended:?}");
    }
    let starts = starts(&run);
    let layouts: Vec<_> = starts.iter().map(|(layout, _)| layout.as_str()).collect();
    assert_eq!(layouts, ["dp2", "tp1", "dp2"]);
    // The third start continued from the step at which the first host stopped for it.
    assert!(starts[2].1 > starts[1].1, "{starts:?}");
    // Each step was done once, on the same samples: only the order of sums differs.
    let [found, expected] = [run.steps(), undisturbed.steps()];
    assert_eq!(found.len() as u64, STEPS);
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!((found.step, found.tokens), (expected.step, expected.tokens));
        let difference = (found.loss - expected.loss).abs();
        assert!(difference < 1e-3, "step {}: {difference}", found.step);
    }
}

#[test]
fn a_run_that_does_not_fit_on_fewer_hosts_is_refused_at_its_start() {
    let run = Run::new();
    let hosts = Hosts::new(&run, false);
    let mut both = ["0", "1"].map(|node| hosts.start_layout(node, "dp2"));
    let deadline = Instant::now() + PATIENCE;
    for host in &mut both {
        let ended = host.wait(0, deadline);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        let said = "must also fit a world size of 1";
        assert!(ended.stderr.contains(said), "{ended:?}");
    }
    assert!(run.steps().is_empty());
}
