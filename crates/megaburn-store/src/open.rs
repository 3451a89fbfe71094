use std::sync::Arc;

use crate::{
    config::StoreConfig,
    error::StoreError,
    local_folder::LocalFolder,
    object_folder::ObjectFolder,
    url::{is_url, local_path_of},
};
#[cfg(feature = "object-store")]
use crate::{location::Location, remote_folder::RemoteFolder};

/// Opens a folder of objects at a URL, which need not exist. Nothing is requested. `what` is what
/// errors say that the URL should name.
///
/// # Errors
/// The URL or the settings of its store cannot be used, or the build has no object stores.
pub fn open_folder(
    url: &str,
    what: &'static str,
    config: &StoreConfig,
) -> Result<Arc<dyn ObjectFolder>, StoreError> {
    let url = url.trim_end_matches('/');
    if let Some(path) = local_path_of(url, what)? {
        return Ok(Arc::new(LocalFolder::new(url, path)));
    }
    if !is_url(url) {
        return Err(StoreError::Url {
            url: url.into(),
            what,
            why: "it has no scheme; write s3://, gs:// or file:///path".into(),
        });
    }
    open_remote(url, what, config)
}

#[cfg(not(feature = "object-store"))]
fn open_remote(
    url: &str,
    _: &'static str,
    _: &StoreConfig,
) -> Result<Arc<dyn ObjectFolder>, StoreError> {
    Err(StoreError::NoObjectStore { url: url.into() })
}

#[cfg(feature = "object-store")]
fn open_remote(
    url: &str,
    what: &'static str,
    config: &StoreConfig,
) -> Result<Arc<dyn ObjectFolder>, StoreError> {
    Ok(Arc::new(RemoteFolder::new(Location::open(
        url, what, config,
    )?)?))
}
