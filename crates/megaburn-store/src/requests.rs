//! Requests that are sent again while they may succeed.

use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use tokio::time::timeout;

use crate::{
    error::{Obstacle, StoreError},
    failure::Failure,
    retry::Retry,
    runtime,
    store::Store,
};

/// The longest time between two requests.
const MAX_DELAY: Duration = Duration::from_secs(15);
/// How often a thread that waits for the next request asks whether to stop.
const TICK: Duration = Duration::from_millis(20);

/// The requests for one object, or one folder of objects.
#[derive(Clone, Debug)]
pub(crate) struct Requests {
    pub(crate) url: String,
    pub(crate) store: Arc<Store>,
}

/// The purpose of requests.
#[derive(Clone, Copy)]
pub(crate) struct Purpose<'a> {
    /// What is done with the object: `read`, `written`, `listed` or `deleted`.
    pub(crate) action: &'static str,
    /// What is asked for, such as `bytes 20 to 40`.
    pub(crate) request: &'a str,
    /// Whether to give up, which is asked several times a second.
    pub(crate) is_stopped: &'a (dyn Fn() -> bool + Sync),
}

impl Requests {
    /// The same requests, each of which is sent at most this number of times.
    pub(crate) fn with_max_tries(&self, max_tries: u32) -> Self {
        let store = &self.store;
        let max_tries = max_tries.min(store.config.max_tries);
        let store = Store {
            objects: store.objects.clone(),
            parts: store.parts.clone(),
            credentials: store.credentials,
            what: store.what,
            config: store.config.clone().with_max_tries(max_tries),
        };
        Self {
            url: self.url.clone(),
            store: Arc::new(store),
        }
    }

    /// Sends requests until one succeeds, or cannot, or there were too many.
    pub(crate) fn send<T, F>(
        &self,
        purpose: Purpose<'_>,
        request: impl Fn() -> F,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        let config = &self.store.config;
        let cancelled = || StoreError::Cancelled {
            url: self.url.clone(),
            action: purpose.action,
        };
        let begun = Instant::now();
        let mut longest = config.first_delay;
        let mut num_tries = 0;
        loop {
            let left = config.retry_timeout.saturating_sub(begun.elapsed());
            let request = request();
            let limited = async move {
                let late = |_| {
                    Err(Failure::Temporary(
                        "the answer was not complete in time".into(),
                    ))
                };
                timeout(left, request).await.unwrap_or_else(late)
            };
            let result = runtime::wait(limited, purpose.is_stopped).map_err(|error| {
                self.error(
                    &purpose,
                    Obstacle::Other,
                    error.to_string(),
                    "start again".into(),
                )
            })?;
            let why = match result.ok_or_else(cancelled)? {
                Ok(value) => return Ok(value),
                Err(Failure::Temporary(why)) => why,
                Err(failure) => return Err(self.failed(&purpose, failure)),
            };
            num_tries += 1;
            let delay = shortened(longest);
            if num_tries >= config.max_tries || begun.elapsed() + delay > config.retry_timeout {
                return Err(self.given_up(&purpose, num_tries, begun.elapsed(), &why));
            }
            (config.on_retry)(Retry {
                url: self.url.clone(),
                request: purpose.request.into(),
                num_tries,
                max_tries: config.max_tries,
                delay,
                why,
            });
            let woken = Instant::now() + delay;
            while let Some(left) = woken.checked_duration_since(Instant::now()) {
                if (purpose.is_stopped)() {
                    return Err(cancelled());
                }
                sleep(left.min(TICK));
            }
            longest = (2 * longest).min(MAX_DELAY);
        }
    }

    fn error(
        &self,
        purpose: &Purpose<'_>,
        obstacle: Obstacle,
        why: String,
        remedy: String,
    ) -> StoreError {
        StoreError::Object {
            url: self.url.clone(),
            action: purpose.action,
            obstacle,
            why,
            remedy,
        }
    }

    fn given_up(
        &self,
        purpose: &Purpose<'_>,
        num_tries: u32,
        elapsed: Duration,
        why: &str,
    ) -> StoreError {
        let plural = if num_tries == 1 {
            "request"
        } else {
            "requests"
        };
        let elapsed = elapsed.as_secs_f64();
        let (request, credentials) = (purpose.request, self.store.credentials);
        self.error(
            purpose,
            Obstacle::Other,
            format!("{num_tries} {plural} for {request} failed in {elapsed:.1} s, the last: {why}"),
            format!("check the URL and the network{credentials}, and start again"),
        )
    }

    fn failed(&self, purpose: &Purpose<'_>, failure: Failure) -> StoreError {
        let credentials = self.store.credentials;
        let is_read = purpose.action == "read";
        let (obstacle, why, remedy) = match failure {
            Failure::Changed(why) => {
                let url = self.url.clone();
                return StoreError::Changed { url, why };
            }
            Failure::Missing(why) => {
                let what = if is_read {
                    "it"
                } else {
                    "the bucket or object"
                };
                let why = format!("{what} does not exist ({why})");
                (Obstacle::Missing, why, "check the URL".into())
            }
            Failure::Denied(why) => {
                let why = match is_read {
                    true => format!("it may not be read, or does not exist ({why})"),
                    false => format!("that is not allowed ({why})"),
                };
                let remedy = format!("check the rights of the caller{credentials}");
                (Obstacle::Denied, why, remedy)
            }
            Failure::NoRanges => (
                Obstacle::Other,
                "its server sends the whole object when a range of its bytes is asked for".into(),
                "put it on a server that supports ranges, or copy it to this host".into(),
            ),
            Failure::Untrusted(why) => (
                Obstacle::Other,
                why,
                "check the URL, or name a file with the server's certificates in SSL_CERT_FILE"
                    .into(),
            ),
            Failure::Permanent(why) | Failure::Temporary(why) => {
                let remedy = match is_read {
                    true => "check the URL, or copy it to this host".into(),
                    false => format!("check the URL{credentials}"),
                };
                (Obstacle::Other, why, remedy)
            }
        };
        self.error(purpose, obstacle, why, remedy)
    }
}

/// Never gives up.
pub(crate) fn never() -> bool {
    false
}

/// Between a half of a time and all of it, at random.
fn shortened(delay: Duration) -> Duration {
    let random = RandomState::new().hash_one(0) as f64 / u64::MAX as f64;
    delay.mul_f64(1.0 - random / 2.0)
}
