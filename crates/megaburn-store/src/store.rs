//! Opens the store that a URL names.

use std::fmt;
use std::sync::Arc;

use object_store::{
    BackoffConfig, ClientConfigKey, ObjectStore, RetryConfig,
    aws::{AmazonS3Builder, AmazonS3ConfigKey},
    gcp::{GoogleCloudStorageBuilder, GoogleConfigKey},
    http::HttpBuilder,
    multipart::MultipartStore,
};
use url::{Position, Url};

use crate::{answer::NotingConnector, config::StoreConfig};

/// A store with the settings of its requests.
pub(crate) struct Store {
    pub(crate) objects: Arc<dyn ObjectStore>,
    /// Uploads in parts; `None` for a store that is only read.
    pub(crate) parts: Option<Arc<dyn MultipartStore>>,
    /// What errors say of the variables that hold the credentials.
    pub(crate) credentials: &'static str,
    /// The kind of contents, for error messages.
    pub(crate) what: &'static str,
    pub(crate) config: StoreConfig,
}

impl Store {
    /// Opens the store of a URL. Nothing is requested.
    ///
    /// # Errors
    /// Its settings cannot be used; `None` if there is no store for the scheme.
    pub(crate) fn open(
        url: &Url,
        what: &'static str,
        config: &StoreConfig,
    ) -> Result<Self, Option<object_store::Error>> {
        let (objects, parts, credentials) = store_of(url, config)?;
        Ok(Self {
            objects,
            parts,
            credentials,
            what,
            config: config.clone(),
        })
    }
}

/// Without the stores, which hold credentials.
impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

type Opened = (
    Arc<dyn ObjectStore>,
    Option<Arc<dyn MultipartStore>>,
    &'static str,
);

fn store_of(url: &Url, config: &StoreConfig) -> Result<Opened, Option<object_store::Error>> {
    // A program that has chosen another provider of cryptography keeps it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let bucket = url.host_str().unwrap_or_default();
    let variables = |prefix: &'static str| {
        let of_store = move |(name, _): &&(String, String)| name.starts_with(prefix);
        config.variables.iter().filter(of_store)
    };
    Ok(match url.scheme() {
        "s3" | "s3a" => {
            let mut builder = AmazonS3Builder::from_env();
            for (name, value) in variables("AWS_") {
                builder = builder.with_config(name.to_ascii_lowercase().parse()?, value);
            }
            for (key, value) in client_settings(config) {
                builder = builder.with_config(AmazonS3ConfigKey::Client(key), value);
            }
            // Each is deleted on its own, which stores that only resemble S3 support too.
            let key = AmazonS3ConfigKey::DisableBulkDelete;
            builder = builder.with_config(key, "true");
            let credentials = ", and the credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY \
                           (AWS_SKIP_SIGNATURE=true for a public bucket)";
            let builder = builder.with_bucket_name(bucket).with_retry(no_retries());
            let store = Arc::new(builder.with_http_connector(NotingConnector).build()?);
            (store.clone(), Some(store), credentials)
        }
        "gs" => {
            let mut builder = GoogleCloudStorageBuilder::from_env();
            for (name, value) in variables("GOOGLE_") {
                builder = builder.with_config(name.to_ascii_lowercase().parse()?, value);
            }
            for (key, value) in client_settings(config) {
                builder = builder.with_config(GoogleConfigKey::Client(key), value);
            }
            let credentials = ", and the credentials in GOOGLE_SERVICE_ACCOUNT or \
                           GOOGLE_APPLICATION_CREDENTIALS (GOOGLE_SKIP_SIGNATURE=true for a public \
                           bucket)";
            let builder = builder.with_bucket_name(bucket).with_retry(no_retries());
            let store = Arc::new(builder.with_http_connector(NotingConnector).build()?);
            (store.clone(), Some(store), credentials)
        }
        "http" | "https" => {
            let mut builder = HttpBuilder::new().with_url(&url[..Position::BeforePath]);
            for (key, value) in client_settings(config) {
                builder = builder.with_config(key, value);
            }
            builder = builder.with_config(ClientConfigKey::AllowHttp, "true");
            let builder = builder.with_retry(no_retries());
            let store = builder.with_http_connector(NotingConnector).build()?;
            (Arc::new(store), None, "")
        }
        _ => return Err(None),
    })
}

/// The time limits of a request.
fn client_settings(config: &StoreConfig) -> [(ClientConfigKey, String); 3] {
    let limits = [
        (ClientConfigKey::ConnectTimeout, config.connect_timeout),
        (ClientConfigKey::ReadTimeout, config.read_timeout),
        (ClientConfigKey::Timeout, config.retry_timeout),
    ];
    limits.map(|(key, limit)| (key, format!("{}ms", limit.as_millis().max(1))))
}

/// Requests are repeated by `Requests`, which reports them.
fn no_retries() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig::default(),
        max_retries: 0,
        retry_timeout: Default::default(),
    }
}
