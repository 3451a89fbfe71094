//! Opens the store that a URL names.

use std::sync::Arc;

use object_store::{
    BackoffConfig, ClientConfigKey, ObjectStore, RetryConfig,
    aws::{AmazonS3Builder, AmazonS3ConfigKey},
    gcp::{GoogleCloudStorageBuilder, GoogleConfigKey},
    http::HttpBuilder,
    path::Path,
};
use url::{Position, Url};

use super::{answer::NotingConnector, config::ObjectStoreConfig, object::Object};
use crate::error::DataError;

/// Where the objects of a data set are.
#[derive(Debug)]
pub(super) struct Location {
    url: String,
    /// The name of the objects without their endings.
    prefix: Path,
    store: Arc<dyn ObjectStore>,
    credentials: &'static str,
    config: Arc<ObjectStoreConfig>,
}

impl Location {
    /// Opens the store of a URL without `.bin` and `.idx`. Nothing is requested.
    ///
    /// # Errors
    /// The URL or the settings of its store cannot be used.
    pub(super) fn open(url: &str, config: &ObjectStoreConfig) -> Result<Self, DataError> {
        for (value, what) in [
            (config.block_bytes, "the number of bytes of a block"),
            (config.max_tries as usize, "the number of requests"),
        ] {
            if value == 0 {
                return Err(DataError::Zero { what });
            }
        }
        let bad = |why: String| DataError::Url {
            url: url.into(),
            why,
        };
        let parsed = Url::parse(url).map_err(|error| bad(error.to_string()))?;
        if parsed.query().is_some() || parsed.fragment().is_some() {
            return Err(bad(
                "it has a query or a fragment, which the URLs of three objects cannot \
                 share; leave it out"
                    .into(),
            ));
        }
        if !parsed.username().is_empty() || parsed.password().is_some() {
            return Err(bad(
                "it has a user or a password, which would be in logs; leave them out".into(),
            ));
        }
        if parsed.host_str().is_none_or(str::is_empty) {
            return Err(bad("it names no bucket or host".into()));
        }
        let prefix = Path::from_url_path(parsed.path()).map_err(|error| bad(error.to_string()))?;
        if prefix.as_ref().is_empty() || parsed.path().ends_with('/') {
            return Err(bad(
                "it names no data set; add a name, like /folder/web".into()
            ));
        }
        let (store, credentials) = store_of(&parsed, config).map_err(|error| match error {
            Some(error) => bad(error.to_string()),
            None => bad("only s3://, gs://, http://, https:// and file:// are read".into()),
        })?;
        Ok(Self {
            url: url.into(),
            prefix,
            store,
            credentials,
            config: Arc::new(config.clone()),
        })
    }

    /// The object with an ending such as `.bin`.
    ///
    /// # Errors
    /// The URL cannot be used.
    pub(super) fn object(&self, ending: &str) -> Result<Object, DataError> {
        let url = format!("{}{ending}", self.url);
        // Other ways to make a path encode characters like `~` in it.
        let path = Path::parse(format!("{}{ending}", self.prefix));
        let path = path.map_err(|error| DataError::Url {
            url: url.clone(),
            why: error.to_string(),
        })?;
        Ok(Object {
            url,
            store: self.store.clone(),
            path,
            credentials: self.credentials,
            config: self.config.clone(),
        })
    }
}

type Opened = (Arc<dyn ObjectStore>, &'static str);

/// The store of a URL, and what errors say of its credentials.
///
/// # Errors
/// Its settings cannot be used; `None` if there is no store for the scheme.
fn store_of(url: &Url, config: &ObjectStoreConfig) -> Result<Opened, Option<object_store::Error>> {
    // A program that has chosen another provider of cryptography keeps it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let bucket = url.host_str().unwrap_or_default();
    let variables = |prefix: &'static str| {
        let of_store = move |(name, _): &&(String, String)| name.starts_with(prefix);
        config.variables.iter().filter(of_store)
    };
    let credentials;
    let store: Arc<dyn ObjectStore> = match url.scheme() {
        "s3" | "s3a" => {
            let mut builder = AmazonS3Builder::from_env();
            for (name, value) in variables("AWS_") {
                builder = builder.with_config(name.to_ascii_lowercase().parse()?, value);
            }
            for (key, value) in client_settings(config) {
                builder = builder.with_config(AmazonS3ConfigKey::Client(key), value);
            }
            credentials = ", and the credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY \
                           (AWS_SKIP_SIGNATURE=true for a public bucket)";
            let builder = builder.with_bucket_name(bucket).with_retry(no_retries());
            Arc::new(builder.with_http_connector(NotingConnector).build()?)
        }
        "gs" => {
            let mut builder = GoogleCloudStorageBuilder::from_env();
            for (name, value) in variables("GOOGLE_") {
                builder = builder.with_config(name.to_ascii_lowercase().parse()?, value);
            }
            for (key, value) in client_settings(config) {
                builder = builder.with_config(GoogleConfigKey::Client(key), value);
            }
            credentials = ", and the credentials in GOOGLE_SERVICE_ACCOUNT or \
                           GOOGLE_APPLICATION_CREDENTIALS (GOOGLE_SKIP_SIGNATURE=true for a public \
                           bucket)";
            let builder = builder.with_bucket_name(bucket).with_retry(no_retries());
            Arc::new(builder.with_http_connector(NotingConnector).build()?)
        }
        "http" | "https" => {
            let mut builder = HttpBuilder::new().with_url(&url[..Position::BeforePath]);
            for (key, value) in client_settings(config) {
                builder = builder.with_config(key, value);
            }
            builder = builder.with_config(ClientConfigKey::AllowHttp, "true");
            credentials = "";
            let builder = builder.with_retry(no_retries());
            Arc::new(builder.with_http_connector(NotingConnector).build()?)
        }
        _ => return Err(None),
    };
    Ok((store, credentials))
}

/// The time limits of a request.
fn client_settings(config: &ObjectStoreConfig) -> [(ClientConfigKey, String); 3] {
    let limits = [
        (ClientConfigKey::ConnectTimeout, config.connect_timeout),
        (ClientConfigKey::ReadTimeout, config.read_timeout),
        (ClientConfigKey::Timeout, config.retry_timeout),
    ];
    limits.map(|(key, limit)| (key, format!("{}ms", limit.as_millis().max(1))))
}

/// Requests are repeated by [`Object`], which reports them.
fn no_retries() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig::default(),
        max_retries: 0,
        retry_timeout: Default::default(),
    }
}
