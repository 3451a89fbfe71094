use std::path::{Path, PathBuf};

/// Which files in the folder of a run say what. All methods only read.
pub trait RunFiles: Send + Sync {
    /// The file of measurements: a JSON object a line, of which a training step has `step` and
    /// `loss`.
    fn metrics(&self, run: &Path) -> PathBuf;

    /// The file that says whether the run is running, stopped, finished or failed, as a JSON
    /// object.
    fn state(&self, run: &Path) -> PathBuf;

    /// The file with the run's configuration, as TOML.
    fn config(&self, run: &Path) -> PathBuf;

    /// Whether a folder is a run's.
    fn is_run(&self, folder: &Path) -> bool {
        self.metrics(folder).is_file()
    }

    /// The process in which the run is in progress; `None` if it is not in progress, or if that is
    /// not known.
    fn holder(&self, _run: &Path) -> Option<String> {
        None
    }

    /// A picture of the run's pipeline, as SVG; `None` if it has no pipeline.
    ///
    /// # Errors
    /// The picture cannot be drawn; the text says why.
    fn pipeline(&self, _run: &Path) -> Result<Option<String>, String> {
        Ok(None)
    }
}
