//! What a server answered to a request. `object_store` reports statuses only as a part of a text,
//! so the answer is noted next to it.

use std::future::Future;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use object_store::{
    ClientOptions, HeaderMap,
    client::{
        HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService,
        ReqwestConnector,
    },
};

tokio::task_local! {
    /// Where the answers to the requests of a task are noted.
    static NOTED: Answer;
}

/// The answer to the last request; empty if there was none.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer(Arc<Mutex<Option<Head>>>);

/// The beginning of an answer.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) status: u16,
    headers: HeaderMap,
}

impl Answer {
    /// Does what `work` does, and returns its result with the answer to its last request.
    pub(crate) async fn noted<T>(work: impl Future<Output = T>) -> (T, Self) {
        let answer = Self::default();
        let result = NOTED.scope(answer.clone(), work).await;
        (result, answer)
    }

    pub(crate) fn head(&self) -> Option<Head> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Head>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Head {
    pub(crate) fn header(&self, name: &str) -> Option<String> {
        let value = self.headers.get(name)?.to_str().ok()?;
        Some(value.trim().into())
    }

    /// The range of bytes that the answer holds, and the size of the object.
    pub(crate) fn content_range(&self) -> Option<(Range<u64>, u64)> {
        let value = self.header("content-range")?;
        let (range, size) = value.strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        let end = last.parse::<u64>().ok()?.checked_add(1)?;
        Some((first.parse().ok()?..end, size.parse().ok()?))
    }
}

/// Makes clients that note answers.
#[derive(Debug)]
pub(crate) struct NotingConnector;

impl HttpConnector for NotingConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(NotingClient(client)))
    }
}

#[derive(Debug)]
struct NotingClient(HttpClient);

#[async_trait]
impl HttpService for NotingClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        // Requests of other tasks, such as those for a token, are not noted.
        let note = |head| {
            let _ = NOTED.try_with(|answer| *answer.lock() = head);
        };
        note(None);
        let response = self.0.execute(request).await?;
        note(Some(Head {
            status: response.status().as_u16(),
            headers: response.headers().clone(),
        }));
        Ok(response)
    }
}
