//! What the page may ask for.

use std::{fs, io::ErrorKind, path::Path};

use serde_json::{Value, json};

use crate::{
    config_keys::keys,
    http::{Request, Response},
    metrics, page,
    runs::{Runs, WatchedRun},
};

/// Answers a request:
///
/// | path | answer |
/// |---|---|
/// | `/`, `/style.css`, `/js/..` | the page |
/// | `/api/runs` | all runs, with what changes while they train |
/// | `/api/runs/N/metrics?from=BYTE&mark=M` | what `metrics.jsonl` has from that byte on |
/// | `/api/runs/N/metrics?first=STEP&last=STEP` | the points of these steps, if they are not too many |
/// | `/api/runs/N/config` | the configuration as text and by key |
/// | `/api/runs/N/pipeline.svg` | the picture of the pipeline |
pub(crate) fn answer(request: &Request, runs: &Runs) -> Response {
    if let Some(file) = page::file(&request.path) {
        return file;
    }
    let parts: Vec<&str> = request.path.split('/').skip(1).collect();
    match parts[..] {
        ["api", "runs"] => Response::json(&json!({
            "version": env!("CARGO_PKG_VERSION"),
            "runs": runs.all().iter().map(summary).collect::<Vec<_>>(),
        })),
        ["api", "runs", number, what] => {
            let number = number.parse().ok();
            match number.and_then(|number: usize| runs.all().into_iter().nth(number)) {
                Some(run) => of_run(&run, what, request),
                None => Response::error(404, "there is no such run"),
            }
        }
        _ => Response::error(404, "there is no such page"),
    }
}

fn of_run(run: &WatchedRun, what: &str, request: &Request) -> Response {
    match what {
        "metrics" => of_metrics(&run.files.metrics(&run.dir), request),
        "config" => of_config(&run.files.config(&run.dir)),
        "pipeline.svg" => match run.files.pipeline(&run.dir) {
            Ok(Some(svg)) => Response::found("image/svg+xml", svg),
            Ok(None) => Response::error(404, "the run has no pipeline"),
            Err(why) => Response::error(404, &why),
        },
        _ => Response::error(404, "there is no such page"),
    }
}

fn of_metrics(path: &Path, request: &Request) -> Response {
    let from = request.number("from").unwrap_or(0);
    let found = match (request.number("first"), request.number("last")) {
        (Some(first), Some(last)) => metrics::read_steps(path, first, last),
        _ => metrics::read_from(path, from, request.value("mark").unwrap_or_default()),
    };
    match found {
        Ok(found) => Response::json(&found),
        // A run that has not begun, or a folder that was removed.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Response::json(&metrics::nothing(from))
        }
        Err(error) => Response::error(500, &format!("cannot read `{}`: {error}", path.display())),
    }
}

fn of_config(path: &Path) -> Response {
    match fs::read_to_string(path) {
        Ok(text) => {
            let (keys, error) = match text.parse() {
                Ok(table) => (keys(&table), None),
                Err(error) => (Default::default(), Some(error.to_string())),
            };
            Response::json(&json!({
                "path": path.display().to_string(), "text": text, "keys": keys, "error": error,
            }))
        }
        Err(error) => {
            let status = if error.kind() == ErrorKind::NotFound {
                404
            } else {
                500
            };
            let why = format!("cannot read `{}`: {error}", path.display());
            Response::error(status, &why)
        }
    }
}

/// What the list of runs has of one.
fn summary(run: &WatchedRun) -> Value {
    let state = fs::read(run.files.state(&run.dir)).ok();
    let state = state.and_then(|text| serde_json::from_slice::<Value>(&text).ok());
    // A run that has ended has no process, so nothing is asked of its lock.
    let may_run = state
        .as_ref()
        .is_none_or(|state| state["state"] == "running");
    let holder = may_run.then(|| run.files.holder(&run.dir)).flatten();
    let path = run.files.metrics(&run.dir);
    let (size, file) = metrics::size_and_file(&path).unwrap_or_default();
    json!({
        "name": run.name,
        "folder": run.dir.display().to_string(),
        "exists": run.dir.is_dir(),
        "size": size,
        "file": file,
        "state": state,
        "holder": holder,
        "quiet_seconds": metrics::quiet_seconds(&path),
    })
}
