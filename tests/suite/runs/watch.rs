//! `megaburn watch`: the page of runs, asked over HTTP as a browser does.

use std::{
    fs::{self, OpenOptions},
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    time::{Duration, Instant},
};

use megaburn::collective::free_port;
use megaburn_test_support::run::Run;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::runs::child::Ranks;

/// A server of some folders.
struct Watch {
    process: Ranks,
    port: u16,
}

impl Watch {
    fn of(folders: &[&Path]) -> Self {
        let port = free_port().unwrap();
        let number = port.to_string();
        let mut args = vec!["watch", "--port", &number];
        args.extend(folders.iter().map(|folder| folder.to_str().unwrap()));
        let mut process = Ranks::command(&args);
        process.wait_until(|| TcpStream::connect(("127.0.0.1", port)).is_ok());
        Self { process, port }
    }

    /// Sends a request; returns the status, the content type and the body.
    fn send(&self, request: &str) -> (u16, String, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let kind = head
            .split("Content-Type: ")
            .nth(1)
            .unwrap()
            .lines()
            .next()
            .unwrap();
        (status, kind.to_string(), body.to_string())
    }

    fn get(&self, path: &str) -> (u16, String, String) {
        self.send(&format!(
            "GET {path} HTTP/1.1\r\nHost: localhost:{}\r\n\r\n",
            self.port
        ))
    }

    fn json(&self, path: &str) -> Value {
        let (status, kind, body) = self.get(path);
        assert_eq!(
            (status, kind.as_str()),
            (200, "application/json"),
            "{path}: {body}"
        );
        serde_json::from_str(&body).unwrap()
    }

    /// What is new after an earlier answer.
    fn after(&self, before: &Value) -> Value {
        let mark = before["mark"].as_str().unwrap();
        self.json(&format!(
            "/api/runs/0/metrics?from={}&mark={mark}",
            before["to"]
        ))
    }
}

fn steps(metrics: &Value) -> Vec<u64> {
    let steps = metrics["series"]["loss"]["step"].as_array();
    let steps = steps.map_or(Vec::new(), |steps| steps.clone());
    steps.iter().map(|step| step.as_u64().unwrap()).collect()
}

#[test]
fn a_run_is_shown_while_it_grows() {
    let run = Run::new();
    let folder = run.path("run");
    Ranks::threads(&run.args("pp2", 3, &[])).finish();
    let watch = Watch::of(&[&folder]);

    let (status, kind, page) = watch.get("/");
    assert_eq!((status, kind.as_str()), (200, "text/html; charset=utf-8"));
    assert!(page.contains("megaburn watch"), "{page}");
    let listed = &watch.json("/api/runs")["runs"][0];
    assert_eq!(
        (&listed["name"], &listed["holder"]),
        (&json!("run"), &Value::Null)
    );
    assert_eq!(
        (&listed["state"]["state"], &listed["state"]["step"]),
        (&json!("finished"), &json!(3))
    );

    let first = watch.json("/api/runs/0/metrics");
    assert_eq!(steps(&first), [1, 2, 3]);
    let written = run.steps();
    let loss = &first["series"]["loss"];
    assert_eq!(loss["value"][2], written[2].loss);
    let tokens: u64 = written.iter().map(|step| step.tokens).sum();
    assert_eq!(loss["tokens"][2].as_f64(), Some(tokens as f64));
    assert_eq!(first["series"]["eval_loss"]["step"], json!([3]));
    let kinds = |metrics: &Value| {
        let events = metrics["events"].as_array().unwrap().clone();
        events
            .iter()
            .map(|event| event["kind"].as_str().unwrap().to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(kinds(&first), ["start", "checkpoint"]);
    assert!(
        first["events"][0]["text"]
            .as_str()
            .unwrap()
            .contains("layout pp2")
    );
    assert_eq!(first["size"], listed["size"]);

    // A resume rewrites the file, so it is read anew.
    Ranks::threads(&run.args("pp2", 6, &[])).finish();
    let second = watch.after(&first);
    assert_eq!(
        (second["reset"].as_bool(), steps(&second)),
        (Some(true), vec![1, 2, 3, 4, 5, 6])
    );
    assert_eq!(
        kinds(&second),
        ["start", "checkpoint", "resume", "checkpoint"]
    );

    let before = run.steps().iter().map(|step| step.tokens).sum::<u64>() as f64;

    // A line that is half written waits until it is whole; then only that line is sent.
    let line =
        json!({"step": 7, "loss": 1.5, "tokens": 8, "tokens_per_second": 4.0}).to_string() + "\n";
    let mut file = OpenOptions::new()
        .append(true)
        .open(folder.join("metrics.jsonl"))
        .unwrap();
    file.write_all(&line.as_bytes()[..20]).unwrap();
    let third = watch.after(&second);
    assert_eq!(
        (steps(&third), &third["to"], &third["reset"]),
        (vec![], &second["to"], &json!(false))
    );
    file.write_all(&line.as_bytes()[20..]).unwrap();
    let fourth = watch.after(&third);
    assert_eq!((steps(&fourth), &fourth["from"]), (vec![7], &third["to"]));
    assert_eq!(fourth["series"]["loss"]["tokens"], json!([before + 8.0]));
    assert_eq!(
        steps(&watch.json("/api/runs/0/metrics?first=2&last=4")),
        [2, 3, 4]
    );

    // A new run in the same folder, which is shorter.
    Ranks::threads(&[&run.args("pp2", 2, &[])[..], &["--fresh".to_string()]].concat()).finish();
    let fifth = watch.after(&fourth);
    assert_eq!(
        (fifth["reset"].as_bool(), steps(&fifth)),
        (Some(true), vec![1, 2])
    );
}

#[test]
fn configuration_and_pipeline_are_those_of_the_run() {
    let run = Run::new();
    Ranks::threads(&run.args("pp2", 1, &["optimizer.lr=0.005"])).finish();
    let watch = Watch::of(&[&run.path("run")]);
    let config = watch.json("/api/runs/0/config");
    let text = fs::read_to_string(run.path("run/config.toml")).unwrap();
    assert_eq!(config["text"], text);
    assert_eq!(
        (
            &config["keys"]["optimizer.lr"],
            &config["keys"]["parallel.pp"]
        ),
        (&json!("0.005"), &json!("2"))
    );
    let (status, kind, picture) = watch.get("/api/runs/0/pipeline.svg");
    assert_eq!((status, kind.as_str()), (200, "image/svg+xml"), "{picture}");
    assert!(
        picture.contains("1f1b: 2 ranks, 1 chunks each, 8 micro-batches"),
        "{picture}"
    );
}

#[test]
fn runs_that_begin_later_are_found_and_only_they_can_be_read() {
    let run = Run::new();
    let runs = run.path("runs");
    fs::create_dir(&runs).unwrap();
    fs::write(run.path("secret"), "hidden").unwrap();
    let mut watch = Watch::of(&[&runs, &run.path("run")]);
    assert_eq!(watch.json("/api/runs")["runs"], json!([]));
    Ranks::threads(&run.args("tp1", 1, &[])).finish();
    let first = &watch.json("/api/runs")["runs"];
    assert_eq!(
        (first.as_array().unwrap().len(), &first[0]["name"]),
        (1, &json!("run"))
    );
    fs::create_dir(runs.join("one")).unwrap();
    fs::write(runs.join("one/metrics.jsonl"), "").unwrap();
    let names = |watch: &Watch| {
        watch.json("/api/runs")["runs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|run| run["name"].as_str().unwrap().to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&watch), ["run", "one"]);
    assert_eq!(steps(&watch.json("/api/runs/1/metrics")), [0; 0]);

    assert_eq!(
        watch.get("/api/runs/0/pipeline.svg").0,
        404,
        "it has no pipeline"
    );
    let outside = [
        "/api/runs/2/metrics",
        "/api/runs/0/../secret",
        "/api/runs/0/secret",
        "/../secret",
        "/secret",
        "/api/runs/..%2f..%2fsecret/metrics",
        "//secret",
        "/js/../../Cargo.toml",
        "/api/runs/-1/config",
        "/api/runs/0/config.toml",
    ];
    for path in outside {
        let (status, _, body) = watch.get(path);
        assert_eq!(status, 404, "{path}");
        assert!(
            !body.contains("hidden") && body.starts_with("{\"error\":"),
            "{path}: {body}"
        );
    }
    assert_eq!(
        watch
            .send("POST /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
            .0,
        405
    );
    assert_eq!(
        watch.send("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n").0,
        403
    );
    assert_eq!(watch.send("nonsense\r\n\r\n").0, 400);

    watch.process.signal(0, Signal::SIGINT);
    let ended = watch
        .process
        .wait(0, Instant::now() + Duration::from_secs(20));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let port = watch.port;
    for line in [
        "there is no run in `".to_string(),
        format!("page     http://127.0.0.1:{port}/ (Ctrl-C ends it)"),
        format!("`ssh -N -L {port}:127.0.0.1:{port} "),
    ] {
        assert!(ended.stdout.contains(&line), "{ended:?}");
    }
    assert_eq!(ended.stderr, "");
}

#[test]
fn what_cannot_be_watched_is_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    fs::create_dir(at("other")).unwrap();
    fs::write(at("other/thesis.tex"), "").unwrap();
    fs::create_dir(at("runs")).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().port().to_string();
    let ends = |args: &[&str], code: i32, words: &[&str]| {
        let ended = Ranks::command(&[&["watch"], args].concat())
            .wait_all()
            .remove(0);
        assert_eq!(ended.code, Some(code), "{ended:?}");
        let lines = ended.stderr.lines().count();
        assert!(
            lines == 1 && words.iter().all(|word| ended.stderr.contains(word)),
            "{ended:?}"
        );
        assert_eq!(ended.stdout, "");
    };
    ends(
        &[&at("other")],
        2,
        &[&at("other"), "`thesis.tex`", "`run.dir`"],
    );
    ends(&[&at("other/thesis.tex")], 2, &["is a file", "`run.dir`"]);
    ends(&[&at("no/such")], 2, &["does not exist", "`run.dir`"]);
    ends(
        &[&at("runs"), "--host", "192.0.2.1"],
        2,
        &["192.0.2.1", "`--host`"],
    );
    let in_use = [
        &format!("port {taken} of 127.0.0.1 is in use")[..],
        "`--port P`",
    ];
    ends(&[&at("runs"), "--port", &taken], 1, &in_use);
}
