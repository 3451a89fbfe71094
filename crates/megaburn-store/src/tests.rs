//! Folders of this host, and objects on a local server.

mod folders;
#[cfg(feature = "object-store")]
mod remote;
#[cfg(feature = "object-store")]
mod tls;
#[cfg(feature = "object-store")]
mod uploads;

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::sync::Arc;

use tempfile::{TempDir, tempfile};

use crate::{
    config::StoreConfig,
    object_folder::{ObjectFolder, Transfer},
    open::open_folder,
};

const ALWAYS: Transfer<'static> = Transfer {
    is_stopped: &|| false,
    on_bytes: &|_| (),
};

fn local(dir: &TempDir) -> Arc<dyn ObjectFolder> {
    let url = format!("file://{}/a%20run/", dir.path().display());
    open_folder(&url, "a run", &StoreConfig::new()).unwrap()
}

fn random(num_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; num_bytes];
    fastrand::Rng::new().fill(&mut bytes);
    bytes
}

fn file_of(bytes: &[u8]) -> File {
    let mut file = tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn downloaded(folder: &dyn ObjectFolder, name: &str, num_bytes: usize) -> Vec<u8> {
    let mut file = tempfile().unwrap();
    folder
        .download(name, num_bytes as u64, &file, &ALWAYS)
        .unwrap();
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

fn names(folder: &dyn ObjectFolder) -> Vec<String> {
    let listed = folder.list().unwrap();
    listed.into_iter().map(|object| object.name).collect()
}

/// Puts, lists, uploads, downloads, replaces and deletes objects.
fn objects_come_and_go(folder: &dyn ObjectFolder) {
    assert_eq!(names(folder), [""; 0]);
    folder.put("step-1/note", b"mine").unwrap();
    let large = random((8 << 20) + fastrand::usize(1..3 << 20));
    let small = random(fastrand::usize(1..9000));
    for (name, bytes) in [
        ("step-1/a~b +&.bin", &large),
        ("step-1/b", &small),
        ("c", &vec![]),
    ] {
        let sent = folder.upload(name, &file_of(bytes), &ALWAYS).unwrap();
        assert_eq!(sent, bytes.len() as u64);
        assert!(downloaded(folder, name, bytes.len()) == *bytes, "{name}");
    }
    assert_eq!(
        names(folder),
        ["c", "step-1/a~b +&.bin", "step-1/b", "step-1/note"]
    );
    let listed = folder.list().unwrap();
    assert_eq!(listed[1].num_bytes, large.len() as u64);
    assert!(listed.iter().all(|object| object.modified.is_some()));

    folder.put("step-1/note", b"yours").unwrap();
    assert_eq!(folder.read("step-1/note", 5).unwrap(), b"yours");
    let error = folder.read("step-1/note", 4).unwrap_err().to_string();
    assert!(
        error.contains("step-1/note` cannot be read: it has"),
        "{error}"
    );
    let error = folder.read("step-2/note", 4).unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("`{}/step-2/note` cannot be read", folder.url())),
        "{error}"
    );
    let file = tempfile().unwrap();
    let error = folder.download("c", 7, &file, &ALWAYS).unwrap_err();
    assert!(error.to_string().contains("its size was 7"), "{error}");

    for name in ["c", "c", "step-1/b", "step-1/note", "step-1/a~b +&.bin"] {
        folder.delete(name).unwrap();
    }
    assert_eq!(names(folder), [""; 0]);
}

/// A transfer that is stopped after its first bytes changes nothing.
fn a_stopped_upload_leaves_the_old_object(folder: &dyn ObjectFolder) {
    use std::sync::atomic::{AtomicBool, Ordering};
    folder.put("a", b"old").unwrap();
    let has_begun = AtomicBool::new(false);
    let transfer = Transfer {
        is_stopped: &|| has_begun.load(Ordering::Relaxed),
        on_bytes: &|_| has_begun.store(true, Ordering::Relaxed),
    };
    let bytes = random((40 << 20) + 1);
    let error = folder
        .upload("a", &file_of(&bytes), &transfer)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("/a` was not written, because the work was given up"),
        "{error}"
    );
    assert_eq!(folder.read("a", 3).unwrap(), b"old");
    assert_eq!(names(folder), ["a"]);
}
