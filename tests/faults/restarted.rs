//! A run under launchers that start it again, on one or several hosts.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    case::{Case, ENDLESS, world_size},
    check::{self, Numbers},
    job::{Job, PATIENCE, binary, megaburn, processes_of},
    kinds::free_port,
    network::Network,
    progress::Progress,
    shim,
};

/// Steps between checkpoints.
pub(crate) const INTERVAL: u64 = 5;
const TOKEN: &str = "the token of this job";

/// The launchers of a run, and the network that connects their hosts.
pub(crate) struct Restarted<'a> {
    pub(crate) case: &'a Case,
    job: JobShape,
    port: u16,
    agent_port: u16,
    launchers: Vec<Job>,
    // After the launchers: it is dropped when they have ended.
    pub(crate) network: Option<Network>,
}

/// The layout of a run and its hosts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JobShape {
    pub(crate) layout: &'static str,
    /// The number of hosts whose ranks train.
    pub(crate) num_hosts: usize,
    pub(crate) spares: usize,
    /// A pause in each loss, so that many ranks share few cores.
    pub(crate) pause_ms: u64,
    /// Whether ranks that only lost a peer restart in place.
    pub(crate) in_place: bool,
    /// Whether the others train on without a host that is lost.
    pub(crate) is_elastic: bool,
    /// Settings that this run adds to the common ones.
    pub(crate) sets: &'static [&'static str],
}

impl JobShape {
    /// The layout of the case on a random number of hosts.
    pub(crate) fn random(case: &Case) -> Self {
        let ranks = world_size(case.layout);
        let mut sizes = vec![1, 2, 4];
        sizes.retain(|hosts| ranks.is_multiple_of(*hosts));
        let num_hosts = case.one_of(&sizes);
        let spares = match num_hosts {
            1 => 0,
            _ => case.below(2) as usize,
        };
        Self {
            layout: case.layout,
            num_hosts,
            spares,
            pause_ms: 20,
            in_place: case.one_of(&[false, true]),
            is_elastic: num_hosts > 1 && case.layout.contains("dp") && case.one_of(&[false, true]),
            sets: &["train.check_replicas_interval=1"],
        }
    }
}

impl<'a> Restarted<'a> {
    /// Starts the launchers, and waits for the first steps.
    pub(crate) fn start(case: &'a Case, job: JobShape) -> Result<Self, String> {
        // Without the rights for namespaces, all hosts share the address of this one.
        let network = match job.num_hosts {
            1 => None,
            num_hosts => Network::new(num_hosts + job.spares).ok(),
        };
        fs::create_dir(case.path("faults")).map_err(|error| error.to_string())?;
        let mut run = Self {
            case,
            job,
            port: free_port(),
            agent_port: free_port(),
            launchers: Vec::new(),
            network,
        };
        for node in 0..job.num_hosts + job.spares {
            let launcher = case.start(run.command(node));
            run.launchers.push(launcher);
        }
        run.wait("the first steps", |now| now.step >= 2)?;
        Ok(run)
    }

    /// `the layout on H hosts`, for the report of a failure.
    pub(crate) fn describe(&self) -> String {
        let network = if self.network.is_some() {
            "namespaces"
        } else {
            "one address"
        };
        let restarts = match (self.job.is_elastic, self.job.in_place) {
            (true, _) => ", with fewer hosts",
            (false, true) => ", in place",
            (false, false) => "",
        };
        format!(
            "{} on {} hosts ({network}), {} spares{restarts}",
            self.job.layout, self.job.num_hosts, self.job.spares
        )
    }

    pub(crate) fn num_ranks(&self) -> usize {
        world_size(self.job.layout)
    }

    /// Whether the layout has tensor parallelism.
    pub(crate) fn has_tensor_parallel(&self) -> bool {
        self.job.layout.contains("tp")
    }

    /// Whether the ranks are started again when a lost host is back, after they have restarted without it.
    pub(crate) fn is_elastic(&self) -> bool {
        self.job.is_elastic
    }

    /// Waits until all hosts train.
    pub(crate) fn wait_for_all_hosts(&mut self) -> Result<(), String> {
        let is_whole = |now: &Progress| {
            let from = now.starts.last().map_or(0, |start| start.from_step);
            now.is_whole() && now.step > from
        };
        self.wait("all hosts train", is_whole).map(drop)
    }

    /// The file that asks a rank for a fault, or that fills the disk.
    pub(crate) fn fault_file(&self, name: &str) -> PathBuf {
        self.case.path("faults").join(name)
    }

    fn command(&self, node: usize) -> Command {
        let text = |number: usize| number.to_string();
        let mut args = vec!["launch".to_string(), "--nproc".into()];
        args.extend([text(self.num_ranks() / self.job.num_hosts)]);
        args.extend(["--restarts", "1000000"].map(String::from));
        args.extend(self.job.in_place.then(|| "--restart-in-place".into()));
        if self.job.is_elastic {
            // The number of hosts that hold a replica of the model.
            let ranks = world_size(&self.model_layout());
            let hosts = (ranks * self.job.num_hosts / self.num_ranks()).max(1);
            args.extend(["--min-nnodes".to_string(), text(hosts)]);
            args.extend(["--nnodes-per-replica".to_string(), text(hosts)]);
        }
        if self.job.num_hosts > 1 {
            let address = match &self.network {
                Some(_) => Network::address(0),
                None => "127.0.0.1".to_string(),
            };
            for (option, value) in [
                ("--nnodes", text(self.job.num_hosts)),
                ("--node-rank", text(node)),
                ("--spares", text(self.job.spares)),
                ("--master-addr", address),
                ("--master-port", self.port.to_string()),
                ("--agent-port", self.agent_port.to_string()),
            ] {
                args.extend([option.to_string(), value]);
            }
        }
        args.extend(["--".to_string(), binary().display().to_string()]);
        let layout = match self.job.is_elastic {
            true => self.model_layout(),
            false => self.job.layout.to_string(),
        };
        args.extend(self.train_args(self.case, &layout, ENDLESS));
        let mut command = megaburn(args);
        shim::add_full_disk_and_clock(
            &mut command,
            self.case,
            &self.fault_file("full"),
            &self.fault_file(&format!("clock-{node}")),
        );
        command
            .env("FAULT_FOLDER", self.case.path("faults"))
            .env("FAULT_STEP_MS", self.job.pause_ms.to_string())
            .env("FAULT_NODE", text(node))
            .env("MEGABURN_JOB_TOKEN", TOKEN);
        match &self.network {
            Some(network) => network.on_host(node, &command),
            None => command,
        }
    }

    pub(crate) fn progress(&self) -> Progress {
        Progress::of(&self.case.run())
    }

    /// Waits for progress, and returns the seconds that it took.
    pub(crate) fn wait(
        &mut self,
        what: &str,
        is_so: impl Fn(&Progress) -> bool,
    ) -> Result<f64, String> {
        let from = Instant::now();
        loop {
            let now = self.progress();
            if is_so(&now) {
                return Ok(from.elapsed().as_secs_f64());
            }
            let ended = self.launchers.iter_mut().position(|job| !job.is_running());
            let late = from.elapsed() > PATIENCE;
            if late || ended.is_some() {
                let why = match ended {
                    Some(node) => format!("the launcher of node {node} has ended"),
                    None => format!("it did not happen within {PATIENCE:?}"),
                };
                return Err(format!("{what}: {why} at {now:?}{}", self.printed()));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether a launcher has printed one of these texts.
    pub(crate) fn has_printed(&self, texts: &[&str]) -> bool {
        let says = |job: &Job| texts.iter().any(|text| job.printed().contains(text));
        self.launchers.iter().any(says)
    }

    /// What the launchers printed last.
    fn printed(&self) -> String {
        let last = |(node, job): (usize, &Job)| {
            let printed = job.printed();
            let lines: Vec<&str> = printed.lines().collect();
            let last = &lines[lines.len().saturating_sub(15)..];
            format!("\n-- node {node}:\n{}", last.join("\n"))
        };
        self.launchers.iter().enumerate().map(last).collect()
    }

    /// A random one of the ranks with which the processes were started. After restarts in place they may
    /// have others.
    pub(crate) fn some_rank(&self) -> Result<usize, String> {
        let is_there = |rank: &usize| !self.processes(&format!("RANK={rank}")).is_empty();
        let ranks: Vec<usize> = (0..self.num_ranks()).filter(is_there).collect();
        match ranks.is_empty() {
            true => Err(format!("no rank has a process{}", self.printed())),
            false => Ok(self.case.one_of(&ranks)),
        }
    }

    /// The process that was started as a rank.
    pub(crate) fn rank(&self, rank: usize) -> Result<i32, String> {
        let found = self.processes(&format!("RANK={rank}"));
        let found = found.first().copied();
        found.ok_or_else(|| format!("no process has RANK={rank}{}", self.printed()))
    }

    /// The node whose launcher started a rank.
    pub(crate) fn node_of(&self, rank: usize) -> Result<usize, String> {
        let pid = self.rank(rank)?;
        let has = |node: &usize| variables(pid).contains(&format!("FAULT_NODE={node}"));
        (0..self.launchers.len())
            .find(has)
            .ok_or_else(|| format!("rank {rank} has no FAULT_NODE"))
    }

    /// The processes of the run with a variable in their environment.
    fn processes(&self, variable: &str) -> Vec<i32> {
        let is_named = |pid: &i32| variables(*pid).iter().any(|name| name == variable);
        let mut found = processes_of(self.case.dir());
        found.retain(is_named);
        found
    }

    pub(crate) fn signal_launcher(&self, node: usize, signal: Signal) {
        self.launchers[node].signal(signal);
    }

    /// Kills the launcher of a node and all that it started.
    pub(crate) fn kill_host(&mut self, node: usize) {
        self.signal_launcher(node, Signal::SIGKILL);
        for pid in self.processes(&format!("FAULT_NODE={node}")) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }

    /// Starts the launcher of a node again, as a scheduler would.
    pub(crate) fn start_again(&mut self, node: usize) -> Result<(), String> {
        self.launchers[node].wait(PATIENCE)?;
        self.launchers[node] = self.case.start(self.command(node));
        Ok(())
    }

    /// Stops the run: it saves, all launchers end with 0, nothing is left, and each step was done
    /// once with the numbers of a run without faults.
    pub(crate) fn finish(mut self) -> Result<(), String> {
        self.signal_launcher(0, Signal::SIGTERM);
        let ended: Vec<_> = self
            .launchers
            .iter_mut()
            .map(|job| job.wait(PATIENCE))
            .collect();
        for (node, ended) in ended.into_iter().enumerate() {
            let ended = ended.and_then(|ended| ended.expect(&[0]));
            ended.map_err(|what| format!("node {node}: {what}"))?;
        }
        let found = check::numbers(&self.case.run())?;
        let steps = found.len() as u64;
        let reference = self.reference(steps)?;
        // With fewer ranks, sums have another order.
        let is_elastic = self.job.is_elastic;
        let bounds = if is_elastic {
            check::DRIFT
        } else {
            check::SAME
        };
        check::same_numbers(&found, &reference, steps, bounds)?;
        self.case.check_nothing_left()
    }

    fn train_args(&self, case: &Case, layout: &str, steps: u64) -> Vec<String> {
        let interval = format!("train.checkpoint_interval={INTERVAL}");
        let mut sets = [&["model.family=faulty", interval.as_str()], self.job.sets].concat();
        sets.extend(self.job.is_elastic.then_some("train.pad_batch=true"));
        case.train_args(layout, steps, &sets)
    }

    /// The layout without its data-parallel size, which then follows the number of ranks.
    fn model_layout(&self) -> String {
        let parts = self.job.layout.split('-');
        let parts: Vec<&str> = parts.filter(|part| !part.starts_with("dp")).collect();
        match parts.is_empty() {
            true => "tp1".to_string(),
            false => parts.join("-"),
        }
    }

    /// The numbers of at least this many steps without a fault.
    fn reference(&self, steps: u64) -> Result<Numbers, String> {
        static KNOWN: Mutex<BTreeMap<&'static str, Numbers>> = Mutex::new(BTreeMap::new());
        let mut known = KNOWN.lock().unwrap();
        if let Some(numbers) = known.get(self.job.layout)
            && numbers.len() as u64 >= steps
        {
            return Ok(numbers.clone());
        }
        let case = Case::new("reference", 0, 0);
        let mut args = self.train_args(&case, self.job.layout, steps);
        args.extend(["--set", "train.checkpoint_interval=0"].map(String::from));
        let mut command = megaburn(args);
        command.env("FAULT_FOLDER", case.path("faults"));
        let limit = PATIENCE + Duration::from_millis(200 * steps);
        case.start(command).wait(limit)?.expect(&[0])?;
        let numbers = check::numbers(&case.run())?;
        known.insert(self.job.layout, numbers.clone());
        Ok(numbers)
    }
}

/// The environment with which a process was started.
fn variables(pid: i32) -> Vec<String> {
    let environment = fs::read(Path::new("/proc").join(pid.to_string()).join("environ"));
    let environment = environment.unwrap_or_default();
    let variables = environment.split(|byte| *byte == 0);
    variables
        .map(|variable| String::from_utf8_lossy(variable).into_owned())
        .collect()
}
