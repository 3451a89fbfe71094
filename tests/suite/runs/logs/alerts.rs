//! Alerts.

use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use megaburn::report::{
    alerts::{AlertEvent, AlertOptions, Alerts},
    metrics::StepMetrics,
};
use megaburn_test_support::run::Run;
use serde_json::Value;

use super::super::child::Ranks;

/// A command that appends alerts to a file, and the setting of it.
fn append_to(path: &Path) -> (String, String) {
    let command = format!("cat >> {}", path.display());
    let set = format!("alerts.command={:?}", command);
    (command, set)
}

/// The alerts in a file.
fn alerts(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let parse = |line: &str| serde_json::from_str(line).unwrap();
    text.lines().map(parse).collect()
}

fn events(path: &Path) -> Vec<String> {
    let event = |alert: &Value| alert["event"].as_str().unwrap().to_string();
    alerts(path).iter().map(event).collect()
}

#[test]
fn a_command_hears_of_spikes_and_of_the_end() {
    let run = Run::new();
    let path = run.path("alerts.jsonl");
    let (_, command) = append_to(&path);
    // Random text at a learning rate of nearly nothing: the loss is noise around a constant.
    let sets = [
        command.as_str(),
        "alerts.loss_spike=1.0001",
        "optimizer.lr=1e-9",
        "optimizer.min_lr=0",
    ];
    let ended = Ranks::threads(&run.args("tp1", 60, &sets))
        .finish()
        .remove(0);
    assert!(!ended.stderr.contains("did not take"), "{ended:#?}");
    let found = alerts(&path);
    let events = events(&path);
    let (last, spikes) = events.split_last().unwrap();
    assert_eq!(last, "finish");
    assert!(
        !spikes.is_empty() && spikes.iter().all(|event| event == "spike"),
        "{events:?}"
    );
    let spike = &found[0];
    let step = &run.steps()[spike["step"].as_u64().unwrap() as usize - 1];
    assert_eq!(spike["value"].as_f64(), Some(step.loss));
    let before: f64 = run.steps()[step.step as usize - 17..step.step as usize - 1]
        .iter()
        .map(|step| step.loss / 16.0)
        .sum();
    assert!(
        (spike["mean"].as_f64().unwrap() - before).abs() < 1e-9,
        "{spike}"
    );
    let finish = found.last().unwrap();
    assert_eq!(
        (&finish["step"], &finish["start_number"]),
        (&60.into(), &1.into())
    );
    assert_eq!(finish["run"], "run");
    assert_eq!(finish["run_dir"], run.path("run").display().to_string());
    let text = finish["text"].as_str().unwrap();
    assert!(
        text.starts_with("run: finished after step 60, validation loss "),
        "{text}"
    );
}

#[test]
fn a_webhook_hears_of_numbers_that_are_not_finite_and_of_the_failure() {
    let run = Run::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!(
        "alerts.webhook=http://{}/hook",
        listener.local_addr().unwrap()
    );
    let server = thread::spawn(move || {
        let mut bodies = Vec::new();
        for client in listener.incoming().take(2) {
            let mut client = client.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"}") {
                let mut bytes = [0; 512];
                let read = client.read(&mut bytes).unwrap();
                request.extend(&bytes[..read]);
            }
            // The second one is refused, which changes nothing.
            let status = ["204 No Content", "500 Internal Server Error"][bodies.len()];
            client
                .write_all(format!("HTTP/1.1 {status}\r\n\r\n").as_bytes())
                .unwrap();
            let request = String::from_utf8(request).unwrap();
            let (_, body) = request.split_once("\r\n\r\n").unwrap();
            bodies.push(serde_json::from_str::<Value>(body).unwrap());
        }
        bodies
    });
    let large = ["optimizer.lr=1e30", "model.family=gpt2", "model.kv_heads=4"];
    let sets = [&large[..], &[url.as_str(), "data.validation_fraction=0"]].concat();
    let ended = Ranks::threads(&run.args("tp1", 20, &sets))
        .wait_all()
        .remove(0);
    assert_eq!(ended.code, Some(3), "{ended:#?}");
    let bodies = server.join().unwrap();
    assert_eq!(
        (&bodies[0]["event"], &bodies[1]["event"]),
        (&"nan".into(), &"failure".into())
    );
    assert_eq!(bodies[1]["exit_code"], 3);
    let error = bodies[1]["error"].as_str().unwrap();
    assert!(error.contains("is not finite"), "{error}");
    let refused =
        "did not take the alert `failure`: the answer is `HTTP/1.1 500 Internal Server Error`";
    assert!(ended.stderr.contains(refused), "{ended:#?}");
}

#[test]
fn a_command_that_fails_is_named_in_a_line_and_changes_nothing() {
    let run = Run::new();
    let sets = [
        "alerts.command=\"echo no such chat >&2; exit 7\"",
        "alerts.on=[\"finish\"]",
    ];
    let ended = Ranks::threads(&run.args("tp1", 2, &sets))
        .finish()
        .remove(0);
    let named: Vec<_> = ended
        .stderr
        .lines()
        .filter(|line| line.contains("alerts.command"))
        .collect();
    assert_eq!(named.len(), 1, "{ended:#?}");
    assert!(
        named[0].contains("did not take the alert `finish`: exit status: 7: no such chat"),
        "{named:?}"
    );
}

#[test]
fn a_run_stalls_once_until_it_makes_progress() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("alerts.jsonl");
    let (command, _) = append_to(&path);
    let options = AlertOptions::new(dir.path(), "1f", 1)
        .with_command(Some(command))
        .with_events(vec![AlertEvent::Stall])
        .with_limits(1.5, Duration::from_millis(100));
    let mut alerts = Alerts::start(options).unwrap();
    let wait_for = |num: usize| {
        let until = Instant::now() + Duration::from_secs(20);
        while events(&path).len() < num {
            assert!(Instant::now() < until, "{:?}", events(&path));
            thread::sleep(Duration::from_millis(5));
        }
    };
    for step in [1, 2] {
        alerts.step(&StepMetrics {
            step,
            loss: 1.0,
            ..StepMetrics::default()
        });
        wait_for(step as usize);
    }
    alerts.finish(None);
    let found = self::alerts(&path);
    assert_eq!(events(&path), ["stall", "stall"]);
    assert_eq!(
        (&found[0]["step"], &found[1]["step"]),
        (&1.into(), &2.into())
    );
    assert!(found[0]["value"].as_f64().unwrap() >= 0.1, "{found:?}");
}

#[test]
fn a_stop_on_request_is_no_alert() {
    let run = Run::new();
    let path = run.path("alerts.jsonl");
    let (_, command) = append_to(&path);
    let args = run.args("tp1", 9, &[&command, "train.exit_at_step=2"]);
    let ended = Ranks::threads(&args).wait_all().remove(0);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    assert_eq!(events(&path), Vec::<String>::new());
}
