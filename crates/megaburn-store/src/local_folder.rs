use std::collections::hash_map::RandomState;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use crate::{
    error::{Obstacle, StoreError},
    object_folder::{ListedObject, ObjectFolder, Transfer},
};

/// Bytes that are copied at once.
const BLOCK: usize = 4 << 20;
/// The beginning of the name of a file of a `file://` folder that is being written, or that a killed
/// process left.
pub const UNFINISHED: &str = ".megaburn-unfinished-";

/// A folder of this host, of which each file is an object. A file is written under another name,
/// synced and renamed.
#[derive(Debug)]
pub(crate) struct LocalFolder {
    url: String,
    path: PathBuf,
}

impl LocalFolder {
    pub(crate) fn new(url: &str, path: PathBuf) -> Self {
        Self {
            url: url.into(),
            path,
        }
    }

    fn error(&self, name: &str, action: &'static str) -> impl Fn(io::Error) -> StoreError {
        let url = format!("{}/{name}", self.url);
        move |source| {
            let (obstacle, remedy) = match source.kind() {
                ErrorKind::NotFound => (Obstacle::Missing, "check the path"),
                ErrorKind::PermissionDenied => (Obstacle::Denied, "check the rights of the caller"),
                _ => (Obstacle::Other, "check the disk, and start again"),
            };
            StoreError::Object {
                url: url.clone(),
                action,
                obstacle,
                why: source.to_string(),
                remedy: remedy.into(),
            }
        }
    }

    /// Writes a file with `fill`, and gives it its name when it is complete.
    fn write(
        &self,
        name: &str,
        fill: impl FnOnce(&mut File) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let failed = self.error(name, "written");
        let path = self.path.join(name);
        let above = path.parent().unwrap_or(&self.path);
        fs::create_dir_all(above).map_err(&failed)?;
        let unfinished = above.join(unfinished_name(name));
        let mut file = File::create_new(&unfinished).map_err(&failed)?;
        let write = || {
            fill(&mut file)?;
            file.sync_all().map_err(&failed)?;
            fs::rename(&unfinished, &path).map_err(&failed)?;
            File::open(above)
                .and_then(|above| above.sync_all())
                .map_err(&failed)
        };
        write().inspect_err(|_| {
            // The file may have its name already, and the error before this one is to be reported.
            let _ = fs::remove_file(&unfinished);
        })
    }

    fn list_in(&self, folder: &Path, above: &str, found: &mut Vec<ListedObject>) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let listed = match entry.metadata() {
                Ok(listed) => listed,
                // Another process has just removed it.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            if listed.is_dir() {
                self.list_in(&entry.path(), &format!("{above}{name}/"), found)?;
            } else if listed.is_file() {
                found.push(ListedObject {
                    name: format!("{above}{name}"),
                    num_bytes: listed.len(),
                    modified: listed.modified().ok(),
                });
            }
        }
        Ok(())
    }
}

impl ObjectFolder for LocalFolder {
    fn url(&self) -> &str {
        &self.url
    }

    fn list(&self) -> Result<Vec<ListedObject>, StoreError> {
        let mut found = Vec::new();
        match self.list_in(&self.path, "", &mut found) {
            Err(error) if error.kind() == ErrorKind::NotFound && !self.path.exists() => {}
            listed => listed.map_err(self.error("", "listed"))?,
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    fn read(&self, name: &str, max_bytes: u64) -> Result<Vec<u8>, StoreError> {
        let failed = self.error(name, "read");
        let file = File::open(self.path.join(name)).map_err(&failed)?;
        let mut bytes = Vec::new();
        let most = max_bytes.saturating_add(1);
        file.take(most).read_to_end(&mut bytes).map_err(&failed)?;
        if bytes.len() as u64 > max_bytes {
            return Err(failed(io::Error::other(format!(
                "it has more than {max_bytes} bytes"
            ))));
        }
        Ok(bytes)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let failed = self.error(name, "written");
        self.write(name, |file| file.write_all(bytes).map_err(&failed))
    }

    fn upload(&self, name: &str, from: &File, transfer: &Transfer<'_>) -> Result<u64, StoreError> {
        let url = format!("{}/{name}", self.url);
        let num_bytes = from.metadata().map_err(file_error(&url, "read"))?.len();
        let failed = self.error(name, "written");
        self.write(name, |to| {
            let read = |bytes: &mut [u8], at| read_exact_at(from, bytes, at);
            copy(num_bytes, transfer, |bytes, at| {
                read(bytes, at).map_err(file_error(&url, "read"))?;
                to.write_all(bytes).map_err(&failed)
            })?
            .then_some(())
            .ok_or_else(|| StoreError::Cancelled {
                url: url.clone(),
                action: "written",
            })
        })?;
        Ok(num_bytes)
    }

    fn download(
        &self,
        name: &str,
        num_bytes: u64,
        to: &File,
        transfer: &Transfer<'_>,
    ) -> Result<(), StoreError> {
        let url = format!("{}/{name}", self.url);
        let failed = self.error(name, "read");
        let from = File::open(self.path.join(name)).map_err(&failed)?;
        let found = from.metadata().map_err(&failed)?.len();
        if found != num_bytes {
            let why = format!("its size was {num_bytes} before, and is {found}");
            return Err(StoreError::Changed { url, why });
        }
        let is_whole = copy(num_bytes, transfer, |bytes, at| {
            read_exact_at(&from, bytes, at).map_err(&failed)?;
            (&mut &*to)
                .write_all(bytes)
                .map_err(file_error(&url, "written"))
        })?;
        match is_whole {
            true => Ok(()),
            false => Err(StoreError::Cancelled {
                url,
                action: "read",
            }),
        }
    }

    fn delete(&self, name: &str) -> Result<(), StoreError> {
        let path = self.path.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            removed => removed.map_err(self.error(name, "deleted"))?,
        }
        // A store has no empty folders. This fails for one that is not empty, which stays.
        if let Some(above) = path.parent().filter(|above| *above != self.path) {
            let _ = fs::remove_dir(above);
        }
        Ok(())
    }
}

/// The name under which a file is written at first. Processes of several hosts may write into one
/// folder, so it has a random part.
fn unfinished_name(name: &str) -> String {
    let random = RandomState::new().build_hasher().finish();
    let name = name.rsplit('/').next().unwrap_or(name);
    format!("{UNFINISHED}{random:016x}-{name}")
}

/// Calls `block` for one block of a file after another; whether all were copied.
fn copy(
    num_bytes: u64,
    transfer: &Transfer<'_>,
    mut block: impl FnMut(&mut [u8], u64) -> Result<(), StoreError>,
) -> Result<bool, StoreError> {
    let mut bytes = vec![0; BLOCK.min(usize::try_from(num_bytes).unwrap_or(BLOCK))];
    let mut at = 0;
    while at < num_bytes {
        if (transfer.is_stopped)() {
            return Ok(false);
        }
        let count = (num_bytes - at).min(BLOCK as u64);
        block(&mut bytes[..count as usize], at)?;
        (transfer.on_bytes)(count);
        at += count;
    }
    Ok(true)
}

/// Reads at a position, so that the file can be read by several threads.
pub(crate) fn read_exact_at(file: &File, bytes: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, at)
}

/// The error of a file of this host that is read or written for an object.
pub(crate) fn file_error(url: &str, action: &'static str) -> impl Fn(io::Error) -> StoreError {
    let url = url.to_owned();
    move |source| StoreError::File {
        url: url.clone(),
        action,
        source,
    }
}
