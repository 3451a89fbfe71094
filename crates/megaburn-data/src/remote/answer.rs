//! What a server answered to a request. `object_store` reports statuses only as a part of a text,
//! so the answer is noted next to it.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use object_store::{
    ClientOptions, HeaderMap,
    client::{
        HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService,
        ReqwestConnector,
    },
};

/// The answer to a request in whose extensions this is; empty if there was none.
#[derive(Clone, Debug, Default)]
pub(super) struct Answer(Arc<OnceLock<Head>>);

/// The beginning of an answer.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) status: u16,
    headers: HeaderMap,
}

impl Answer {
    pub(super) fn head(&self) -> Option<&Head> {
        self.0.get()
    }
}

impl Head {
    pub(super) fn header(&self, name: &str) -> Option<String> {
        let value = self.headers.get(name)?.to_str().ok()?;
        Some(value.trim().into())
    }

    /// The range of bytes that the answer holds, and the size of the object.
    pub(super) fn content_range(&self) -> Option<(Range<u64>, u64)> {
        let value = self.header("content-range")?;
        let (range, size) = value.strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        let end = last.parse::<u64>().ok()?.checked_add(1)?;
        Some((first.parse().ok()?..end, size.parse().ok()?))
    }
}

/// Makes clients that note answers.
#[derive(Debug)]
pub(super) struct NotingConnector;

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
        let answer = request.extensions().get::<Answer>().cloned();
        let response = self.0.execute(request).await?;
        if let Some(answer) = answer {
            let head = Head {
                status: response.status().as_u16(),
                headers: response.headers().clone(),
            };
            // Each request has an answer of its own, which is not noted before.
            let _ = answer.0.set(head);
        }
        Ok(response)
    }
}
