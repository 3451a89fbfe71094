//! Tells URLs from paths, and finds the path that a `file://` URL names.

use std::path::{Path, PathBuf};

use crate::error::StoreError;

/// Whether a path is a URL, such as `s3://bucket/web`: a scheme, and `://`.
pub fn is_url(path: impl AsRef<Path>) -> bool {
    let Some((scheme, _)) = path
        .as_ref()
        .to_str()
        .and_then(|path| path.split_once("://"))
    else {
        return false;
    };
    let is_part = |c: char| c.is_ascii_alphanumeric() || ['+', '-', '.'].contains(&c);
    scheme.starts_with(|c: char| c.is_ascii_alphabetic()) && scheme.chars().all(is_part)
}

/// The path on this host that a `file://` URL names; `None` for other URLs. `what` is what errors
/// say that the URL should name.
///
/// # Errors
/// It is a `file://` URL of another host, or has an invalid `%`.
pub fn local_path_of(url: &str, what: &'static str) -> Result<Option<PathBuf>, StoreError> {
    let Some(path) = url.strip_prefix("file://") else {
        return Ok(None);
    };
    let bad = |why: &str| StoreError::Url {
        url: url.into(),
        what,
        why: why.into(),
    };
    let path = path.strip_prefix("localhost").unwrap_or(path);
    if !path.starts_with('/') {
        return Err(bad("it is no path on this host; write file:///path"));
    }
    if path.contains(['?', '#']) {
        return Err(bad(
            "it has a query or a fragment; write ? as %3F and # as %23",
        ));
    }
    let decoded = decoded(path);
    let decoded = decoded.ok_or_else(|| bad("it has a % that no two hexadecimal digits follow"))?;
    Ok(Some(decoded.into()))
}

/// A path of a URL without `%`; `None` if its text is not UTF-8 or a `%` is wrong.
fn decoded(path: &str) -> Option<String> {
    let mut parts = path.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_begins_with_a_scheme() {
        for url in [
            "s3://b/web",
            "gs://b/web",
            "https://h:1/web.bin",
            "file:///tmp/web",
        ] {
            assert!(is_url(url), "{url}");
        }
        for path in [
            "web",
            "/tmp/web",
            "s3:/b/web",
            "://web",
            "a/b://web",
            "1s://web",
            "",
        ] {
            assert!(!is_url(path), "{path}");
        }
    }

    #[test]
    fn a_url_of_a_file_names_a_path_of_this_host() {
        let path = |url: &str| local_path_of(url, "a run");
        assert_eq!(path("s3://b/web").unwrap(), None);
        for url in ["file:///a%20b/c%C3%A9", "file://localhost/a b/cé"] {
            assert_eq!(path(url).unwrap(), Some("/a b/cé".into()), "{url}");
        }
        for (url, why) in [
            ("file://host/a", "write file:///path"),
            ("file:///a%2", "a % that no two"),
            ("file:///a%ff", "a % that no two"),
            ("file:///a?b", "a query or a fragment"),
        ] {
            let error = path(url).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
            assert!(
                error.starts_with(&format!("`{url}` is not the URL of a run")),
                "{error}"
            );
        }
    }
}
