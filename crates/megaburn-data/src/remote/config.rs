use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::event::ObjectStoreEvent;

/// How data sets in object stores are read.
///
/// One opened data set keeps at most [`num_blocks`](Self::with_num_blocks) blocks of its tokens in
/// memory, and each thread that reads one more for the time of a request.
///
/// Credentials and endpoints are those of environment variables: `AWS_*` for `s3://` (among them
/// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT`,
/// `AWS_ALLOW_HTTP`, `AWS_SKIP_SIGNATURE`), `GOOGLE_*` for `gs://` (`GOOGLE_SERVICE_ACCOUNT`,
/// `GOOGLE_APPLICATION_CREDENTIALS`, `GOOGLE_SKIP_SIGNATURE`). Their complete lists are those of
/// `AmazonS3ConfigKey` and `GoogleConfigKey` of the crate `object_store`.
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
    pub(super) connect_timeout: Duration,
    pub(super) read_timeout: Duration,
    pub(super) max_tries: u32,
    pub(super) retry_timeout: Duration,
    pub(super) first_delay: Duration,
    pub(super) block_bytes: usize,
    pub(super) num_blocks: usize,
    pub(super) variables: Vec<(String, String)>,
    pub(super) on_event: Arc<dyn Fn(ObjectStoreEvent) + Send + Sync>,
}

impl ObjectStoreConfig {
    /// The default configuration, which ignores events.
    pub fn new() -> Self {
        Self {
            cache_dir: None,
            connect_timeout: Duration::from_secs(5),
            read_timeout: Duration::from_secs(30),
            max_tries: 10,
            retry_timeout: Duration::from_secs(300),
            first_delay: Duration::from_millis(100),
            block_bytes: 4 << 20,
            num_blocks: 8,
            variables: Vec::new(),
            on_event: Arc::new(|_| ()),
        }
    }

    /// Sets the folder of copies of indices. The default is
    /// [`default_cache_dir`](crate::default_cache_dir).
    pub fn with_cache_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache_dir = Some(folder.into());
        self
    }

    /// Sets how long a connection may take; 5 seconds by default.
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets how long a server may send nothing; 30 seconds by default.
    pub fn with_read_timeout(mut self, timeout: Duration) -> Self {
        self.read_timeout = timeout;
        self
    }

    /// Sets how often a request is sent, until one succeeds; 10 times by default.
    pub fn with_max_tries(mut self, max_tries: u32) -> Self {
        self.max_tries = max_tries;
        self
    }

    /// Sets the time after which a failed request is not sent again, and after which a single
    /// request ends; 5 minutes by default.
    pub fn with_retry_timeout(mut self, timeout: Duration) -> Self {
        self.retry_timeout = timeout;
        self
    }

    /// Sets the time before the second request; 100 ms by default. It doubles with each request, up
    /// to 15 seconds, and up to a half of it is left out at random, so that ranks do not ask
    /// together.
    pub fn with_first_delay(mut self, delay: Duration) -> Self {
        self.first_delay = delay;
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

    /// Sets an environment variable such as `AWS_ENDPOINT` for these data sets only. It overrides
    /// the process's environment.
    pub fn with_variable(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Sets what is called with each event, on the thread that reads.
    pub fn on_event(mut self, report: impl Fn(ObjectStoreEvent) + Send + Sync + 'static) -> Self {
        self.on_event = Arc::new(report);
        self
    }
}

impl Default for ObjectStoreConfig {
    fn default() -> Self {
        Self::new()
    }
}

/// Without the values of variables, which may be secrets.
impl fmt::Debug for ObjectStoreConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&String> = self.variables.iter().map(|(name, _)| name).collect();
        f.debug_struct("ObjectStoreConfig")
            .field("cache_dir", &self.cache_dir)
            .field("connect_timeout", &self.connect_timeout)
            .field("read_timeout", &self.read_timeout)
            .field("max_tries", &self.max_tries)
            .field("retry_timeout", &self.retry_timeout)
            .field("first_delay", &self.first_delay)
            .field("block_bytes", &self.block_bytes)
            .field("num_blocks", &self.num_blocks)
            .field("variables", &names)
            .finish_non_exhaustive()
    }
}
