//! Rank 0's port where nobody chose one.

use std::{
    io,
    net::{Ipv4Addr, UdpSocket},
};

/// Free ports that are tried before the search is given up.
const TRIES: usize = 1000;

/// A port that no other launcher of this host chooses while this lives.
///
/// Rank 0 binds the TCP port itself, later. Until then launchers keep out of each other's way by the
/// UDP port of the same number, which nothing else uses: who holds it has the TCP port.
#[derive(Debug)]
pub(crate) struct ReservedPort {
    pub(crate) number: u16,
    _token: UdpSocket,
}

impl ReservedPort {
    /// Takes one.
    ///
    /// # Errors
    /// None is free.
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
