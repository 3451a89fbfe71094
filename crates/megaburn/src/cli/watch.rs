//! `megaburn watch`: a page that shows runs while they train.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::Arc,
};

use clap::Args;
use megaburn_collective::host_name;
use megaburn_pipeline::{Costs, Links, ScheduleConfig, draw};
use megaburn_train::{ConfigLayers, Exit, RunInfo, RunPaths, TrainError};
use megaburn_watch::{Found, RunFiles, Runs, Server, WatchError};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
};

use super::{fail, print};

#[derive(Args)]
pub(super) struct WatchArgs {
    /// Folders of runs (`run.dir`), or folders that hold folders of runs. Runs that begin there
    /// later are shown too.
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Port of the page; with 0 any free one.
    #[arg(long, value_name = "P", default_value_t = 6070)]
    port: u16,
    /// Address to listen on. The page has no password: whoever reaches another address than the
    /// default sees the runs.
    #[arg(long, value_name = "A", default_value = "127.0.0.1")]
    host: String,
    /// Also open the page in a browser on this host.
    #[arg(long)]
    open: bool,
}

impl WatchArgs {
    /// Serves the page until SIGINT or SIGTERM.
    pub(super) fn run(self) -> ExitCode {
        match self.serve() {
            Ok(()) => Exit::Done.into(),
            Err((error, exit)) => fail(&error, exit),
        }
    }

    fn serve(self) -> Result<(), (String, Exit)> {
        let failed = |error: WatchError| {
            let exit = match error.is_bad_input() {
                true => Exit::BadInput,
                false => Exit::Failed,
            };
            (error.to_string(), exit)
        };
        let no_signals = |source| {
            let error = TrainError::Signals { source };
            (error.to_string(), error.exit())
        };
        let runs = Runs::new(self.runs, Arc::new(TrainedRuns)).map_err(failed)?;
        let found = runs.found().map_err(failed)?;
        let server = Server::bind(&self.host, self.port, runs).map_err(failed)?;
        let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(no_signals)?;
        let address = server.address();
        let server = match address.ip().is_unspecified() {
            true => server.with_name(host_name()),
            false => server,
        };
        server.spawn().map_err(failed)?;

        for (path, found) in found {
            print::note(describe(&path, found));
        }
        let url = format!("http://{}/", authority(address.ip(), address.port()));
        print::note(format!("page     {url} (Ctrl-C ends it)"));
        print::note(format!("ssh      {}", tunnel(address.ip(), address.port())));
        if !address.ip().is_loopback() {
            print::note(
                "note     the page has no password: whoever reaches this address sees the runs",
            );
        }
        if self.open {
            open(&url);
        }
        // The server's threads end with the process.
        signals.forever().next();
        Ok(())
    }
}

/// The runs that `megaburn train` makes.
struct TrainedRuns;

impl RunFiles for TrainedRuns {
    fn metrics(&self, run: &Path) -> PathBuf {
        RunPaths::of(run).metrics
    }

    fn state(&self, run: &Path) -> PathBuf {
        RunPaths::of(run).state
    }

    fn config(&self, run: &Path) -> PathBuf {
        RunPaths::of(run).config
    }

    fn is_run(&self, folder: &Path) -> bool {
        let has_marker = matches!(RunInfo::read(folder), Ok(Some(_)));
        has_marker || self.metrics(folder).is_file()
    }

    fn holder(&self, run: &Path) -> Option<String> {
        RunInfo::read(run).ok()??.holder
    }

    fn pipeline(&self, run: &Path) -> Result<Option<String>, String> {
        let why = |error: &dyn std::error::Error| error.to_string();
        let layers = ConfigLayers::new().with_run(&run.display().to_string());
        let config = layers
            .and_then(ConfigLayers::load)
            .map_err(|error| why(&error))?;
        let layout = config.layout(None).map_err(|error| why(&error))?;
        match config
            .pipeline_schedule(&layout)
            .map_err(|error| why(&error))?
        {
            Some(schedule) => picture(&schedule).map(Some),
            None => Ok(None),
        }
    }
}

fn picture(schedule: &ScheduleConfig) -> Result<String, String> {
    let schedule = schedule.build().map_err(|error| error.to_string())?;
    let costs = vec![Costs::UNIT; schedule.stages.num_ranks];
    let timing = schedule.simulate(&costs, Links::PrePosted);
    let timing = timing.map_err(|error| error.to_string())?;
    Ok(draw::svg(&schedule, &timing))
}

/// What was found in a folder, in a line.
fn describe(path: &Path, found: Found) -> String {
    let path = path.display();
    match found {
        Found::Run => format!("run      {path}"),
        Found::EmptyRun => {
            format!(
                "note     the run in `{path}` has no steps so far: they appear when there are some"
            )
        }
        Found::Folder(1) => format!("runs     1 in {path}"),
        Found::Folder(runs) => format!("runs     {runs} in {path}"),
        Found::Nothing => {
            format!("note     there is no run in `{path}` so far: it appears when it begins")
        }
    }
}

/// Host and port of a URL on this host.
fn authority(ip: IpAddr, port: u16) -> String {
    match ip {
        ip if ip.is_unspecified() => format!("{}:{port}", host_name()),
        IpAddr::V6(ip) => format!("[{ip}]:{port}"),
        IpAddr::V4(ip) => format!("{ip}:{port}"),
    }
}

/// The command that makes the page reachable from another computer.
fn tunnel(ip: IpAddr, port: u16) -> String {
    let target = match ip {
        ip if ip.is_unspecified() => "127.0.0.1".to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
        IpAddr::V4(ip) => ip.to_string(),
    };
    let user = std::env::var("USER").map_or(String::new(), |user| format!("{user}@"));
    format!(
        "from another computer: `ssh -N -L {port}:{target}:{port} {user}{}`, then \
        http://localhost:{port}/ there",
        host_name()
    )
}

/// Opens the page in a browser. A host without one is only a note.
fn open(url: &str) {
    let program = if cfg!(target_os = "macos") {
        "open"
    } else {
        "xdg-open"
    };
    let mut command = Command::new(program);
    command
        .arg(url)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    if let Err(error) = command.spawn() {
        print::note(format!(
            "note     no browser was opened, because {program} cannot be started: {error}"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_as_a_browser_and_ssh_take_them() {
        let [v4, v6, all] = ["127.0.0.1", "::1", "0.0.0.0"].map(|ip| ip.parse().unwrap());
        assert_eq!(authority(v4, 6070), "127.0.0.1:6070");
        assert_eq!(authority(v6, 6070), "[::1]:6070");
        assert_eq!(authority(all, 6070), format!("{}:6070", host_name()));
        assert!(tunnel(v6, 7).starts_with("from another computer: `ssh -N -L 7:[::1]:7 "));
        assert!(tunnel(all, 7).contains(" 7:127.0.0.1:7 "));
    }
}
