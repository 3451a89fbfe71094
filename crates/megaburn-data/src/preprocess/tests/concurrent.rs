//! Several processes that write the same data set.

use std::thread;

use super::*;

#[test]
fn a_second_process_waits_for_nothing_and_is_refused() {
    let dir = folder(&[("a.jsonl", b"{\"text\": \"x\"}".into())]);
    let config = config(dir.path(), &["a.jsonl"]);
    let mut refusal = String::new();
    let found = config.run(&ByteTokenizer, |event| {
        if let PreprocessEvent::Progress { .. } = event {
            refusal = run(&config).unwrap_err();
        }
    });
    assert!(
        found.is_ok() && refusal.contains("is being written by another process"),
        "{refusal}"
    );
}

/// Threads lock a folder as processes do.
#[test]
fn of_many_processes_only_one_begins() {
    let dir = folder(&[("a.jsonl", b"{\"text\": \"x\"}".into())]);
    for round in 0..150 {
        let config = config(dir.path(), &["a.jsonl"]).with_num_workers(1);
        let attempt = || {
            let mut has_begun = false;
            let ended = config.run(&ByteTokenizer, |event| {
                has_begun |= matches!(event, PreprocessEvent::Progress { .. });
            });
            match ended {
                Ok(_) => {}
                Err(DataError::Busy { .. } | DataError::Exists { .. }) => {
                    assert!(!has_begun, "it was refused after it had encoded");
                    return 0;
                }
                Err(error) => panic!("{round}: {error}"),
            }
            1
        };
        let num_written = thread::scope(|scope| {
            let threads: Vec<_> = (0..6).map(|_| scope.spawn(attempt)).collect();
            let written = threads.into_iter().map(|thread| thread.join().unwrap());
            written.sum::<usize>()
        });
        assert_eq!(num_written, 1, "{round}");
        assert_eq!(
            names(dir.path()),
            ["a.jsonl", "out.bin", "out.idx", "out.megaburn"]
        );
        clear(dir.path());
    }
}
