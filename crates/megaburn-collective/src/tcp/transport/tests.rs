use std::{
    net::{Ipv4Addr, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burn::tensor::{Bytes, DType};

use super::TcpTransport;
use crate::{
    busy::{Busy, Phase, Place},
    call::{Call, Collective},
    deadline::Deadline,
    fault::TransportError,
    message::{Message, Payload},
    options::GroupOptions,
    tcp::{
        JobToken,
        endpoint::{Endpoint, Pass},
        wire::{ControlMessage, Frame, read_frame, write_frame},
    },
    transport::{SILENT, TimeoutProbe, Transport},
};

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    // A rank of another test that dials a port assigned to it may call here first.
    let mut calls = listener.incoming().map(Result::unwrap);
    let ours = |call: &TcpStream| call.peer_addr().ok() == one.local_addr().ok();
    let other = calls.find(ours).unwrap();
    (one, other)
}

/// The endpoint of `rank` with these connections, by rank. No other rank can be reached.
fn transport(rank: usize, streams: Vec<Option<TcpStream>>) -> TcpTransport {
    let pass = Pass {
        token: JobToken::default(),
        nonce: 0,
    };
    let world = (rank, streams.len());
    let home = Ipv4Addr::LOCALHOST.into();
    let endpoint = Endpoint::new(world, GroupOptions::default(), pass, home);
    endpoint.learn(vec![(None, 1); streams.len()]);
    for (from, stream) in streams.into_iter().enumerate() {
        if let Some(stream) = stream {
            endpoint.add(from, stream).unwrap();
        }
    }
    TcpTransport::new(endpoint, None)
}

fn message(len: usize) -> Message {
    let call = Call {
        op: Collective::Send,
        seq: 0,
        dtype: DType::U8,
        shape: vec![len],
    };
    Message {
        call,
        payload: Payload::new(Bytes::from_bytes_vec(vec![7; len])),
    }
}

fn soon(millis: u64) -> Deadline {
    Deadline::after(Duration::from_millis(millis))
}

/// Far more than the system buffers between two sockets.
const HUGE: usize = 64 << 20;

#[test]
fn a_peer_that_takes_nothing_is_a_timeout_and_leaving_it_is_quick() {
    let (mine, stopped) = pair();
    let transport = transport(0, vec![None, Some(mine)]);
    let begin = Instant::now();
    let error = transport.send(1, 0, message(HUGE), soon(300)).unwrap_err();
    assert_eq!(error, TransportError::Timeout);
    transport.abort(0, "it waited and got nothing", true);
    drop(transport);
    assert!(
        begin.elapsed() < Duration::from_secs(4),
        "{:?}",
        begin.elapsed()
    );
    drop(stopped);
}

#[test]
fn a_failure_elsewhere_frees_who_is_stuck_writing() {
    let (to_stopped, _stopped) = pair();
    let (to_other, other) = pair();
    let streams = vec![None, Some(to_stopped), Some(to_other)];
    let transport = Arc::new(transport(0, streams));
    let stuck = transport.clone();
    let writer = thread::spawn(move || stuck.send(1, 0, message(HUGE), soon(30_000)));
    thread::sleep(Duration::from_millis(100));
    let begin = Instant::now();
    self::transport(2, vec![Some(other), None, None]).abort(2, "it broke", true);
    let error = writer.join().unwrap().unwrap_err();
    assert_eq!(
        error,
        TransportError::Aborted {
            by: 2,
            reason: "it broke".into(),
            is_hang: true,
        }
    );
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "{:?}",
        begin.elapsed()
    );
}

#[test]
fn a_connection_that_breaks_is_a_lost_peer_for_senders_and_receivers() {
    let (mine, theirs) = pair();
    let transport = transport(1, vec![Some(mine), None]);
    drop(theirs);
    let lost = |error| matches!(error, TransportError::Lost { peer: 0, .. });
    assert!(lost(transport.receive(0, 5, soon(10_000)).unwrap_err()));
    assert!(lost(
        transport.send(0, 5, message(1), soon(10_000)).unwrap_err()
    ));
}

#[test]
fn bytes_that_are_no_frame_are_a_lost_peer() {
    let (mine, mut theirs) = pair();
    let transport = transport(1, vec![Some(mine), None]);
    std::io::Write::write_all(&mut theirs, &[0; 100]).unwrap();
    let error = transport.receive(0, 5, soon(10_000)).unwrap_err();
    let TransportError::Lost { peer: 0, why } = error else {
        panic!("{error:?}")
    };
    assert!(why.contains("does not speak"), "{why}");
}

#[test]
fn all_that_was_sent_arrives_though_its_sender_left_at_once() {
    let (mine, theirs) = pair();
    let sender = transport(0, vec![None, Some(mine)]);
    let receiver = transport(1, vec![Some(theirs), None]);
    // Unread data at the sender must not cut off what it sent.
    receiver.send(0, 9, message(100_000), soon(10_000)).unwrap();
    sender.send(1, 3, message(HUGE), soon(20_000)).unwrap();
    drop(sender);
    let got = receiver.receive(0, 3, soon(10_000)).unwrap();
    assert_eq!(got.payload.as_slice().len(), HUGE);
    let error = receiver.receive(0, 3, soon(10_000)).unwrap_err();
    assert_eq!(
        error,
        TransportError::Lost {
            peer: 0,
            why: "it finished and left".into()
        }
    );
}

/// An answer of rank 0 with 1 of 2 bytes done and `limit` ms left.
fn busy(place: Place, limit: u64) -> ControlMessage {
    ControlMessage::TimeoutProbe(TimeoutProbe::Busy(Busy {
        rank: 0,
        phase: Phase::Save,
        place,
        done: 1,
        total: 2,
        idle: Duration::ZERO,
        limit: Duration::from_millis(limit),
    }))
}

/// The peer answers once that it has just left a phase, and then hangs.
#[test]
fn silence_after_a_phase_is_a_timeout_at_once() {
    let (mine, theirs) = pair();
    let transport = transport(1, vec![Some(mine), None]);
    thread::spawn(move || {
        let mut questions = 0;
        while let Ok(Some(Frame { word, .. })) = read_frame(&theirs) {
            let is_question = matches!(word, ControlMessage::TimeoutProbe(TimeoutProbe::Question));
            questions += usize::from(is_question);
            if is_question && questions == 1 {
                write_frame(&theirs, &busy(Place::Left, 100), 0, None).unwrap();
            }
        }
    });
    let begin = Instant::now();
    let error = transport.receive(0, 5, soon(100)).unwrap_err();
    assert_eq!(error, TransportError::Timeout);
    assert!(begin.elapsed() < SILENT, "{:?}", begin.elapsed());
}

/// A busy peer; every third of its answers is lost.
#[test]
fn an_answer_that_is_lost_does_not_end_a_job_and_lasting_silence_does() {
    let (mine, theirs) = pair();
    let transport = transport(1, vec![Some(mine), None]);
    thread::spawn(move || {
        let mut questions = 0;
        while let Ok(Some(Frame { word, .. })) = read_frame(&theirs) {
            let ControlMessage::TimeoutProbe(TimeoutProbe::Question) = word else {
                continue;
            };
            questions += 1;
            let Message { call, payload } = message(1);
            match questions {
                3 | 6 | 9 => Ok(()),
                12 => write_frame(&theirs, &ControlMessage::Data(call), 5, Some(&payload)),
                1..=13 => write_frame(&theirs, &busy(Place::Inside, 100), 0, None),
                _ => Ok(()),
            }
            .unwrap();
        }
    });
    transport.receive(0, 5, soon(100)).unwrap();
    let begin = Instant::now();
    assert_eq!(
        transport.receive(0, 5, soon(100)).unwrap_err(),
        TransportError::Timeout
    );
    let took = begin.elapsed();
    assert!(
        took > SILENT && took < SILENT + Duration::from_secs(2),
        "{took:?}"
    );
}
