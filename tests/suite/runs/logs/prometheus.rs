//! Metrics for Prometheus.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    time::{Duration, Instant},
};

use megaburn::collective::free_port;
use megaburn_test_support::run::Run;
use nix::sys::signal::Signal;

use super::{super::child::Ranks, ENDLESS};

const MEGABURN: &str = env!("CARGO_BIN_EXE_megaburn-under-test");

/// The head and the body of an answer.
fn get(port: u16, path: &str) -> Option<(String, String)> {
    let mut server = TcpStream::connect(("127.0.0.1", port)).ok()?;
    server
        .write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes())
        .unwrap();
    let mut answer = String::new();
    server.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    Some((head.to_string(), body.to_string()))
}

/// The values of a page in the text format, by name with labels. Each is of the type that a line
/// before it states.
fn values(page: &str) -> BTreeMap<String, f64> {
    let mut kinds = BTreeMap::new();
    let mut values = BTreeMap::new();
    for line in page.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert_eq!(
                kinds.insert(name.to_string(), kind),
                None,
                "{name} has one type"
            );
            continue;
        }
        let (name, value) = line.rsplit_once(' ').unwrap();
        let metric = name.split('{').next().unwrap();
        assert_eq!(
            kinds[metric] == "counter",
            metric.ends_with("_total"),
            "{line}"
        );
        values.insert(name.to_string(), value.parse().unwrap());
    }
    values
}

#[test]
fn the_last_step_is_served_while_the_run_trains() {
    let run = Run::new();
    let port = free_port().unwrap();
    let port_set = format!("log.prometheus_port={port}");
    let sets = [
        port_set.as_str(),
        "log.prometheus_host=127.0.0.1",
        "train.eval_interval=2",
        "model.family=mixtral",
    ];
    let mut ranks = Ranks::threads(&run.args("tp1", ENDLESS, &sets));
    let mut page = String::new();
    ranks.wait_until(|| {
        page = get(port, "/metrics").map_or(String::new(), |(_, body)| body);
        page.contains("megaburn_eval_loss")
    });
    let found = values(&page);
    let loss = found["megaburn_loss{run=\"run\"}"];
    let steps = found["megaburn_steps_total{run=\"run\"}"];
    let step = &run.steps()[steps as usize - 1];
    assert_eq!((step.step, step.loss), (steps as u64, loss), "{page}");
    let tokens = found["megaburn_tokens_total{run=\"run\"}"];
    assert_eq!(step.consumed_tokens, Some(tokens as u64));
    assert!(
        found.contains_key("megaburn_eval_loss{run=\"run\",data=\"\"}"),
        "{page}"
    );
    assert!(
        found.contains_key("megaburn_experts{run=\"run\",of=\"busiest/0\"}"),
        "{page}"
    );
    let (head, _) = get(port, "/metrics").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    let (head, _) = get(port, "/").unwrap();
    assert!(head.starts_with("HTTP/1.1 404"), "{head}");
    // A client that asks for nothing does not keep the next one waiting for long.
    let _silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let begin = Instant::now();
    get(port, "/metrics").unwrap();
    assert!(begin.elapsed() < Duration::from_secs(10));
    ranks.signal(0, Signal::SIGTERM);
    let ended = ranks.finish().remove(0);
    assert!(ended.stdout.contains("stopped by SIGTERM"), "{ended:#?}");
    TcpListener::bind(("127.0.0.1", port)).expect("the port is free again");
}

#[test]
fn a_port_in_use_ends_the_start_with_one_error() {
    let run = Run::new();
    let taken = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let set = format!("log.prometheus_port={port}");
    let mut args = vec!["launch", "--nproc", "2", "--", MEGABURN, "train"];
    let train = run.args("dp2", 2, &[&set]);
    args.extend(train.iter().map(String::as_str));
    let ended = Ranks::command(&args).wait_all().remove(0);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    let message =
        format!("`log.prometheus_port` is {port}: it must be a port that is free on rank");
    assert!(ended.stderr.contains(&message), "{ended:#?}");
    assert!(!run.path("run").exists(), "nothing is written");
}
