//! Uploads in parts: the old object or the new one, and no parts that remain.

use megaburn_store_server::{Fault, Server};
use rstest::rstest;

use super::{
    remote::{config, s3},
    *,
};

const PATH: &str = "/bucket/runs/a/rank-00000.safetensors";
const NAME: &str = "rank-00000.safetensors";

/// Two parts, of which the last is ragged.
fn two_parts() -> Vec<u8> {
    random((8 << 20) + fastrand::usize(1..100_000))
}

/// Requests of an upload of two parts: its beginning, the parts, and its completion.
const NUM_REQUESTS: usize = 4;

#[rstest]
fn an_upload_that_fails_at_any_request_is_aborted(
    #[values(Fault::Status(503), Fault::Status(403), Fault::Lost, Fault::Inside)] fault: Fault,
    #[values(false, true)] is_replaced: bool,
) {
    for at in 0..NUM_REQUESTS {
        let server = Server::start();
        if is_replaced {
            server.put(PATH, b"old");
        }
        let folder = s3(&config(&server).with_max_tries(1));
        server.fail_after(at, fault);
        let new = two_parts();
        let uploaded = folder.upload(NAME, &file_of(&new), &ALWAYS);
        assert_eq!(server.num_faults(), 0);
        let found = server.object(PATH);
        let is_new = found.as_ref() == Some(&new);
        let is_old = found == is_replaced.then(|| b"old".to_vec());
        if let Err(error) = uploaded {
            let error = error.to_string();
            assert!(
                error.starts_with("`s3://bucket/runs/a/rank-00000.safetensors` cannot"),
                "{error}"
            );
            assert!(
                is_old || (is_new && at == 3 && fault == Fault::Lost),
                "at {at}"
            );
        } else {
            // A part needs no text in its answer.
            assert!(fault == Fault::Inside && (at == 1 || at == 2), "at {at}");
        }
        // The id of an upload whose beginning was not answered is not known.
        let unknown = usize::from(at == 0 && fault == Fault::Lost);
        assert_eq!(server.num_uploads(), unknown, "at {at}");
    }
}

#[rstest]
fn an_upload_with_a_fault_that_passes_is_whole(
    #[values(Fault::Status(503), Fault::Lost)] fault: Fault,
) {
    for at in 0..NUM_REQUESTS {
        let server = Server::start();
        let folder = s3(&config(&server));
        server.fail_after(at, fault);
        let new = two_parts();
        let sent = folder.upload(NAME, &file_of(&new), &ALWAYS).unwrap();
        assert_eq!((sent, server.num_faults()), (new.len() as u64, 0));
        assert!(server.object(PATH).unwrap() == new, "at {at}");
        let unknown = usize::from(at == 0 && fault == Fault::Lost);
        assert_eq!(server.num_uploads(), unknown, "at {at}");
    }
}

#[test]
fn an_upload_that_the_server_has_forgotten_is_begun_again() {
    let server = Server::start();
    let folder = s3(&config(&server));
    let new = two_parts();
    let is_first = std::sync::atomic::AtomicBool::new(true);
    let forget = |_| {
        if is_first.swap(false, std::sync::atomic::Ordering::Relaxed) {
            server.forget_uploads();
        }
    };
    let transfer = Transfer {
        on_bytes: &forget,
        ..ALWAYS
    };
    folder.upload(NAME, &file_of(&new), &transfer).unwrap();
    assert!(server.object(PATH).unwrap() == new);
    assert_eq!(server.num_uploads(), 0);
}
