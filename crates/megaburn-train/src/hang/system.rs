//! What the kernel says about processes and their threads.

use std::{fs, path::Path};

use serde::{Deserialize, Serialize};

/// The most threads that are described.
const MOST: usize = 128;

/// A thread of a rank's process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadState {
    /// Its name.
    pub name: String,
    /// Its state, in words: `runs`, `sleeps`, `is stopped` and the like.
    pub state: String,
    /// The function of the kernel in which it waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_in: Option<String>,
    /// The number of the system call that it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_call: Option<u32>,
    /// Its calls in the kernel, if the process may read them (root only).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernel_stack: Vec<String>,
}

/// The threads of this process, by their numbers.
pub(super) fn own_threads() -> Vec<ThreadState> {
    let mut numbers: Vec<u32> = fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    numbers.sort_unstable();
    numbers.truncate(MOST);
    let thread = |number: u32| thread_at(Path::new(&format!("/proc/self/task/{number}")));
    numbers.into_iter().filter_map(thread).collect()
}

/// The state of a process of this host; `None` if there is none.
pub(super) fn process_state(pid: u32) -> Option<String> {
    state_in(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn thread_at(dir: &Path) -> Option<ThreadState> {
    let read = |name: &str| {
        let text = fs::read_to_string(dir.join(name)).unwrap_or_default();
        text.trim().to_string()
    };
    let call = read("syscall");
    let stack = read("stack");
    Some(ThreadState {
        name: read("comm"),
        state: state_in(&read("stat"))?,
        waits_in: Some(read("wchan")).filter(|place| !place.is_empty() && place != "0"),
        system_call: call
            .split(' ')
            .next()
            .and_then(|number| number.parse().ok()),
        kernel_stack: stack.lines().map(call_of).collect(),
    })
}

/// The function of a line such as `[<0>] futex_wait_queue+0x64/0x90`.
fn call_of(line: &str) -> String {
    let call = line.rsplit("] ").next().unwrap_or(line);
    call.split('+').next().unwrap_or(call).to_string()
}

/// The state in a `stat` file, in words. The name of the program, in parentheses, may have any
/// character.
fn state_in(stat: &str) -> Option<String> {
    let (_, rest) = stat.rsplit_once(") ")?;
    Some(state_of(rest.chars().next()?))
}

/// Whether a state is one of a process that nothing keeps from running.
pub(super) fn is_usual(state: &str) -> bool {
    [state_of('R'), state_of('S'), state_of('Z')].contains(&state.to_string())
}

/// Whether a state is one of a process that a signal or a debugger has stopped.
pub(super) fn is_stopped(state: &str) -> bool {
    [state_of('T'), state_of('t')].contains(&state.to_string())
}

/// What a letter of the kernel means.
fn state_of(letter: char) -> String {
    match letter {
        'R' => "runs".into(),
        'S' => "sleeps".into(),
        'D' => "waits for a disk, a network file system or a driver".into(),
        'T' => "is stopped".into(),
        't' => "is stopped by a debugger".into(),
        'Z' | 'X' => "has ended".into(),
        other => format!("is in state {other}"),
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[test]
    fn a_thread_is_found_by_its_name_and_a_process_by_its_number() {
        let (end, ended) = mpsc::channel::<()>();
        let (began, begin) = mpsc::channel();
        let wait = move || {
            began.send(()).unwrap();
            let _ = ended.recv();
        };
        let waiting = thread::Builder::new()
            .name("rank-17".into())
            .spawn(wait)
            .unwrap();
        begin.recv().unwrap();
        let threads = own_threads();
        let found = threads
            .iter()
            .find(|thread| thread.name == "rank-17")
            .unwrap();
        assert!(
            ["sleeps", "runs"].contains(&found.state.as_str()),
            "{found:?}"
        );
        drop(end);
        waiting.join().unwrap();
        assert!(process_state(std::process::id()).is_some());
        assert_eq!(process_state(u32::MAX), None);
    }

    #[test]
    fn states_and_calls_are_read_from_what_the_kernel_writes() {
        assert_eq!(
            state_in("12 (a) b) T 1 12 12").as_deref(),
            Some("is stopped")
        );
        assert!(is_usual(&state_of('S')) && !is_usual(&state_of('T')));
        assert_eq!(state_in("12 (a"), None);
        assert_eq!(
            call_of("[<0>] futex_wait_queue+0x64/0x90"),
            "futex_wait_queue"
        );
    }
}
