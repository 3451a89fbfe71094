use std::fs;

use super::*;

#[test]
fn a_folder_of_this_host_is_one_of_objects() {
    let dir = tempfile::tempdir().unwrap();
    objects_come_and_go(&*local(&dir));
    a_stopped_upload_leaves_the_old_object(&*local(&dir));
    assert_eq!(fs::read_dir(dir.path().join("a run")).unwrap().count(), 1);
}

#[test]
fn a_file_that_cannot_be_written_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let folder = local(&dir);
    folder.put("step/a", b"1").unwrap();
    for name in ["step/a/b", "step"] {
        let error = folder.put(name, b"2").unwrap_err().to_string();
        let expected = format!("`{}/{name}` cannot be written: ", folder.url());
        assert!(error.starts_with(&expected), "{error}");
    }
    assert_eq!(names(&*folder), ["step/a"]);
    assert_eq!(folder.read("step/a", 9).unwrap(), b"1");
}

#[test]
fn a_folder_that_no_url_names_is_refused() {
    let open = |url: &str| {
        open_folder(url, "a run", &StoreConfig::new())
            .unwrap_err()
            .to_string()
    };
    let error = open("runs/a");
    assert!(
        error.contains("`runs/a` is not the URL of a run: it has no scheme"),
        "{error}"
    );
    assert!(open("file://host/a").contains("write file:///path"));
    #[cfg(not(feature = "object-store"))]
    for url in ["s3://bucket/run", "gs://bucket/run/"] {
        let command = "`cargo build --release -p megaburn --features object-store`";
        assert!(open(url).contains(command), "{}", open(url));
    }
    #[cfg(feature = "object-store")]
    for (url, why) in [
        ("s3://bucket", "add a name"),
        ("http://host/run", "are only read; write s3://"),
        ("ftp://host/run", "only s3://, gs://"),
    ] {
        assert!(open(url).contains(why), "{}", open(url));
    }
}

/// Two writers of one object use two files, so neither cuts or replaces that of the other.
#[test]
fn two_writers_of_an_object_do_not_share_a_file() {
    use std::sync::Mutex;
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (local(&dir), local(&dir));
    let unfinished = || {
        let all = names(&*one);
        all.into_iter()
            .filter(|name| name.starts_with("step/.megaburn-unfinished-"))
            .collect::<Vec<_>>()
    };
    let seen = Mutex::new(Vec::new());
    let bytes = random(5 << 20);
    let inner = Transfer {
        is_stopped: &|| false,
        on_bytes: &|_| *seen.lock().unwrap() = unfinished(),
    };
    let outer = Transfer {
        is_stopped: &|| false,
        on_bytes: &|num_bytes| {
            if num_bytes == 4 << 20 {
                other.upload("step/a", &file_of(b"other"), &inner).unwrap();
            }
        },
    };
    one.upload("step/a", &file_of(&bytes), &outer).unwrap();
    let seen = seen.into_inner().unwrap();
    assert!(seen.len() == 2 && seen[0] != seen[1], "{seen:?}");
    assert!(seen.iter().all(|name| name.ends_with("-a")), "{seen:?}");
    assert_eq!(names(&*one), ["step/a"]);
    assert!(downloaded(&*one, "step/a", bytes.len()) == bytes);
}
