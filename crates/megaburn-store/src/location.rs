use std::sync::Arc;

use object_store::path::Path;
use url::Url;

use crate::{
    config::StoreConfig, error::StoreError, object::Object, requests::Requests, store::Store,
};

/// The place of objects whose URLs begin alike.
#[derive(Clone, Debug)]
pub struct Location {
    pub(crate) url: String,
    /// The beginning of the objects' names.
    pub(crate) prefix: Path,
    pub(crate) store: Arc<Store>,
}

impl Location {
    /// Opens the store of a URL, to which the endings of objects are added. Nothing is requested.
    /// `what` is what errors say that the URL should name.
    ///
    /// # Errors
    /// The URL or the settings of its store cannot be used.
    pub fn open(url: &str, what: &'static str, config: &StoreConfig) -> Result<Self, StoreError> {
        if config.max_tries == 0 {
            let what = "the number of requests";
            return Err(StoreError::Zero { what });
        }
        let bad = |why: String| StoreError::Url {
            url: url.into(),
            what,
            why,
        };
        let parsed = Url::parse(url).map_err(|error| bad(error.to_string()))?;
        if parsed.query().is_some() || parsed.fragment().is_some() {
            return Err(bad(
                "it has a query or a fragment, which the URLs of several objects cannot share; \
                 leave it out"
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
            return Err(bad(format!(
                "it names only a bucket, host or folder, not {what}; add a name, like /folder/name"
            )));
        }
        let store = Store::open(&parsed, what, config).map_err(|error| match error {
            Some(error) => bad(error.to_string()),
            None => bad("only s3://, gs://, http://, https:// and file:// are supported".into()),
        })?;
        Ok(Self {
            url: url.into(),
            prefix,
            store: Arc::new(store),
        })
    }

    /// The object with an ending such as `.bin` or `/manifest.json`.
    ///
    /// # Errors
    /// The URL cannot be used.
    pub fn object(&self, ending: &str) -> Result<Object, StoreError> {
        let url = format!("{}{ending}", self.url);
        // Other ways to make a path encode characters like `~` in it.
        let path = Path::parse(format!("{}{ending}", self.prefix));
        let path = path.map_err(|error| StoreError::Url {
            url: url.clone(),
            what: self.store.what,
            why: error.to_string(),
        })?;
        let requests = Requests {
            url,
            store: self.store.clone(),
        };
        Ok(Object { requests, path })
    }
}
