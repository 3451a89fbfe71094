use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use object_store::{GetOptions, GetRange, ObjectStore, path::Path};
use tokio::time::timeout;

use super::{
    answer::{Answer, Head},
    config::ObjectStoreConfig,
    event::ObjectStoreEvent,
    failure::{Failure, cause},
    runtime,
};
use crate::error::DataError;

/// The longest time between two requests.
const MAX_DELAY: Duration = Duration::from_secs(15);

/// An object of a store.
#[derive(Clone)]
pub(super) struct Object {
    pub(super) url: String,
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) path: Path,
    /// Which variables hold the credentials of the store.
    pub(super) credentials: &'static str,
    pub(super) config: Arc<ObjectStoreConfig>,
}

/// What changes with the contents of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Version {
    pub(super) num_bytes: u64,
    pub(super) e_tag: Option<String>,
    pub(super) modified: Option<String>,
}

impl Version {
    fn of(head: &Head, num_bytes: u64) -> Self {
        Self {
            num_bytes,
            e_tag: head.header("etag"),
            modified: head.header("last-modified"),
        }
    }

    /// Checks that an answer is of this version.
    fn check(&self, head: &Head) -> Result<(), Failure> {
        let changed = |what: &str, before: &str, now: &str| {
            let why = format!("its {what} was {before} when it was opened, and is {now}");
            Err(Failure::Changed(why))
        };
        let (before, now) = (self, Self::of(head, self.num_bytes));
        if let (Some(before), Some(now)) = (&before.e_tag, &now.e_tag) {
            if before != now {
                return changed("ETag", before, now);
            }
        } else if let (Some(before), Some(now)) = (&before.modified, &now.modified)
            && before != now
        {
            return changed("time", before, now);
        }
        match head.content_range() {
            Some((_, size)) if size != self.num_bytes => {
                changed("size", &self.num_bytes.to_string(), &size.to_string())
            }
            _ => Ok(()),
        }
    }
}

impl Object {
    /// The size and version of the object.
    ///
    /// # Errors
    /// The object is missing or may not be read, or the server does not say its size.
    pub(super) fn version(&self) -> Result<Version, DataError> {
        self.retried(None, || {
            let (store, path) = (self.store.clone(), self.path.clone());
            async move {
                let answer = Answer::default();
                let mut options = options_with(&answer);
                options.head = true;
                let found = store.get_opts(&path, options).await;
                let found = found.map_err(|error| Failure::of(&error, &answer, None))?;
                let head = answer.head().ok_or_else(unanswered)?;
                Ok(Version::of(head, found.meta.size))
            }
        })
    }

    /// A range of the bytes of the object, which is not empty.
    ///
    /// # Errors
    /// It cannot be read, or the object has changed.
    pub(super) fn read(&self, version: &Version, range: Range<u64>) -> Result<Vec<u8>, DataError> {
        self.retried(Some(&range), || self.request(version, range.clone()))
    }

    /// One request for a range of bytes.
    pub(super) fn request(
        &self,
        version: &Version,
        range: Range<u64>,
    ) -> impl Future<Output = Result<Vec<u8>, Failure>> + Send + 'static {
        let (store, path) = (self.store.clone(), self.path.clone());
        let version = version.clone();
        async move {
            let answer = Answer::default();
            let mut options = options_with(&answer);
            options.range = Some(GetRange::Bounded(range.clone()));
            let found = store.get_opts(&path, options).await;
            // A server may send another range if the object was cut, so the version comes first.
            if let Some(head) = answer.head().filter(|head| head.status == 206) {
                version.check(head)?;
            }
            let found = found.map_err(|error| Failure::of(&error, &answer, Some(&range)))?;
            let mut stream = found.into_stream();
            let num_bytes = (range.end - range.start) as usize;
            let mut bytes = Vec::with_capacity(num_bytes);
            while let Some(part) = stream.next().await {
                let part = part.map_err(|error| Failure::Temporary(cause(&error)))?;
                if part.len() > num_bytes - bytes.len() {
                    let why = format!("more than {num_bytes} bytes were sent");
                    return Err(Failure::Temporary(why));
                }
                bytes.extend_from_slice(&part);
            }
            if bytes.len() < num_bytes {
                let why = format!("only {} of {num_bytes} bytes were sent", bytes.len());
                return Err(Failure::Temporary(why));
            }
            Ok(bytes)
        }
    }

    /// The text of a small object; `None` if there is none. A server that does not let this caller
    /// list objects may say that it is denied if there is none.
    ///
    /// # Errors
    /// The object cannot be read, or has more than `max_bytes`.
    pub(super) fn text(&self, max_bytes: u64) -> Result<Option<String>, DataError> {
        let found = self.retried(None, || {
            let (store, path) = (self.store.clone(), self.path.clone());
            async move {
                let answer = Answer::default();
                let found = match store.get_opts(&path, options_with(&answer)).await {
                    Ok(found) => found,
                    Err(error) => match Failure::of(&error, &answer, None) {
                        Failure::Missing(_) | Failure::Denied(_) => return Ok(None),
                        failure => return Err(failure),
                    },
                };
                if found.meta.size > max_bytes {
                    let size = found.meta.size;
                    let why = format!("it has {size} bytes, and no description is so large");
                    return Err(Failure::Permanent(why));
                }
                let bytes = found.bytes().await;
                bytes
                    .map(Some)
                    .map_err(|error| Failure::Temporary(cause(&error)))
            }
        })?;
        Ok(found.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Sends requests until one succeeds, or cannot, or there were too many.
    fn retried<T, F>(
        &self,
        range: Option<&Range<u64>>,
        request: impl Fn() -> F,
    ) -> Result<T, DataError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        let config = &self.config;
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
            let result = runtime::wait(limited).map_err(|error| DataError::Object {
                url: self.url.clone(),
                why: error.to_string(),
                remedy: "start again".into(),
            })?;
            let why = match result {
                Ok(value) => return Ok(value),
                Err(Failure::Temporary(why)) => why,
                Err(failure) => return Err(self.failed(failure)),
            };
            num_tries += 1;
            let delay = shortened(longest);
            if num_tries >= config.max_tries || begun.elapsed() + delay > config.retry_timeout {
                return Err(self.given_up(range, num_tries, begun.elapsed(), &why));
            }
            (config.on_event)(ObjectStoreEvent::Retrying {
                url: self.url.clone(),
                range: range.cloned(),
                num_tries,
                max_tries: config.max_tries,
                delay,
                why,
            });
            sleep(delay);
            longest = (2 * longest).min(MAX_DELAY);
        }
    }

    fn given_up(
        &self,
        range: Option<&Range<u64>>,
        num_tries: u32,
        elapsed: Duration,
        why: &str,
    ) -> DataError {
        let what = range.map_or("its size".into(), |range| {
            format!("bytes {} to {}", range.start, range.end)
        });
        let plural = if num_tries == 1 {
            "request"
        } else {
            "requests"
        };
        let elapsed = elapsed.as_secs_f64();
        let credentials = self.credentials;
        DataError::Object {
            url: self.url.clone(),
            why: format!(
                "{num_tries} {plural} for {what} failed in {elapsed:.1} s, the last: {why}"
            ),
            remedy: format!("check the URL and the network{credentials}, and start again"),
        }
    }

    fn failed(&self, failure: Failure) -> DataError {
        let url = self.url.clone();
        let (why, remedy) = match failure {
            Failure::Changed(why) => return DataError::ObjectChanged { url, why },
            Failure::Missing(why) => {
                let why = format!("it does not exist ({why})");
                (why, "check the URL".into())
            }
            Failure::Denied(why) => {
                let credentials = self.credentials;
                let why = format!("it may not be read, or does not exist ({why})");
                (why, format!("check the rights of the caller{credentials}"))
            }
            Failure::NoRanges => (
                "its server sends the whole object when a range of its bytes is asked for".into(),
                "put it on a server that supports ranges, or download the data set".into(),
            ),
            Failure::Untrusted(why) => (
                why,
                "check the URL, or name a file with the server's certificates in SSL_CERT_FILE"
                    .into(),
            ),
            Failure::Permanent(why) | Failure::Temporary(why) => {
                (why, "check the URL, or download the data set".into())
            }
        };
        DataError::Object { url, why, remedy }
    }
}

/// Options of a request that notes its answer.
fn options_with(answer: &Answer) -> GetOptions {
    let mut options = GetOptions::default();
    options.extensions.insert(answer.clone());
    options
}

/// Without the store, which holds credentials.
impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Object").field(&self.url).finish()
    }
}

fn unanswered() -> Failure {
    Failure::Temporary("the server did not answer".into())
}

/// Between a half of a time and all of it, at random.
fn shortened(delay: Duration) -> Duration {
    let random = RandomState::new().hash_one(0) as f64 / u64::MAX as f64;
    delay.mul_f64(1.0 - random / 2.0)
}
