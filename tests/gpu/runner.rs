//! Runs tests concurrently, each in its own process: kernels are compiled on all cores, and tests
//! cannot affect each other.

use std::{
    collections::HashSet,
    ffi::OsString,
    fs::File,
    io::Read,
    process::{Command, ExitCode, Stdio},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use libtest_mimic::Arguments;
use megaburn::cuda::libraries::{gpu_memory, num_gpus};

use crate::list::{Case, Run, cases, unknown};
use megaburn_kernel_tests::{self as kernels, part};
use megaburn_test_support::task_pool::run_all;

/// The argument before the name of a test that runs in a child process.
pub(crate) const ONE: &str = "test-of";
/// The environment variable with the number of ranks that share a GPU.
const RANKS_PER_GPU: &str = "MEGABURN_RANKS_PER_GPU";
/// GPU memory reserved for each process that computes on it.
const BYTES_PER_PROCESS: u64 = 4 << 30;
/// The time limit of a part of a test; after it, the part is killed and has failed.
const LIMIT: Duration = Duration::from_secs(400);
/// The stack size of a test's thread; autodiff walks deep graphs recursively.
const STACK_BYTES: usize = 64 << 20;

/// A finished part of a test.
struct Done {
    name: String,
    seconds: f64,
    is_ok: bool,
}

/// The number of ranks that share a GPU.
fn ranks_per_gpu() -> Result<usize, String> {
    let number = std::env::var(RANKS_PER_GPU).map_or(Ok(1), |number| number.parse());
    let number = number.ok().filter(|&number| number > 0);
    number.ok_or(format!("{RANKS_PER_GPU} is no number of ranks, 1 or more"))
}

/// Runs the test that the parent process names.
pub(crate) fn run_one(name: &str) -> ExitCode {
    use nix::sys::{prctl::set_pdeathsig, signal::Signal};
    // The test must not outlive the process that reports its result.
    if let Err(error) = set_pdeathsig(Signal::SIGKILL) {
        eprintln!("the test would outlive its parent: {error}");
    }
    let Some(case) = cases().into_iter().find(|case| case.name == name) else {
        eprintln!("error: there is no test `{name}`");
        return ExitCode::FAILURE;
    };
    let test = move || ranks_per_gpu().and_then(|ranks| case.run(ranks));
    let test = thread::Builder::new().stack_size(STACK_BYTES).spawn(test);
    match test.expect("the system can start a thread").join() {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
        // The panic message has already been printed.
        Err(_) => ExitCode::FAILURE,
    }
}

/// Runs the tests that the command line selects.
pub(crate) fn run(command: Vec<OsString>) -> ExitCode {
    match run_named(command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_named(mut command: Vec<OsString>) -> Result<bool, String> {
    let is_quick = command.iter().any(|argument| argument == "--quick");
    command.retain(|argument| argument != "--quick");
    let arguments = Arguments::from_iter(command);
    let all = cases();
    let unknown = unknown(&all);
    if !unknown.is_empty() {
        return Err(format!(
            "lists of tests name some that do not exist: {unknown:?}"
        ));
    }
    let is_named = |case: &Case| {
        let is = |text: &String| {
            if arguments.exact {
                case.name == *text
            } else {
                case.name.contains(text.as_str())
            }
        };
        arguments.filter.as_ref().is_none_or(is)
            && !arguments.skip.iter().any(is)
            && (!is_quick || case.is_quick())
    };
    let named: Vec<Case> = all.into_iter().filter(is_named).collect();
    if arguments.list {
        named
            .iter()
            .for_each(|case| println!("{}: test", case.name));
        return Ok(true);
    }
    let gpus = megaburn::cuda::start().map_err(|error| error.to_string())?;
    let most_ranks = gpus * ranks_per_gpu()?;
    let needs_cudnn = |case: &Case| case.name.starts_with(kernels::OF_CUDNN);
    let has_cudnn = named.iter().any(needs_cudnn) && kernels::has_cudnn();
    let can_run = |case: &Case| match &case.run {
        Run::Ranks(_, ranks) => *ranks <= most_ranks,
        Run::Here(_) => has_cudnn || !needs_cudnn(case),
    };
    let (named, left_out): (Vec<Case>, Vec<Case>) = named.into_iter().partition(can_run);
    left_out
        .iter()
        .for_each(|case| println!("test {} ... ignored", case.name));
    let places = arguments.test_threads.unwrap_or_else(places).max(1);
    Ok(report(&named, left_out.len(), places, arguments.nocapture))
}

/// The number of concurrent processes, limited by cores and by GPU memory.
fn places() -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let bytes: u64 = (0..num_gpus()).filter_map(gpu_memory).sum();
    cores
        .min(usize::try_from(bytes / BYTES_PER_PROCESS).unwrap_or(1))
        .max(1)
}

fn report(named: &[Case], num_left_out: usize, places: usize, all_output: bool) -> bool {
    let mut parts: Vec<(&Case, [usize; 2])> = named
        .iter()
        .flat_map(|case| {
            let parts = case.parts().min(places);
            (0..parts).map(move |part| (case, [part, parts]))
        })
        .collect();
    // Start the longest tests first.
    parts.sort_by_key(|(_, [_, parts])| std::cmp::Reverse(*parts));
    println!(
        "running {} tests in {} processes, {places} at a time",
        named.len(),
        parts.len()
    );
    let rooms: Vec<_> = parts.iter().map(|(case, _)| case.room(places)).collect();
    let started = Instant::now();
    let done = Mutex::new(Vec::new());
    let gpus = Gpus::new();
    let locked = || done.lock().expect("nothing panics here");
    run_all(places, &rooms, |index| {
        let (case, part) = parts[index];
        let begun = Instant::now();
        let gpu = matches!(case.run, Run::Here(_)).then(|| gpus.take());
        let outcome = in_a_process(case, part, gpu.map(|gpu| gpus.from(gpu)), places);
        gpu.inspect(|&gpu| gpus.give_back(gpu));
        let name = match part {
            [_, 1] => case.name.clone(),
            [part, parts] => format!("{} ({} of {parts})", case.name, part + 1),
        };
        let seconds = begun.elapsed().as_secs_f64();
        let mut done = locked();
        let (word, output) = match &outcome {
            Ok(output) => ("ok", if all_output { &output[..] } else { "" }),
            Err(output) => ("FAILED", &output[..]),
        };
        done.push(Done {
            name: name.clone(),
            seconds,
            is_ok: outcome.is_ok(),
        });
        let so_far = done.len();
        let all = parts.len();
        let elapsed = started.elapsed().as_secs();
        println!("[{elapsed:4} s {so_far:3}/{all}] test {name} ... {word} ({seconds:.1} s)");
        if !output.is_empty() {
            println!("{output}");
        }
    });
    let mut done = std::mem::take(&mut *locked());
    done.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    println!("the slowest:");
    done.iter()
        .take(10)
        .for_each(|part| println!("{:7.1} s {}", part.seconds, part.name));
    let failed: Vec<&str> = done
        .iter()
        .filter(|part| !part.is_ok)
        .map(|part| part.name.as_str())
        .collect();
    failed.iter().for_each(|name| println!("failed: {name}"));
    let test = |part: &&str| {
        part.split_once(" (")
            .map_or(*part, |(test, _)| test)
            .to_string()
    };
    let num_failed = failed.iter().map(test).collect::<HashSet<_>>().len();
    println!(
        "test result: {}. {} passed; {num_failed} failed; {num_left_out} ignored; finished in {:.1}s",
        if failed.is_empty() { "ok" } else { "FAILED" },
        named.len() - num_failed,
        started.elapsed().as_secs_f64()
    );
    failed.is_empty()
}

/// The GPUs of this process, and the number of tests on each.
struct Gpus {
    names: Vec<String>,
    taken: Mutex<Vec<usize>>,
}

impl Gpus {
    fn new() -> Self {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
        let named = visible
            .split(',')
            .filter(|name| !name.is_empty())
            .map(String::from);
        let mut names: Vec<String> = named.collect();
        if names.len() != num_gpus() {
            names = (0..num_gpus()).map(|gpu| gpu.to_string()).collect();
        }
        Self {
            taken: Mutex::new(vec![0; names.len()]),
            names,
        }
    }

    /// Takes the GPU with the fewest tests.
    fn take(&self) -> usize {
        let mut taken = self.taken.lock().expect("nothing panics here");
        let gpu = (0..taken.len()).min_by_key(|gpu| taken[*gpu]).unwrap_or(0);
        taken[gpu] += 1;
        gpu
    }

    /// The value of `CUDA_VISIBLE_DEVICES` that makes this GPU the first one.
    fn from(&self, gpu: usize) -> String {
        let others = (0..self.names.len()).map(|i| &self.names[(gpu + i) % self.names.len()][..]);
        others.collect::<Vec<_>>().join(",")
    }

    fn give_back(&self, gpu: usize) {
        self.taken.lock().expect("nothing panics here")[gpu] -= 1;
    }
}

/// Returns the output of the process; an error if the test failed or took too long.
fn in_a_process(
    case: &Case,
    [part, parts]: [usize; 2],
    gpus: Option<String>,
    places: usize,
) -> Result<String, String> {
    let why = |error: std::io::Error| format!("the test was not started: {error}");
    let exe = std::env::current_exe().map_err(why)?;
    let folder = tempfile::tempdir().map_err(why)?;
    let path = folder.path().join("output");
    let output = File::create(&path).map_err(why)?;
    let mut command = Command::new(exe);
    command.args([ONE, &case.name]).stdin(Stdio::null());
    command
        .stdout(output.try_clone().map_err(why)?)
        .stderr(output);
    command.env(part::VARIABLE, format!("{part}/{parts}"));
    if let Some(gpus) = gpus {
        command.env("CUDA_VISIBLE_DEVICES", gpus);
    }
    if std::env::var_os("RAYON_NUM_THREADS").is_none() {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        command.env("RAYON_NUM_THREADS", cores.div_ceil(places).to_string());
    }
    let mut child = command.spawn().map_err(why)?;
    let until = Instant::now() + LIMIT;
    let ended = loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => break Ok(()),
            Ok(Some(status)) => break Err(format!("it ended with {status}")),
            Ok(None) if Instant::now() < until => thread::sleep(Duration::from_millis(10)),
            ended => {
                // The process may have ended in the meantime.
                let _ = child.kill();
                let _ = child.wait();
                break Err(ended.map_or_else(
                    |error| error.to_string(),
                    |_| format!("it was ended after {} seconds", LIMIT.as_secs()),
                ));
            }
        }
    };
    let mut bytes = Vec::new();
    File::open(&path)
        .and_then(|mut file| file.read_to_end(&mut bytes))
        .map_err(why)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    match ended {
        Ok(()) => Ok(text),
        Err(why) => Err(format!("{text}{why}\n")),
    }
}
