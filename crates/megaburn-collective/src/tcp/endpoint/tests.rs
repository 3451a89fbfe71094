use std::{
    net::{Ipv4Addr, TcpStream},
    sync::{Arc, Barrier},
    thread,
    time::Duration,
};

use burn::tensor::{Bytes, DType};

use super::{Endpoint, Pass};
use crate::{
    call::{Call, Collective},
    clock,
    deadline::Deadline,
    fault::TransportError,
    message::{Message, Payload},
    options::GroupOptions,
    tcp::{
        JobToken,
        acceptor::Acceptor,
        socket,
        transport::TcpTransport,
        wire::{ControlMessage, Hello, VERSION, read_frame, write_frame},
    },
    transport::Transport,
};

const NONCE: u64 = 77;
const PATIENT: Duration = Duration::from_secs(20);

fn token() -> JobToken {
    JobToken::secret("s3cret")
}

/// Ranks without connections that know each other's ports.
fn world(size: usize) -> (Vec<Arc<TcpTransport>>, Vec<u16>) {
    let listeners: Vec<_> = (0..size)
        .map(|_| socket::listen("127.0.0.1", 0).unwrap())
        .collect();
    let ports: Vec<_> = listeners
        .iter()
        .map(|listener| listener.local_addr().unwrap().port())
        .collect();
    let rank = |(rank, listener)| {
        let pass = Pass {
            token: token(),
            nonce: NONCE,
        };
        let home = Ipv4Addr::LOCALHOST.into();
        let endpoint = Endpoint::new((rank, size), GroupOptions::default(), pass, home);
        endpoint.learn(ports.iter().map(|port| (None, *port)).collect());
        let acceptor = Acceptor::start(listener, &endpoint).unwrap();
        Arc::new(TcpTransport::new(endpoint, Some(acceptor)))
    };
    (listeners.into_iter().enumerate().map(rank).collect(), ports)
}

fn call() -> Call {
    Call {
        op: Collective::Send,
        seq: 0,
        dtype: DType::U8,
        shape: vec![1],
    }
}

fn message(value: u8) -> Message {
    Message {
        call: call(),
        payload: Payload::new(Bytes::from_bytes_vec(vec![value])),
    }
}

fn introduction(token: JobToken, nonce: u64, to: usize) -> ControlMessage {
    ControlMessage::Peer {
        token,
        nonce,
        from: 0,
        to,
    }
}

/// The answer at a port to a first message.
fn answer(port: u16, word: &ControlMessage) -> (TcpStream, Option<ControlMessage>) {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let payload = matches!(word, ControlMessage::Data(_)).then(|| message(9).payload);
    write_frame(&stream, word, 5, payload.as_ref()).unwrap();
    let answer = read_frame(&stream).unwrap().map(|frame| frame.word);
    (stream, answer)
}

#[test]
fn who_does_not_show_the_runs_token_is_refused_while_the_run_lasts() {
    let (ranks, ports) = world(2);
    let hello = Hello {
        version: VERSION,
        token: token(),
        build: String::new(),
        rank: 0,
        world_size: 2,
        seed: 0,
        port: 1,
        host: String::new(),
        on_host: None,
        failure: None,
    };
    let strangers = [
        introduction(JobToken::default(), NONCE, 1),
        introduction(JobToken::secret("another"), NONCE, 1),
        introduction(token(), NONCE + 1, 1),
        introduction(token(), NONCE, 0),
        ControlMessage::Hello(hello),
        ControlMessage::Data(call()),
        ControlMessage::Abort {
            by: 0,
            reason: "no".into(),
            is_hang: false,
        },
        ControlMessage::Leave,
    ];
    for word in strangers {
        let (stream, answer) = answer(ports[1], &word);
        let Some(ControlMessage::Refused { why }) = answer else {
            panic!("{word:?}: {answer:?}")
        };
        assert!(
            why.contains("job token") && !why.contains("s3cret"),
            "{why}"
        );
        assert!(read_frame(&stream).unwrap().is_none(), "it is kept");
    }
    // Nothing has reached the rank, and its peer is welcome.
    assert!(ranks[1].gone(0).is_none() && ranks[1].gone(1).is_none());
    assert!(ranks[1].arrived(0, 5).is_none());
    let (_peer, answer) = answer(ports[1], &introduction(token(), NONCE, 1));
    assert!(
        matches!(answer, Some(ControlMessage::Welcome)),
        "{answer:?}"
    );
}

/// Each rank's first message opens a connection; one of each two is kept, and nothing is lost.
#[test]
fn ranks_that_call_each_other_at_once_keep_one_connection() {
    for _ in 0..20 {
        let (ranks, _) = world(4);
        let start = Barrier::new(ranks.len());
        thread::scope(|scope| {
            for rank in &ranks {
                let (start, size) = (&start, ranks.len());
                scope.spawn(move || {
                    start.wait();
                    let others = || (1..size).map(|step| (rank.rank() + step) % size);
                    for to in others() {
                        let value = rank.rank() as u8;
                        rank.send(to, 3, message(value), Deadline::after(PATIENT))
                            .unwrap();
                    }
                    for from in others() {
                        let got = rank.receive(from, 3, Deadline::after(PATIENT)).unwrap();
                        assert_eq!(got.payload.as_slice(), [from as u8]);
                    }
                });
            }
        });
        for rank in &ranks {
            assert_eq!(rank.endpoint().open_lines().len(), 3);
        }
    }
}

/// A rank that waits for one to which it has no connection hears how that one ended.
#[test]
fn a_rank_that_left_before_the_first_message_is_named() {
    let (mut ranks, _) = world(3);
    drop(ranks.pop());
    let begin = clock::now();
    let error = ranks[1]
        .receive(2, 3, Deadline::after(PATIENT))
        .unwrap_err();
    let TransportError::Lost { peer: 2, why } = error else {
        panic!("{error:?}")
    };
    assert!(why.contains("it finished and left"), "{why}");
    assert!(clock::now() - begin < PATIENT / 2);
}

/// Rank 1 answers no caller. Behind it are ranks 3, 4 and 7.
#[test]
fn a_failure_passes_a_rank_that_does_not_answer() {
    let (mut ranks, _) = world(8);
    // Its port stays open, like the port of a stopped process.
    let silent = ranks.remove(1);
    silent.endpoint().mailbox.abort(1, "it has stopped", false);
    let _line = silent.endpoint().lock();
    let begin = clock::now();
    ranks[4].abort(5, "its disk is full", true);
    for rank in &ranks {
        let me = rank.rank();
        let heard = rank.mailbox().wait_gone(me, begin + PATIENT).unwrap();
        let reason = "its disk is full".to_string();
        let expected = TransportError::Aborted {
            by: 5,
            reason,
            is_hang: true,
        };
        assert_eq!(heard, expected, "rank {me}");
    }
    assert!(clock::now() - begin < PATIENT / 4);
}
