//! Chooses a port for rank 0 if the options name none.

use std::{
    io,
    net::{Ipv4Addr, TcpListener, UdpSocket},
    thread,
    time::{Duration, Instant},
};

/// How many free ports are tried before the search is given up.
const TRIES: usize = 1000;

/// A port that no other launcher on this host chooses while this value lives.
///
/// Rank 0 binds the TCP port itself, later. Until then, launchers avoid each other through the UDP
/// port of the same number, which is otherwise unused: the launcher that holds it owns the TCP
/// port.
#[derive(Debug)]
pub(crate) struct ReservedPort {
    pub(crate) number: u16,
    _token: UdpSocket,
}

impl ReservedPort {
    /// Reserves a free port.
    ///
    /// # Errors
    /// No port is free.
    pub(crate) fn take() -> io::Result<Self> {
        Self::first_of(std::iter::repeat_with(megaburn_collective::free_port).take(TRIES))
    }

    fn first_of(ports: impl Iterator<Item = io::Result<u16>>) -> io::Result<Self> {
        for number in ports {
            let number = number?;
            if let Ok(_token) = UdpSocket::bind((Ipv4Addr::LOCALHOST, number)) {
                return Ok(Self { number, _token });
            }
        }
        Err(io::ErrorKind::AddrInUse.into())
    }
}

/// Waits until nothing listens on a port of this host any more, at most for ten seconds: an attempt
/// that has just ended may still hold it. Rank 0 reports a port that stays in use.
pub(crate) fn await_free(port: u16) {
    let until = Instant::now() + Duration::from_secs(10);
    let is_used = || {
        let bound = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port));
        bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
    };
    while is_used() && Instant::now() < until {
        thread::sleep(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_launchers_that_guess_the_same_port_take_different_ones() {
        let guess = megaburn_collective::free_port().unwrap();
        let guesses = || {
            [guess, megaburn_collective::free_port().unwrap()]
                .into_iter()
                .map(Ok)
        };
        let first = ReservedPort::first_of(guesses()).unwrap();
        let second = ReservedPort::first_of(guesses()).unwrap();
        assert_eq!(first.number, guess);
        assert_ne!(second.number, guess);
        drop(first);
        assert_eq!(ReservedPort::first_of(guesses()).unwrap().number, guess);
    }
}
