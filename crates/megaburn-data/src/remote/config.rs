use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use megaburn_store::StoreConfig;

use super::event::ObjectStoreEvent;

/// How data sets in object stores are read.
///
/// One opened data set keeps at most [`num_blocks`](Self::with_num_blocks) blocks of its tokens in
/// memory, and each thread that reads one more for the time of a request.
///
/// Credentials and endpoints are those of environment variables, which [`StoreConfig`] lists.
///
/// ```
/// use megaburn_data::ObjectStoreConfig;
///
/// let config = ObjectStoreConfig::new()
///     .with_max_tries(3)
///     .on_event(|event| eprintln!("{event:?}"));
/// ```
#[derive(Clone)]
pub struct ObjectStoreConfig {
    pub(super) cache_dir: Option<PathBuf>,
    pub(super) block_bytes: usize,
    pub(super) num_blocks: usize,
    pub(super) store: StoreConfig,
    pub(super) on_event: Arc<dyn Fn(ObjectStoreEvent) + Send + Sync>,
}

impl ObjectStoreConfig {
    /// The default configuration, which ignores events.
    pub fn new() -> Self {
        Self {
            cache_dir: None,
            block_bytes: 4 << 20,
            num_blocks: 8,
            store: StoreConfig::new(),
            on_event: Arc::new(|_| ()),
        }
    }

    /// Sets the folder of copies of indices. The default is
    /// [`default_cache_dir`](crate::default_cache_dir).
    pub fn with_cache_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache_dir = Some(folder.into());
        self
    }

    /// Sets the size of a block; 4 MiB by default. Reads that follow each other fetch whole blocks,
    /// and other reads only their own bytes, unless all of the tokens fit into the blocks.
    pub fn with_block_bytes(mut self, num_bytes: usize) -> Self {
        self.block_bytes = num_bytes;
        self
    }

    /// Sets how many blocks of a data set are kept in memory; 8 by default. With fewer than 2 none
    /// is read ahead.
    pub fn with_num_blocks(mut self, num_blocks: usize) -> Self {
        self.num_blocks = num_blocks;
        self
    }

    /// Sets how long a connection may take; see [`StoreConfig::with_connect_timeout`].
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Self {
        self.store = self.store.with_connect_timeout(timeout);
        self
    }

    /// Sets how long a server may send nothing; see [`StoreConfig::with_read_timeout`].
    pub fn with_read_timeout(mut self, timeout: Duration) -> Self {
        self.store = self.store.with_read_timeout(timeout);
        self
    }

    /// Sets how often a request is sent; see [`StoreConfig::with_max_tries`].
    pub fn with_max_tries(mut self, max_tries: u32) -> Self {
        self.store = self.store.with_max_tries(max_tries);
        self
    }

    /// Sets when a failed request is given up; see [`StoreConfig::with_retry_timeout`].
    pub fn with_retry_timeout(mut self, timeout: Duration) -> Self {
        self.store = self.store.with_retry_timeout(timeout);
        self
    }

    /// Sets the time before the second request; see [`StoreConfig::with_first_delay`].
    pub fn with_first_delay(mut self, delay: Duration) -> Self {
        self.store = self.store.with_first_delay(delay);
        self
    }

    /// Sets an environment variable for these data sets; see [`StoreConfig::with_variable`].
    pub fn with_variable(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.store = self.store.with_variable(name, value);
        self
    }

    /// Sets what is called with each event, on the thread that reads.
    pub fn on_event(mut self, report: impl Fn(ObjectStoreEvent) + Send + Sync + 'static) -> Self {
        let report: Arc<dyn Fn(ObjectStoreEvent) + Send + Sync> = Arc::new(report);
        self.on_event = report.clone();
        let on_retry = move |retry| report(ObjectStoreEvent::Retrying(retry));
        self.store = self.store.on_retry(on_retry);
        self
    }
}

impl Default for ObjectStoreConfig {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for ObjectStoreConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectStoreConfig")
            .field("cache_dir", &self.cache_dir)
            .field("block_bytes", &self.block_bytes)
            .field("num_blocks", &self.num_blocks)
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}
