//! Jobs of several hosts, played by launchers on this one, that are started again.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use libtest_mimic::Failed;
use nix::sys::signal::Signal;

use super::run::{self, End, Run};

/// How long a job with a restart may take: a silent host is lost after ten seconds.
const LIMIT: Duration = Duration::from_secs(40);

/// The ports of a job, and the variables of its launchers.
struct Job {
    master: String,
    agents: String,
    spares: &'static str,
}

impl Job {
    fn new(spares: &'static str) -> Self {
        let free = || TcpListener::bind("127.0.0.1:0").unwrap();
        let listeners = [free(), free()];
        let [master, agents] =
            listeners.map(|listener| listener.local_addr().unwrap().port().to_string());
        Self {
            master,
            agents,
            spares,
        }
    }

    /// The launcher of a host with one rank, in a mode.
    fn host(&self, node: &str, mode: &str) -> Run {
        self.host_with(node, mode, "3")
    }

    fn host_with(&self, node: &str, mode: &str, restarts: &str) -> Run {
        let this = std::env::current_exe().unwrap();
        let command = [this.to_str().unwrap(), "rank", mode];
        let variables = [
            ("TEST_NODE", node),
            ("TEST_PORT", &self.master),
            ("TEST_AGENT_PORT", &self.agents),
            ("TEST_SPARES", self.spares),
            ("TEST_RESTARTS", restarts),
            ("MEGABURN_JOB_TOKEN", "the token of this job"),
        ];
        Run::launch(1, &command, &variables)
    }
}

fn has_line(lines: &[String], text: &str) -> bool {
    lines.iter().any(|line| line.contains(text))
}

/// Panics unless the launcher's rank computed the sum over both ranks.
fn assert_sum(end: &End) {
    assert_eq!(end.code, Some(0), "{end:?}");
    assert!(has_line(&end.out, "sum 3"), "{end:?}");
}

pub(crate) fn killed_rank() -> Result<(), Failed> {
    let job = Job::new("0");
    let mut hosts = ["0", "1"].map(|node| job.host(node, "again"));
    let pids: Vec<_> = hosts.iter_mut().map(|host| host.pids()[0]).collect();
    run::signal(pids[1], Signal::SIGKILL);
    for host in hosts {
        let end = host.end(LIMIT);
        assert_sum(&end);
        for text in ["rank 1 was killed by SIGKILL", "restart 1 of 3"] {
            assert!(has_line(&end.err, text), "{text}: {end:?}");
        }
        let cause = "cause rank 1 was killed by SIGKILL on node 1 (host ";
        assert!(has_line(&end.out, cause), "{end:?}");
    }
    run::assert_gone(&pids);
    Ok(())
}

pub(crate) fn lost_host() -> Result<(), Failed> {
    let job = Job::new("1");
    let [mut first, mut second, spare] = ["0", "1", "2"].map(|node| job.host(node, "again"));
    let pids = [first.pids()[0], second.pids()[0]];
    second.signal(Signal::SIGKILL);
    let end = first.end(LIMIT);
    assert_sum(&end);
    for text in ["node 1 (host", "runs the ranks of node 1"] {
        assert!(has_line(&end.err, text), "{text}: {end:?}");
    }
    let cause = "cause rank 1 was lost with its host, node 1 (host ";
    assert!(has_line(&end.out, cause), "{end:?}");
    assert_sum(&spare.end(LIMIT));
    run::assert_gone(&pids);
    Ok(())
}

pub(crate) fn repeated_failure() -> Result<(), Failed> {
    let job = Job::new("1");
    let [first, second, spare] = ["0", "1", "2"].map(|node| job.host(node, "node"));
    for host in [first, spare] {
        let end = host.end(LIMIT);
        assert_sum(&end);
        assert!(has_line(&end.err, "restart 2 of 3"), "{end:?}");
    }
    assert_eq!(second.end(LIMIT).code, Some(0));
    Ok(())
}

/// Launchers meet for the order of hosts, although nothing is started again.
pub(crate) fn topology() -> Result<(), Failed> {
    let order = "hosts in the order of the network: node ranks 0, 2, 1, 3";
    let part = "only 3 of 4 hosts say where they are in the network";
    let cases = [
        (["s1/a", "s1/b", "s1/a", "s1/b"], "0", [0, 2, 1, 3], order),
        // Only a path makes launchers meet, so the one without it has restarts.
        (["a", "b", "a", ""], "1", [0, 1, 2, 3], part),
    ];
    let jobs = cases.map(|(paths, restarts, ranks, said)| {
        let job = Job::new("0");
        let hosts = [0, 1, 2, 3].map(|node: usize| {
            let variables = [
                ("TEST_NODE", &*node.to_string()),
                ("TEST_NODES", "4"),
                ("TEST_PORT", &job.master),
                ("TEST_AGENT_PORT", &job.agents),
                ("TEST_RESTARTS", restarts),
                ("TEST_TOPOLOGY", paths[node]),
                ("MEGABURN_JOB_TOKEN", "the token of this job"),
            ];
            let script = "echo node $TEST_NODE is rank $RANK of $WORLD_SIZE";
            Run::launch(1, &["sh", "-c", script], &variables)
        });
        (hosts, ranks, said)
    });
    for (hosts, ranks, said) in jobs {
        for ((node, host), rank) in hosts.into_iter().enumerate().zip(ranks) {
            let end = host.end(LIMIT);
            assert_eq!(end.code, Some(0), "{end:?}");
            let line = format!("node {node} is rank {rank} of 4");
            assert!(has_line(&end.out, &line), "{end:?}");
            assert!(has_line(&end.err, said), "{end:?}");
        }
    }
    Ok(())
}

/// What spares do while others run ranks does not concern these.
pub(crate) fn spares_come_and_go() -> Result<(), Failed> {
    let job = Job::new("2");
    let [mut first, mut second] = ["0", "1"].map(|node| job.host(node, "patient"));
    let pids = [first.pids()[0], second.pids()[0]];
    let mut killed = job.host("2", "patient");
    killed.await_line("node 2 (host");
    killed.signal(Signal::SIGKILL);
    first.await_line("node 2 (host");
    let mut stopped = job.host("3", "patient");
    stopped.await_line("node 3 (host");
    stopped.signal(Signal::SIGTERM);
    assert_eq!(stopped.end(LIMIT).code, Some(143));
    // Longer than a launcher waits for its ranks before it ends them.
    thread::sleep(Duration::from_secs(3));
    second.signal(Signal::SIGTERM);
    first.signal(Signal::SIGTERM);
    for host in [first, second] {
        let end = host.end(LIMIT);
        assert_eq!(end.code, Some(0), "{end:?}");
        assert!(has_line(&end.out, "saved"), "{end:?}");
        assert!(!has_line(&end.err, "restart 1"), "{end:?}");
    }
    run::assert_gone(&pids);
    Ok(())
}

/// A launcher of node 0 that is started again continues the launch: its ranks know that they are not
/// the first.
pub(crate) fn coordinator_again() -> Result<(), Failed> {
    let job = Job::new("0");
    let [mut first, mut second] = ["0", "1"].map(|node| job.host(node, "again"));
    let pids = [first.pids()[0], second.pids()[0]];
    first.signal(Signal::SIGKILL);
    run::assert_gone(&pids[..1]);
    second.await_line("lost the launcher of node 0");
    assert_sum(&job.host("0", "again").end(LIMIT));
    let end = second.end(LIMIT);
    assert_sum(&end);
    let cause = "cause the launcher of node 0 was lost";
    assert!(has_line(&end.out, cause), "{end:?}");
    run::assert_gone(&pids);
    Ok(())
}

/// A signal before all hosts are there ends the launchers that are.
pub(crate) fn stopped_before_the_start() -> Result<(), Failed> {
    let job = Job::new("1");
    let first = job.host("0", "again");
    let mut spare = job.host("2", "again");
    spare.await_line("node 2 (host");
    first.signal(Signal::SIGTERM);
    for host in [first, spare] {
        let end = host.end(LIMIT);
        assert_eq!(end.code, Some(143), "{end:?}");
        assert!(has_line(&end.err, "stopped by SIGTERM"), "{end:?}");
    }
    Ok(())
}

pub(crate) fn other_options() -> Result<(), Failed> {
    let job = Job::new("0");
    let mut first = job.host("0", "again");
    let end = job.host_with("1", "again", "9").end(LIMIT);
    assert_eq!(end.code, Some(2), "{end:?}");
    assert!(
        has_line(&end.err, "`--restarts` is 9 there and 3"),
        "{end:?}"
    );
    // The job waits for the right one.
    let mut second = job.host("1", "again");
    let pids = [first.pids()[0], second.pids()[0]];
    run::signal(pids[0], Signal::SIGKILL);
    assert_sum(&first.end(LIMIT));
    assert_sum(&second.end(LIMIT));
    Ok(())
}

/// A caller at the port of the launchers that does not show the token hears nothing of the job, and
/// changes nothing.
pub(crate) fn stranger() -> Result<(), Failed> {
    let job = Job::new("0");
    let mut first = job.host("0", "patient");
    let shape =
        "{\"nnodes\":2,\"nproc\":1,\"spares\":0,\"restarts\":9,\"restart_window_seconds\":null}";
    let hello = |token: &str| {
        format!(
            "{{\"token\":{{\"text\":\"{token}\"}},\"node\":1,\"host\":\"h\",\"shape\":{shape},\
            \"launcher\":\"77\",\"started\":null}}\n"
        )
    };
    let words = [
        hello(""),
        hello("another"),
        "{\"node\":1}\n".into(),
        "\"Beat\"\n".into(),
        "GET / HTTP/1.1\r\n\r\n".into(),
    ];
    for words in &words {
        let heard = call(&job.agents, words);
        let is_refusal = heard.contains("another job token");
        assert!(heard.is_empty() || is_refusal, "{words:?}: {heard:?}");
        assert!(
            is_refusal || !words.contains("launcher"),
            "{words:?}: {heard:?}"
        );
    }
    // With the token, the same message is one of a launcher with other options.
    let right = call(&job.agents, &hello("the token of this job"));
    assert!(right.contains("`--restarts` is 9 there"), "{right:?}");
    let mut second = job.host("1", "patient");
    let pids = [first.pids()[0], second.pids()[0]];
    for host in [&first, &second] {
        host.signal(Signal::SIGTERM);
    }
    for host in [first, second] {
        assert_eq!(host.end(LIMIT).code, Some(0));
    }
    run::assert_gone(&pids);
    Ok(())
}

/// Sends a message to a port, and returns what it answers until it hangs up, or within a second.
fn call(port: &str, words: &str) -> String {
    let address = format!("127.0.0.1:{port}");
    let until = Instant::now() + Duration::from_secs(10);
    let mut stream = loop {
        match TcpStream::connect(&address) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        thread::sleep(Duration::from_millis(20));
    };
    stream
        .set_read_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    stream.write_all(words.as_bytes()).unwrap();
    let mut heard = Vec::new();
    // The other side may reset the connection, or wait for more.
    let _ = stream.read_to_end(&mut heard);
    String::from_utf8_lossy(&heard).into_owned()
}

pub(crate) fn lost_coordinator() -> Result<(), Failed> {
    let job = Job::new("0");
    let [mut first, mut second] = ["0", "1"].map(|node| job.host(node, "again"));
    let pids = [first.pids()[0], second.pids()[0]];
    first.signal(Signal::SIGKILL);
    let end = second.end(LIMIT);
    assert_eq!(end.code, Some(1), "{end:?}");
    for text in ["lost the launcher of node 0", "no answer for 8 s"] {
        assert!(has_line(&end.err, text), "{text}: {end:?}");
    }
    run::assert_gone(&pids);
    Ok(())
}
