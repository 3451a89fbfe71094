//! The plot of the loss, drawn while the run trains.

use std::{
    path::PathBuf,
    sync::Arc,
    thread::{self, JoinHandle},
};

use megaburn_report::{loss_plot, metrics::read_metrics};

use crate::{
    error::TrainError,
    run_folder::{
        RunFolder,
        names::{METRICS, PICTURE},
    },
};

/// The thread that plots the loss, so that no step waits for it.
#[derive(Debug, Default)]
pub(super) struct Picture(Option<JoinHandle<()>>);

impl Picture {
    /// Starts to plot the metrics so far, unless an earlier plot is not done yet: then the next one
    /// shows them.
    pub(super) fn start(&mut self, folder: &Arc<RunFolder>) {
        if self
            .0
            .as_ref()
            .is_some_and(|drawing| !drawing.is_finished())
        {
            return;
        }
        self.wait();
        let folder = folder.clone();
        let work = move || drop(draw(&folder));
        match thread::Builder::new().name("picture".into()).spawn(work) {
            Ok(drawing) => self.0 = Some(drawing),
            Err(error) => tracing::warn!("cannot draw the loss: {error}"),
        }
    }

    /// Plots all metrics and returns the path of the plot. A failure is only a warning.
    pub(super) fn finish(&mut self, folder: &RunFolder) -> Option<PathBuf> {
        self.wait();
        draw(folder)
    }

    fn wait(&mut self) {
        // A panic there has been printed; it must not end the run.
        let _ = self.0.take().map(JoinHandle::join);
    }
}

impl Drop for Picture {
    /// The thread uses the folder, which another run may take when this one has ended.
    fn drop(&mut self) {
        self.wait();
    }
}

fn draw(folder: &RunFolder) -> Option<PathBuf> {
    let dir = folder.path();
    let draw = || -> Result<(), TrainError> {
        let records = read_metrics(dir.join(METRICS))?;
        let title = dir.file_name().unwrap_or_default().to_string_lossy();
        folder.write(PICTURE, loss_plot(&title, &records)?.as_bytes())
    };
    let warn = |error| tracing::warn!("cannot draw the loss: {error}");
    draw().map_err(warn).ok().map(|()| dir.join(PICTURE))
}
