//! Accepts the launchers of a job and reads what they send.

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::Sender,
    },
    thread,
    time::Duration,
};

use megaburn_collective::JobToken;

use super::wire::{Connection, FromAgent, FromCoordinator, Hello, describe, is_silence};

/// What arrives from a launcher, with the number of its connection.
pub(super) enum Incoming {
    Hello(Hello, Connection),
    Said(FromAgent),
    Lost { why: String, is_silent: bool },
}

/// Listens at the address of the job if it is this host's own only, else on all interfaces.
pub(super) fn listen(addr: &str, port: u16) -> io::Result<TcpListener> {
    let addr = if addr == "localhost" {
        "127.0.0.1"
    } else {
        addr
    };
    let loopback = addr.parse::<IpAddr>().ok().filter(IpAddr::is_loopback);
    let listener = match loopback {
        Some(ip) => TcpListener::bind((ip, port)),
        None => {
            TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|error| match error.kind() {
                ErrorKind::AddrInUse => Err(error),
                _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
            })
        }
    }?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Accepts launchers, each served by a thread.
pub(super) fn accept(
    listener: &TcpListener,
    sender: &Sender<(usize, Incoming)>,
    token: &JobToken,
    is_over: &AtomicBool,
) {
    let mut id = 0;
    while !is_over.load(Ordering::Relaxed) {
        let Ok((stream, _)) = listener.accept() else {
            thread::sleep(Duration::from_millis(20));
            continue;
        };
        let (sender, token) = (sender.clone(), token.clone());
        let serve = move || {
            let (why, is_silent) = match serve(id, stream, &sender, &token) {
                Ok(why) => (why, false),
                Err(error) => (describe(&error), is_silence(&error)),
            };
            let _ = sender.send((id, Incoming::Lost { why, is_silent }));
        };
        // Without a thread the launcher is not served, and tries again.
        let _ = thread::Builder::new().name("agent".into()).spawn(serve);
        id += 1;
    }
}

/// Passes on what a launcher sends; returns why that ends.
fn serve(
    id: usize,
    stream: TcpStream,
    sender: &Sender<(usize, Incoming)>,
    token: &JobToken,
) -> io::Result<String> {
    stream.set_nonblocking(false)?;
    let connection = Connection::new(stream)?;
    let mut reader = connection.reader(true)?;
    let hello: Hello = reader.read()?;
    if !hello.token.agrees(token) {
        let why = "it has another job token; give all launchers the same `--job-token`";
        connection.send(&FromCoordinator::Refused { why: why.into() })?;
        return Ok(why.into());
    }
    let _ = sender.send((id, Incoming::Hello(hello, connection)));
    loop {
        let message = reader.read()?;
        if sender.send((id, Incoming::Said(message))).is_err() {
            return Ok("the job is over".into());
        }
    }
}
