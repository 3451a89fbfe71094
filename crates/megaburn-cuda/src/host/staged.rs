//! Numbers that go to the GPU from the device thread, in pinned memory that stays theirs until the copy
//! is over.

use std::cell::RefCell;

use cudarc::driver::sys;

use crate::{
    CudaError,
    events::{Event, PooledEvent},
    streams::Stream,
};

/// Bytes of the smallest piece of memory; others are powers of two.
const SMALLEST: usize = 4096;

/// A piece of pinned memory. It is never given back: there are as many as copies were under way at a time.
struct Piece {
    at: *mut u64,
    bytes: usize,
    reader: Reader,
}

/// Who reads a piece.
enum Reader {
    Unused,
    /// A copy that is over at this point.
    Until(PooledEvent),
    /// A copy that no point is known behind: the piece is its own for ever.
    Unknown,
}

thread_local! {
    /// Those of this device thread, and so of its context.
    static PIECES: RefCell<Vec<Piece>> = const { RefCell::new(Vec::new()) };
}

/// Puts a copy of the numbers to device memory on `stream`. On the device thread, which waits for nothing.
///
/// # Errors
/// The driver refuses, or the host has no pinned memory.
///
/// # Safety
/// `to` is device memory of the current context for as many numbers, which nothing else uses before
/// `stream` has passed the copy.
pub(crate) unsafe fn copy(numbers: &[u64], to: u64, stream: Stream) -> Result<(), CudaError> {
    let bytes = size_of_val(numbers);
    PIECES.with_borrow_mut(|pieces| {
        let free = pieces
            .iter()
            .position(|piece| piece.bytes >= bytes && piece.is_free());
        let index = match free {
            Some(index) => index,
            None => {
                pieces.push(Piece::new(bytes.next_power_of_two().max(SMALLEST))?);
                pieces.len() - 1
            }
        };
        let piece = &mut pieces[index];
        // SAFETY: the piece has room for the numbers, is aligned as the driver aligns memory, and no copy
        // reads it.
        unsafe { std::ptr::copy_nonoverlapping(numbers.as_ptr(), piece.at, numbers.len()) };
        piece.reader = Reader::Unknown;
        // SAFETY: the caller vouches for `to`; the piece is not written, and never freed, before the point
        // that is recorded behind the copy.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, piece.at.cast(), bytes, stream.0) }
            .result()
            .map_err(CudaError::driver("cuMemcpyHtoDAsync of a table"))?;
        piece.reader = Reader::Until(Event::record(stream)?);
        Ok(())
    })
}

impl Piece {
    fn new(bytes: usize) -> Result<Self, CudaError> {
        let mut at = std::ptr::null_mut();
        // SAFETY: the driver writes the address through the pointer.
        let made = unsafe { sys::cuMemHostAlloc(&mut at, bytes, 0) };
        made.result().map_err(|error| CudaError::HostMemory {
            bytes,
            why: error.to_string(),
        })?;
        Ok(Self {
            at: at.cast(),
            bytes,
            reader: Reader::Unused,
        })
    }

    fn is_free(&self) -> bool {
        match &self.reader {
            Reader::Unused => true,
            Reader::Until(point) => point.is_done().unwrap_or(false),
            Reader::Unknown => false,
        }
    }
}
