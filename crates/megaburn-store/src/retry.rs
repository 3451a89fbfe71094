use std::fmt;
use std::time::Duration;

/// A request that failed and is sent again after a delay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry {
    /// The object, or the folder of objects.
    pub url: String,
    /// What was asked for, such as `bytes 20 to 40`.
    pub request: String,
    /// Number of requests that failed so far.
    pub num_tries: u32,
    /// The most requests that are sent.
    pub max_tries: u32,
    /// The time until the next request.
    pub delay: Duration,
    /// Why the request failed.
    pub why: String,
}

impl fmt::Display for Retry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({}): {}; try {} of {} begins in {:.1} s",
            self.url,
            self.request,
            self.why,
            self.num_tries + 1,
            self.max_tries,
            self.delay.as_secs_f64()
        )
    }
}
