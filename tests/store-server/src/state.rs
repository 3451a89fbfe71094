//! The objects of a server, and what S3's requests do with them.

use std::collections::{BTreeMap, VecDeque};
use std::net::TcpStream;
use std::sync::Arc;

use crate::{fault::Fault, request::Request};

/// An object: its bytes and its ETag.
type Object = (Arc<[u8]>, String);

/// The parts of an upload that is not complete, by number.
type Parts = BTreeMap<usize, Arc<[u8]>>;

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) objects: BTreeMap<String, Object>,
    /// The path and the parts of each upload, by id.
    pub(crate) uploads: BTreeMap<String, (String, Parts)>,
    /// Faults of the next requests to paths that end so.
    pub(crate) faults: VecDeque<(String, Fault)>,
    /// The fault of a request, and the number of requests before it.
    pub(crate) later: Option<(usize, Fault)>,
    pub(crate) requests: Vec<Request>,
    /// Connections that stall, which are kept open.
    pub(crate) stalled: Vec<TcpStream>,
    pub(crate) has_tags: bool,
    /// The most objects of one answer to a list.
    pub(crate) page: usize,
    pub(crate) num_versions: u64,
}

/// A status, an ETag, and a text.
pub(crate) type Answered = (u16, Option<String>, String);

impl State {
    pub(crate) fn put(&mut self, path: &str, bytes: &[u8]) -> String {
        self.num_versions += 1;
        let tag = format!("\"v{}\"", self.num_versions);
        self.objects
            .insert(path.into(), (bytes.into(), tag.clone()));
        tag
    }

    /// The fault that the next request meets.
    pub(crate) fn fault(&mut self, path: &str) -> Option<Fault> {
        if let Some((left, fault)) = self.later.take() {
            match left.checked_sub(1) {
                Some(left) => self.later = Some((left, fault)),
                None => return Some(fault),
            }
        }
        let mut faults = self.faults.iter();
        let at = faults.position(|(end, _)| path.ends_with(end))?;
        self.faults.remove(at).map(|(_, fault)| fault)
    }

    /// Does what a request that writes or lists asks for; `None` if it reads an object.
    pub(crate) fn change(&mut self, request: &Request) -> Option<Answered> {
        let path = &request.path;
        let id = request.value("uploadId");
        let missing = |code: &str| Some((404, None, format!("<Code>{code}</Code>")));
        match request.method.as_str() {
            "POST" if request.value("uploads").is_some() => {
                self.num_versions += 1;
                let id = format!("upload-{}", self.num_versions);
                self.uploads
                    .insert(id.clone(), (path.clone(), Parts::new()));
                Some((
                    200,
                    None,
                    format!(
                        "<InitiateMultipartUploadResult><UploadId>{id}</UploadId>\
                         </InitiateMultipartUploadResult>"
                    ),
                ))
            }
            "PUT" if id.is_some() => {
                let Some((_, parts)) = self.uploads.get_mut(id?) else {
                    return missing("NoSuchUpload");
                };
                let number = request.value("partNumber")?.parse().ok()?;
                parts.insert(number, request.body.as_slice().into());
                Some((200, Some(format!("\"part-{number}\"")), String::new()))
            }
            "POST" => {
                let Some((path, parts)) = self.uploads.remove(id?) else {
                    return missing("NoSuchUpload");
                };
                let bytes: Vec<u8> = parts.values().flat_map(|part| part.to_vec()).collect();
                let tag = self.put(&path, &bytes).replace('"', "&quot;");
                let text = format!(
                    "<CompleteMultipartUploadResult><ETag>{tag}</ETag>\
                     </CompleteMultipartUploadResult>"
                );
                Some((200, None, text))
            }
            "PUT" => Some((200, Some(self.put(path, &request.body)), String::new())),
            "DELETE" if id.is_some() => match self.uploads.remove(id?) {
                Some(_) => Some((204, None, String::new())),
                None => missing("NoSuchUpload"),
            },
            "DELETE" => {
                self.objects.remove(path);
                Some((204, None, String::new()))
            }
            _ if request.value("list-type").is_some() => Some((200, None, self.list(request))),
            _ => None,
        }
    }

    /// One page of the objects of a bucket, which is the path of the request.
    fn list(&self, request: &Request) -> String {
        let bucket = format!("{}/", request.path.trim_end_matches('/'));
        let prefix = request.value("prefix").unwrap_or_default();
        let after = request.value("continuation-token").unwrap_or_default();
        let keys = self.objects.iter().filter_map(|(path, (bytes, _))| {
            let key = path.strip_prefix(&bucket)?;
            (key.starts_with(prefix) && key > after).then_some((key, bytes.len()))
        });
        let mut text = "<ListBucketResult>".to_owned();
        let found: Vec<_> = keys.collect();
        let escaped = |key: &str| key.replace('&', "&amp;").replace('<', "&lt;");
        for (key, size) in found.iter().take(self.page) {
            let key = escaped(key);
            text += &format!(
                "<Contents><Key>{key}</Key><Size>{size}</Size>\
                 <LastModified>2026-11-26T10:00:00.000Z</LastModified></Contents>"
            );
        }
        if found.len() > self.page {
            let last = escaped(found[self.page - 1].0);
            text += &format!("<NextContinuationToken>{last}</NextContinuationToken>");
        }
        text + "</ListBucketResult>"
    }
}
