//! The kinds of URLs, and where their settings come from.

use std::env;
use std::process::Command;

use rstest::rstest;

use super::*;

/// The URL and the cache for a process that a test starts.
const URL: &str = "MEGABURN_REMOTE_URL";
const CACHE: &str = "MEGABURN_REMOTE_CACHE";

#[rstest]
#[case(&[("AWS_SKIP_SIGNATURE", "true")], false)]
#[case(&[("AWS_ACCESS_KEY_ID", "me"), ("AWS_SECRET_ACCESS_KEY", "secret")], true)]
fn objects_of_s3_are_read(#[case] variables: &[(&str, &str)], #[case] is_signed: bool) {
    let fixture = Fixture::new(20_000);
    fixture.upload("/bucket/a folder/web");
    let mut config = fixture
        .config()
        .with_variable("AWS_ENDPOINT", &fixture.server.address);
    config = config.with_variable("AWS_ALLOW_HTTP", "true");
    for (name, value) in variables {
        config = config.with_variable(*name, *value);
    }
    for url in ["s3://bucket/a%20folder/web", "s3://bucket/a folder/web.bin"] {
        let set = IndexedDataset::open_with(url, &config).unwrap();
        assert_eq!(all(&set), all(&fixture.local()));
        assert_eq!(
            set.fingerprint().unwrap(),
            fixture.local().fingerprint().unwrap()
        );
    }
    let requests = fixture.server.requests();
    assert!(
        requests
            .iter()
            .all(|request| request.is_signed == is_signed)
    );
    let set = IndexedDataset::open_with("s3://bucket/a folder/web", &config).unwrap();
    assert!(!format!("{config:?} {set:?}").contains("secret"));
    fixture.server.fail(".bin", Fault::Status(403));
    let error = IndexedDataset::open_with("s3://bucket/a folder/web", &config).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("credentials in AWS_ACCESS_KEY_ID"),
        "{error}"
    );
}

#[test]
fn objects_of_google_are_read() {
    let fixture = Fixture::new(20_000);
    fixture.upload("/bucket/folder/web");
    let config = fixture
        .config()
        .with_variable("GOOGLE_BASE_URL", &fixture.server.address)
        .with_variable("GOOGLE_ALLOW_HTTP", "true")
        .with_variable("GOOGLE_SKIP_SIGNATURE", "true");
    let set = IndexedDataset::open_with("gs://bucket/folder/web", &config).unwrap();
    assert_eq!(all(&set), all(&fixture.local()));
    let error = IndexedDataset::open_with("gs://bucket/folder/books", &config).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("folder/books.idx` cannot be read: it does not exist")
    );
}

#[rstest]
#[case("/b/100% of [a]~b/web", "100%25%20of%20[a]~b/web")]
#[case("/b/c/a+b=c&d", "c/a+b=c&d")]
fn names_have_any_characters(#[case] path: &str, #[case] in_url: &str) {
    let fixture = Fixture::new(1_000);
    fixture.upload(path);
    let config = fixture
        .config()
        .with_variable("AWS_ENDPOINT", &fixture.server.address)
        .with_variable("AWS_ALLOW_HTTP", "true")
        .with_variable("AWS_SKIP_SIGNATURE", "true");
    let address = &fixture.server.address;
    for url in [format!("s3://b/{in_url}"), format!("{address}/b/{in_url}")] {
        let set = IndexedDataset::open_with(url, &config).unwrap();
        assert_eq!(all(&set), all(&fixture.local()));
    }
}

#[test]
fn files_are_read_by_their_url() {
    let fixture = Fixture::new(5_000);
    let path = fixture.dir.path().join("a b");
    for ending in ["bin", "idx"] {
        let from = fixture.prefix().with_extension(ending);
        fs::copy(from, path.with_extension(ending)).unwrap();
    }
    let url = format!("file://{}", path.display()).replace(' ', "%20");
    let set = IndexedDataset::open(url).unwrap();
    assert_eq!(all(&set), all(&fixture.local()));
    let error = IndexedDataset::open("file://host/a").unwrap_err();
    assert!(error.to_string().contains("write file:///path"), "{error}");
    let error = IndexedDataset::open("file:///no/such/set").unwrap_err();
    assert!(
        error
            .to_string()
            .contains("/no/such/set.idx` does not exist"),
        "{error}"
    );
}

/// Not a test, but a process with variables of another one's test.
#[test]
fn read_a_set_of_the_environment() {
    let (Ok(url), Ok(cache)) = (env::var(URL), env::var(CACHE)) else {
        return;
    };
    let config = ObjectStoreConfig::new().with_cache_dir(cache);
    let set = IndexedDataset::open_with(url, &config).unwrap();
    println!("tokens {:?}", all(&set));
}

#[test]
fn settings_come_from_the_environment() {
    let fixture = Fixture::new(2_000);
    fixture.upload("/bucket/web");
    let child = Command::new(env::current_exe().unwrap())
        .args(["--nocapture", "--exact"])
        .arg("remote::tests::stores::read_a_set_of_the_environment")
        .env(URL, "s3://bucket/web")
        .env(CACHE, fixture.cache())
        .env("AWS_ENDPOINT", &fixture.server.address)
        .env("AWS_ALLOW_HTTP", "true")
        .env("AWS_ACCESS_KEY_ID", "me")
        .env("AWS_SECRET_ACCESS_KEY", "secret")
        .output()
        .unwrap();
    let out = String::from_utf8(child.stdout).unwrap();
    let expected = format!("tokens {:?}", all(&fixture.local()));
    assert!(child.status.success() && out.contains(&expected), "{out}");
    assert!(
        fixture
            .server
            .requests()
            .iter()
            .all(|request| request.is_signed)
    );
}

#[rstest]
#[case("ftp://host/web", "only s3://, gs://")]
#[case("s3://bucket", "not a data set; add a name")]
#[case("s3://bucket/folder/", "not a data set; add a name")]
#[case("s3:///web", "it names no bucket or host")]
#[case("http://me:secret@host/web", "a user or a password")]
#[case("https://host/web?token=1", "a query or a fragment")]
#[case("http://host:port/web", "invalid port number")]
fn a_url_that_cannot_be_used_is_refused(#[case] url: &str, #[case] why: &str) {
    let error = IndexedDataset::open(url).unwrap_err().to_string();
    assert!(
        error.contains("is not the URL of a data set") && error.contains(why),
        "{error}"
    );
}

#[test]
fn settings_that_read_nothing_are_refused() {
    let fixture = Fixture::new(100);
    for config in [
        fixture.config().with_block_bytes(0),
        fixture.config().with_max_tries(0),
    ] {
        let error = IndexedDataset::open_with(fixture.url(), &config).unwrap_err();
        assert!(
            error.to_string().contains("is 0 but must be at least 1"),
            "{error}"
        );
    }
}
