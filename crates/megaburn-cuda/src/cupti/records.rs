//! The records that CUPTI writes about work on the GPU. CUDA 12.0 to 13.4 have versions of each
//! record (`CUpti_ActivityKernel9` to 13, `CUpti_ActivityMemcpy5` to 7, `CUpti_ActivityMemset4` and
//! 5) that differ only after the fields that are read here.

use std::{
    collections::HashSet,
    ffi::{CStr, c_char},
    mem::offset_of,
    sync::Arc,
};

pub(super) const MEMCPY: u32 = 1;
pub(super) const MEMSET: u32 = 2;
pub(super) const KERNEL: u32 = 10;
pub(super) const MEMCPY_PEER: u32 = 22;

/// What a GPU did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkKind {
    /// A kernel ran.
    Kernel,
    /// Memory was copied.
    Copy,
    /// Memory was filled with one value.
    Fill,
}

/// One kernel, copy or fill of a GPU. Times are those of the clock that the trace was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuWork {
    /// What it is.
    pub kind: WorkKind,
    /// The name of the kernel, or the direction of the copy.
    pub name: Arc<str>,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// CUPTI's number of the stream.
    pub stream: u32,
    /// The bytes that were copied or filled.
    pub bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct KernelRecord {
    kind: u32,
    _settings: [u8; 12],
    start: u64,
    end: u64,
    _completed: u64,
    _device: u32,
    _context: u32,
    stream: u32,
    _grid: [i32; 3],
    _block: [i32; 3],
    _memory: [u32; 4],
    _correlation: u32,
    _grid_id: i64,
    name: *const c_char,
}

/// A copy, a copy between GPUs or a fill: these have the same first fields.
#[repr(C)]
#[derive(Clone, Copy)]
struct MemoryRecord {
    kind: u32,
    /// The direction of a copy, in its first byte; the value of a fill.
    detail: [u8; 4],
    bytes: u64,
    start: u64,
    end: u64,
    _device: u32,
    _context: u32,
    stream: u32,
}

// The offsets in NVIDIA's headers.
const _: () = assert!(
    offset_of!(KernelRecord, start) == 16
        && offset_of!(KernelRecord, stream) == 48
        && offset_of!(KernelRecord, name) == 104
        && offset_of!(MemoryRecord, bytes) == 8
        && offset_of!(MemoryRecord, start) == 16
        && offset_of!(MemoryRecord, stream) == 40
);

/// The names of kernels, each kept once.
#[derive(Debug, Default)]
pub(super) struct Names(HashSet<Arc<str>>);

impl Names {
    fn get(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.0.get(name) {
            return known.clone();
        }
        let name: Arc<str> = name.into();
        self.0.insert(name.clone());
        name
    }
}

/// What the record at `record` says; `None` for records of other kinds, and for work whose times
/// are not known.
///
/// # Safety
/// `record` is the address of a record that CUPTI wrote, and the buffer that it is in is still there.
pub(super) unsafe fn read(record: *const u8, names: &mut Names) -> Option<GpuWork> {
    // SAFETY: every record begins with its kind.
    let kind = unsafe { record.cast::<u32>().read_unaligned() };
    let work = match kind {
        KERNEL => {
            // SAFETY: a record of this kind has these fields; see above.
            let kernel = unsafe { record.cast::<KernelRecord>().read_unaligned() };
            let name = if kernel.name.is_null() {
                names.get("a kernel without a name")
            } else {
                // SAFETY: the name ends with a zero, and lives at least as long as the record.
                names.get(&unsafe { CStr::from_ptr(kernel.name) }.to_string_lossy())
            };
            GpuWork {
                kind: WorkKind::Kernel,
                name,
                start: kernel.start,
                end: kernel.end,
                stream: kernel.stream,
                bytes: 0,
            }
        }
        MEMCPY | MEMCPY_PEER | MEMSET => {
            // SAFETY: records of these kinds begin with these fields; see above.
            let memory = unsafe { record.cast::<MemoryRecord>().read_unaligned() };
            let (kind, name) = match kind {
                MEMSET => (WorkKind::Fill, "fill"),
                MEMCPY_PEER => (WorkKind::Copy, "copy from GPU to GPU"),
                _ => (WorkKind::Copy, direction(memory.detail[0])),
            };
            GpuWork {
                kind,
                name: names.get(name),
                start: memory.start,
                end: memory.end,
                stream: memory.stream,
                bytes: memory.bytes,
            }
        }
        _ => return None,
    };
    (work.start > 0 && work.end >= work.start).then_some(work)
}

fn direction(copy: u8) -> &'static str {
    match copy {
        1 => "copy from host to GPU",
        2 => "copy from GPU to host",
        8 => "copy on the GPU",
        10 => "copy from GPU to GPU",
        _ => "copy",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_by_their_kinds() {
        let mut names = Names::default();
        let name = c"adamw_kernel_0123abcd";
        let kernel = KernelRecord {
            kind: KERNEL,
            _settings: [0; 12],
            start: 5,
            end: 9,
            _completed: 0,
            _device: 0,
            _context: 1,
            stream: 7,
            _grid: [1; 3],
            _block: [1; 3],
            _memory: [0; 4],
            _correlation: 3,
            _grid_id: 4,
            name: name.as_ptr(),
        };
        let copy = MemoryRecord {
            kind: MEMCPY,
            detail: [2, 0, 0, 0],
            bytes: 4096,
            start: 10,
            end: 12,
            _device: 0,
            _context: 1,
            stream: 13,
        };
        let mut of = |record: *const u8| {
            // SAFETY: the records are of this test.
            unsafe { read(record, &mut names) }
        };
        let found = of((&raw const kernel).cast()).unwrap();
        assert_eq!(
            (&*found.name, found.start, found.end),
            ("adamw_kernel_0123abcd", 5, 9)
        );
        assert_eq!((found.kind, found.stream), (WorkKind::Kernel, 7));
        let found = of((&raw const copy).cast()).unwrap();
        assert_eq!(
            (&*found.name, found.bytes, found.stream),
            ("copy from GPU to host", 4096, 13)
        );
        let other = MemoryRecord { kind: 4, ..copy };
        assert_eq!(of((&raw const other).cast()), None);
        let unknown = KernelRecord { start: 0, ..kernel };
        assert_eq!(of((&raw const unknown).cast()), None);
    }
}
