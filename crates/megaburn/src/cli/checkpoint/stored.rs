//! Checkpoints in object stores, by their URLs.

use std::path::Path;

use megaburn_checkpoint::{CheckpointStore, checkpoint_step};
use megaburn_store::{StoreConfig, is_url};
use megaburn_train::TrainError;

/// A URL on the command line: a folder of checkpoints, or one checkpoint in it.
pub(super) struct StoreUrl {
    pub(super) store: CheckpointStore,
    /// The step of the checkpoint, if the URL names one.
    pub(super) step: Option<u64>,
}

impl StoreUrl {
    /// Opens a URL; `None` for a path of this host. Nothing is requested.
    ///
    /// # Errors
    /// The URL cannot be used.
    pub(super) fn open(path: &Path) -> Result<Option<Self>, TrainError> {
        let Some(url) = path.to_str().filter(|url| is_url(url)) else {
            return Ok(None);
        };
        let url = url.trim_end_matches('/');
        let (above, name) = url.rsplit_once('/').unwrap_or((url, ""));
        let step = checkpoint_step(name);
        let config = StoreConfig::new().on_retry(|retry| tracing::warn!("{retry}"));
        let folder = if step.is_some() { above } else { url };
        let store = CheckpointStore::open(folder, &config)?;
        Ok(Some(Self { store, step }))
    }
}
