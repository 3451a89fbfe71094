use std::net::TcpListener;

use rstest::rstest;

use super::*;

#[rstest]
#[case(Fault::Status(503), "503")]
#[case(Fault::Status(500), "500")]
#[case(Fault::Status(429), "429")]
#[case(Fault::Stall, "timed out")]
#[case(Fault::Silence, "timed out")]
#[case(Fault::Reset, "")]
fn a_fault_that_passes_is_reported_and_overcome(
    #[case] fault: Fault,
    #[case] why: &str,
    #[values(".bin", ".idx", ".megaburn")] ending: &str,
) {
    let fixture = Fixture::new(20_000);
    // A request for a size has no body, which `Stall` and `Reset` need.
    for _ in 0..2 {
        fixture.server.fail(ending, fault);
    }
    // A busy machine may need longer than this for an answer, so there are many requests.
    let config = fixture.config().with_max_tries(30);
    let config = config.with_read_timeout(Duration::from_millis(100));
    let set = IndexedDataset::open_with(fixture.url(), &config).unwrap();
    set.check_tokenizer(&ByteTokenizer).unwrap();
    assert_eq!(all(&set), all(&fixture.local()));
    assert_eq!(fixture.server.num_faults(), 0);
    let retries = fixture.retries();
    let is_named = |found: &String| found.contains(why) || found.contains("timed out");
    assert!(!retries.is_empty(), "{retries:?}");
    assert!(retries.iter().all(is_named), "{retries:?}");
}

#[rstest]
#[case(Fault::Short, "bytes were sent")]
#[case(Fault::Long, "bytes were sent")]
fn a_body_of_another_length_is_asked_for_again(#[case] fault: Fault, #[case] why: &str) {
    let fixture = Fixture::new(20_000);
    let set = fixture.open().unwrap();
    fixture.server.fail(".bin", fault);
    assert_eq!(all(&set), all(&fixture.local()));
    let retries = fixture.retries();
    assert!(
        retries.len() == 1 && retries[0].contains(why),
        "{retries:?}"
    );
}

#[test]
fn a_source_that_keeps_failing_is_named_with_its_range_and_the_last_cause() {
    let fixture = Fixture::new(20_000);
    let set = fixture.open().unwrap();
    (0..4).for_each(|_| fixture.server.fail(".bin", Fault::Status(503)));
    let error = set.tokens_at(10..20, 260).unwrap_err().to_string();
    let expected = format!(
        "`{}.bin` cannot be read: 4 requests for bytes 20 to 40 failed in",
        fixture.url()
    );
    assert!(error.starts_with(&expected), "{error}");
    assert!(
        error.contains("the last: the server answers 503"),
        "{error}"
    );
    assert!(
        error.ends_with("check the URL and the network, and start again"),
        "{error}"
    );
    let events = fixture.events.lock().unwrap().clone();
    let tries = events.iter().filter_map(|event| match event {
        ObjectStoreEvent::Retrying(retry) => {
            assert!(retry.url.ends_with("/dir/web.bin") && retry.max_tries == 4);
            assert_eq!(retry.request, "bytes 20 to 40");
            Some(retry.num_tries)
        }
        _ => None,
    });
    assert_eq!(tries.collect::<Vec<_>>(), [1, 2, 3]);
    // The source works again.
    assert_eq!(all(&set), all(&fixture.local()));
}

#[test]
fn a_source_without_a_server_is_named_within_the_time_that_was_set() {
    let fixture = Fixture::new(100);
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let config = fixture.config().with_max_tries(u32::MAX);
    let config = config.with_retry_timeout(Duration::from_millis(50));
    let opened = IndexedDataset::open_with(format!("http://{port}/web"), &config);
    let error = opened.unwrap_err().to_string();
    assert!(error.contains("/web.idx` cannot be read: "), "{error}");
    assert!(error.contains("for its size failed in 0."), "{error}");
    assert!(error.contains("Connection refused"), "{error}");
}

#[test]
fn a_request_ends_when_the_time_is_over() {
    let fixture = Fixture::new(3000);
    let config = fixture
        .config()
        .with_retry_timeout(Duration::from_millis(500));
    let set = IndexedDataset::open_with(fixture.url(), &config).unwrap();
    fixture.server.fail(".bin", Fault::Stall);
    let error = set.tokens_at(0..90, 260).unwrap_err().to_string();
    assert!(
        error.contains("1 request for bytes 0 to 4096 failed in 0."),
        "{error}"
    );
}

#[rstest]
#[case(404, "it does not exist (the server answers 404", "check the URL")]
#[case(
    403,
    "it may not be read, or does not exist (the server answers 403",
    "check the rights"
)]
#[case(
    401,
    "it may not be read, or does not exist (the server answers 401",
    "check the rights"
)]
#[case(400, "the server answers 400", "check the URL")]
fn an_answer_that_will_not_change_is_an_error_at_once(
    #[case] status: u16,
    #[case] why: &str,
    #[case] fix: &str,
    #[values(".idx", ".bin")] ending: &str,
) {
    let fixture = Fixture::new(100);
    fixture.server.fail(ending, Fault::Status(status));
    let error = fixture.open().unwrap_err().to_string();
    let expected = format!("`{}{ending}` cannot be read: {why}", fixture.url());
    assert!(
        error.starts_with(&expected) && error.contains(fix),
        "{error}"
    );
    let set = fixture.open().unwrap();
    fixture.server.fail(".bin", Fault::Status(status));
    let error = set.tokens_at(0..9, 260).unwrap_err().to_string();
    assert!(error.contains(why) && error.contains(fix), "{error}");
    assert_eq!(fixture.retries(), [""; 0]);
}

#[rstest]
#[case(".idx")]
#[case(".bin")]
fn a_server_without_ranges_is_an_error_at_once(#[case] ending: &str) {
    let fixture = Fixture::new(3000);
    // The first request asks for the size.
    (0..2).for_each(|_| fixture.server.fail(ending, Fault::NoRange));
    let error = fixture.open().and_then(|set| set.tokens_at(0..9, 260));
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("sends the whole object when a range"),
        "{error}"
    );
    assert!(
        error.contains(&format!("{ending}` cannot be read")),
        "{error}"
    );
    assert_eq!(fixture.retries(), [""; 0]);
}

#[rstest]
#[case(true, 0, "its ETag was")]
#[case(true, -2, "its ETag was")]
#[case(false, 2, "its size was")]
#[case(false, -2, "its size was")]
#[case(false, -30_000, "the server answers 416")]
fn an_object_that_changes_is_an_error(#[case] tags: bool, #[case] more: i64, #[case] why: &str) {
    let fixture = Fixture::new(20_000);
    if !tags {
        fixture.server.without_tags();
    }
    let set = fixture.open().unwrap();
    let end = set.num_tokens();
    set.tokens_at(0..10, 260).unwrap();
    let mut bytes = fs::read(fixture.prefix().with_extension("bin")).unwrap();
    bytes.resize((bytes.len() as i64 + more).max(1000) as usize, 0);
    fixture.server.put("/dir/web.bin", &bytes);
    let error = set.tokens_at(end - 9..end, 260).unwrap_err().to_string();
    assert!(
        error.contains("/dir/web.bin` was changed while it was read: "),
        "{error}"
    );
    assert!(error.contains(why), "{error}");
    assert_eq!(fixture.retries(), [""; 0]);
}

#[test]
fn an_index_that_fails_leaves_no_copy() {
    let fixture = Fixture::new(30_000);
    // The size, then four requests of which the first is answered with half of its bytes.
    fixture.server.fail(".idx", Fault::Status(500));
    fixture.server.fail(".idx", Fault::Reset);
    (0..3).for_each(|_| fixture.server.fail(".idx", Fault::Status(500)));
    let config = fixture.config().with_max_tries(3);
    let error = IndexedDataset::open_with(fixture.url(), &config).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("web.idx` cannot be read: 3 requests"),
        "{error}"
    );
    assert_eq!(names_of(&fixture.cache()), [""; 0]);
    assert_eq!(all(&fixture.open().unwrap()), all(&fixture.local()));
}

#[test]
fn an_index_of_other_tokens_is_refused() {
    let fixture = Fixture::new(1000);
    fixture.server.put("/dir/web.bin", &[0; 10]);
    let error = fixture.open().unwrap_err().to_string();
    assert!(
        error.contains("web.bin` has 10 bytes, but the sequences"),
        "{error}"
    );
}
