//! Uploads numbers from the device thread to the GPU through pinned memory that is not reused until
//! the copy is done.

use std::cell::RefCell;

use cudarc::driver::sys;

use crate::{
    error::CudaError,
    events::{Event, PooledEvent},
    streams::Stream,
};

/// Size in bytes of the smallest piece of memory; larger ones are powers of two.
const SMALLEST: usize = 4096;

/// A piece of pinned memory. Pieces are reused but never freed; there are as many as the most
/// copies that were in flight at once.
struct Piece {
    at: *mut u64,
    bytes: usize,
    reader: Reader,
}

/// The copy that reads a piece.
enum Reader {
    Unused,
    /// A copy that is done once this event is.
    Until(PooledEvent),
    /// A copy without an event after it: the piece is never reused.
    Unknown,
}

thread_local! {
    /// The pieces of this device thread, which belong to its context.
    static PIECES: RefCell<Vec<Piece>> = const { RefCell::new(Vec::new()) };
}

/// Enqueues a copy of the numbers to device memory on `stream`. Call it on the device thread; it
/// does not wait.
///
/// # Errors
/// The driver refuses, or the host has no pinned memory.
///
/// # Safety
/// `to` must be device memory of the current context with space for the numbers, and nothing else
/// may use it before `stream` has run the copy.
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
        // SAFETY: the piece has space for the numbers, is aligned by the driver, and no copy reads
        // it.
        unsafe { std::ptr::copy_nonoverlapping(numbers.as_ptr(), piece.at, numbers.len()) };
        piece.reader = Reader::Unknown;
        // SAFETY: the caller guarantees `to`; the piece is never freed, and not written before the
        // event that is recorded after the copy.
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
