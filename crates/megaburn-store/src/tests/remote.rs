//! Folders of stores, with the requests that they send.

use std::time::Duration;

use megaburn_store_server::{Fault, Server};
use rstest::rstest;

use super::*;

/// Short times so that no test waits.
pub(super) fn config(server: &Server) -> StoreConfig {
    let mut config = StoreConfig::new()
        .with_first_delay(Duration::from_millis(1))
        .with_max_tries(3);
    let account = format!(
        "{{\"gcs_base_url\": \"{}\", \"disable_oauth\": true, \"client_email\": \"\", \
         \"private_key\": \"\", \"private_key_id\": \"\"}}",
        server.address
    );
    for (name, value) in [
        ("AWS_ENDPOINT", server.address.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_SKIP_SIGNATURE", "true"),
        ("GOOGLE_SERVICE_ACCOUNT_KEY", account.as_str()),
        ("GOOGLE_ALLOW_HTTP", "true"),
    ] {
        config = config.with_variable(name, value);
    }
    config
}

pub(super) fn s3(config: &StoreConfig) -> Arc<dyn ObjectFolder> {
    open_folder("s3://bucket/runs/a", "a run", config).unwrap()
}

#[rstest]
fn objects_are_kept_in_stores(#[values("s3://b/my%20runs/a", "gs://b/my runs/a/")] url: &str
) {
    let server = Server::start().with_page(2);
    // Objects next to the folder are not in it.
    server.put("/b/my runs/ab/c", b"");
    let folder = open_folder(url, "a run", &config(&server)).unwrap();
    objects_come_and_go(&*folder);
    a_stopped_upload_leaves_the_old_object(&*folder);
    assert_eq!(server.num_uploads(), 0);
    assert_eq!(server.paths(), ["/b/my runs/a/a", "/b/my runs/ab/c"]);
    let sizes = server
        .requests()
        .into_iter()
        .map(|request| request.body.len());
    assert!(sizes.max().unwrap() <= 8 << 20);
}

#[test]
fn writes_are_signed_and_their_errors_name_the_url_and_the_fix() {
    let server = Server::start();
    let config = config(&server)
        .with_variable("AWS_SKIP_SIGNATURE", "false")
        .with_variable("AWS_ACCESS_KEY_ID", "me")
        .with_variable("AWS_SECRET_ACCESS_KEY", "secret");
    let folder = s3(&config);
    folder.put("a", b"1").unwrap();
    folder.delete("a").unwrap();
    let requests = server.requests();
    assert!(requests.len() == 2 && requests.iter().all(|request| request.is_signed));
    for (action, fault, why, fix) in [
        (
            "written",
            403,
            "not allowed (the server answers 403",
            "AWS_ACCESS_KEY_ID",
        ),
        (
            "written",
            404,
            "does not exist (the server answers 404",
            "check the URL",
        ),
        (
            "deleted",
            403,
            "not allowed (the server answers 403",
            "AWS_ACCESS_KEY_ID",
        ),
        (
            "listed",
            403,
            "not allowed (the server answers 403",
            "AWS_ACCESS_KEY_ID",
        ),
        ("listed", 400, "the server answers 400", "check the URL"),
    ] {
        server.fail_after(0, Fault::Status(fault));
        let error = match action {
            "written" => folder.put("a", b"1").unwrap_err(),
            "deleted" => folder.delete("a").unwrap_err(),
            _ => folder.list().unwrap_err(),
        };
        let error = error.to_string();
        assert!(error.starts_with("`s3://bucket/runs/a"), "{error}");
        assert!(
            error.contains(&format!("` cannot be {action}: ")),
            "{error}"
        );
        assert!(error.contains(why) && error.contains(fix), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
}

#[rstest]
fn a_fault_that_passes_is_overcome(
    #[values(Fault::Status(503), Fault::Status(429), Fault::Lost)] fault: Fault,
) {
    let server = Server::start();
    let retries: Arc<std::sync::Mutex<Vec<String>>> = Arc::default();
    let noted = retries.clone();
    let config = config(&server).on_retry(move |retry| {
        noted.lock().unwrap().push(retry.to_string());
    });
    let folder = s3(&config);
    server.fail_after(0, fault);
    folder.put("a", b"12").unwrap();
    server.fail_after(0, fault);
    assert_eq!(names(&*folder), ["a"]);
    server.fail_after(0, fault);
    assert_eq!(downloaded(&*folder, "a", 2), b"12");
    server.fail_after(1, fault);
    assert_eq!(downloaded(&*folder, "a", 2), b"12");
    server.fail_after(0, fault);
    folder.delete("a").unwrap();
    let retries = retries.lock().unwrap();
    assert_eq!(retries.len(), 5, "{retries:?}");
    assert!(retries[0].starts_with("s3://bucket/runs/a/a (the whole object): "));
    assert!(retries[3].contains("/a (bytes 0 to 2): ") && retries[3].contains("try 2 of 3"));
}

#[test]
fn a_server_that_keeps_failing_is_named_with_what_was_asked_for() {
    let server = Server::start();
    let folder = s3(&config(&server));
    (0..3).for_each(|_| server.fail("/a", Fault::Status(500)));
    let error = folder.put("a", b"1").unwrap_err().to_string();
    let expected =
        "`s3://bucket/runs/a/a` cannot be written: 3 requests for the whole object failed";
    assert!(error.starts_with(expected), "{error}");
    assert!(
        error.contains("the last: the server answers 500"),
        "{error}"
    );
    assert!(error.ends_with("and start again"), "{error}");
}
