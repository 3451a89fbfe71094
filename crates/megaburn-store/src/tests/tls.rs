use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::thread;

use super::*;
use crate::location::Location;

/// Starts a server that only greets its clients, with a certificate that no host trusts
/// (`tests/tools/tls.sh`), and returns its port.
fn start() -> u16 {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tls");
    let certificate = fs::read(fixtures.join("cert.der")).unwrap().into();
    let key = fs::read(fixtures.join("key.der"))
        .unwrap()
        .try_into()
        .unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for connection in listener.incoming() {
            let mut greeting = rustls::ServerConnection::new(config.clone()).unwrap();
            // The client refuses the certificate.
            let _ = greeting.complete_io(&mut connection.unwrap());
        }
    });
    port
}

#[test]
fn a_server_with_an_unknown_certificate_is_an_error_at_once() {
    let url = format!("https://localhost:{}/web", start());
    let retries: Arc<std::sync::Mutex<usize>> = Arc::default();
    let counted = retries.clone();
    let config = StoreConfig::new().on_retry(move |_| *counted.lock().unwrap() += 1);
    let location = Location::open(&url, "a data set", &config).unwrap();
    let error = location
        .object(".bin")
        .unwrap()
        .version()
        .unwrap_err()
        .to_string();
    assert!(error.contains("invalid peer certificate"), "{error}");
    assert!(error.contains("certificates in SSL_CERT_FILE"), "{error}");
    assert_eq!(*retries.lock().unwrap(), 0);
}
