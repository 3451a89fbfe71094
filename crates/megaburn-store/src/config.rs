use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::retry::Retry;

/// How requests are sent to object stores.
///
/// Credentials and endpoints are those of environment variables: `AWS_*` for `s3://` (among them
/// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT`,
/// `AWS_ALLOW_HTTP`, `AWS_SKIP_SIGNATURE`), `GOOGLE_*` for `gs://` (`GOOGLE_SERVICE_ACCOUNT`,
/// `GOOGLE_APPLICATION_CREDENTIALS`, `GOOGLE_SKIP_SIGNATURE`). Their complete lists are those of
/// `AmazonS3ConfigKey` and `GoogleConfigKey` of the crate `object_store`.
///
/// ```
/// use megaburn_store::StoreConfig;
///
/// let config = StoreConfig::new()
///     .with_max_tries(3)
///     .on_retry(|retry| eprintln!("{retry}"));
/// ```
#[derive(Clone)]
pub struct StoreConfig {
    pub(crate) connect_timeout: Duration,
    pub(crate) read_timeout: Duration,
    pub(crate) max_tries: u32,
    pub(crate) retry_timeout: Duration,
    pub(crate) first_delay: Duration,
    pub(crate) variables: Vec<(String, String)>,
    pub(crate) on_retry: Arc<dyn Fn(Retry) + Send + Sync>,
}

impl StoreConfig {
    /// The default configuration, which reports no requests that are repeated.
    pub fn new() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            read_timeout: Duration::from_secs(30),
            max_tries: 10,
            retry_timeout: Duration::from_secs(300),
            first_delay: Duration::from_millis(100),
            variables: Vec::new(),
            on_retry: Arc::new(|_| ()),
        }
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

    /// Sets an environment variable such as `AWS_ENDPOINT` for these objects only. It overrides the
    /// process's environment.
    pub fn with_variable(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Sets what is called before a request is repeated, on the thread that waits for it.
    pub fn on_retry(mut self, report: impl Fn(Retry) + Send + Sync + 'static) -> Self {
        self.on_retry = Arc::new(report);
        self
    }
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self::new()
    }
}

/// Without the values of variables, which may be secrets.
impl fmt::Debug for StoreConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&String> = self.variables.iter().map(|(name, _)| name).collect();
        f.debug_struct("StoreConfig")
            .field("connect_timeout", &self.connect_timeout)
            .field("read_timeout", &self.read_timeout)
            .field("max_tries", &self.max_tries)
            .field("retry_timeout", &self.retry_timeout)
            .field("first_delay", &self.first_delay)
            .field("variables", &names)
            .finish_non_exhaustive()
    }
}
