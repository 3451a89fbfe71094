//! Numbers that kernels raise to largest magnitudes. They have to be zero before, and a kernel that sets
//! one of them would take as long as a small reduction: a kernel sets 256 of them.

use std::cell::RefCell;

use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;

/// Numbers that are set to zero at once.
const CELLS: usize = 256;

thread_local! {
    /// The numbers that no kernel of this thread was given. A stream of the GPU belongs to a thread, so
    /// what the thread computes with them waits for no other stream.
    static UNUSED: RefCell<Option<UnusedCells>> = const { RefCell::new(None) };
}

/// Numbers in u32, each at the start of an own slice of memory, that are zero.
pub(crate) struct AmaxCells {
    all: CubeTensor,
    count: usize,
}

impl AmaxCells {
    /// `count` numbers on the device of `like`.
    pub(crate) fn new(like: &CubeTensor, count: usize) -> Self {
        let (client, device) = (like.client.clone(), like.device.clone());
        let words = count * words_of_slice(like);
        Self {
            all: zeros_client(client, device, Shape::new([words]), DType::U32),
            count,
        }
    }

    /// All numbers, and what is between them.
    pub(crate) fn buffer(&self) -> &CubeTensor {
        &self.all
    }

    /// The index of number `i` in the buffer.
    pub(crate) fn index(&self, i: usize) -> usize {
        i * words_of_slice(&self.all)
    }

    /// The largest magnitudes whose bits the numbers have, `[1]` in f32 each.
    pub(crate) fn values(self) -> impl Iterator<Item = CubeTensor> {
        (0..self.count).map(move |i| from_bits(self.get(i)))
    }

    /// Number `i`, `[1]` in u32.
    fn get(&self, i: usize) -> CubeTensor {
        let all = &self.all;
        let size = DType::U32.size();
        let start = (self.index(i) * size) as u64;
        let handle = all.handle.clone().offset_start(start);
        let behind = handle.size_in_used() - size as u64;
        CubeTensor::new_contiguous(
            all.client.clone(),
            all.device.clone(),
            Shape::new([1]),
            handle.offset_end(behind),
            DType::U32,
        )
    }
}

/// The words of a slice of memory, which begins at a multiple of them.
fn words_of_slice(x: &CubeTensor) -> usize {
    x.client.properties().memory.alignment as usize / DType::U32.size()
}

struct UnusedCells {
    cells: AmaxCells,
    num_used: usize,
}

impl UnusedCells {
    fn new(like: &CubeTensor) -> Self {
        Self {
            cells: AmaxCells::new(like, CELLS),
            num_used: 0,
        }
    }

    /// Whether there is a number left for a kernel on the device of `like`.
    fn suit(&self, like: &CubeTensor) -> bool {
        self.num_used < CELLS && self.cells.all.device == like.device
    }

    /// A number that no kernel was given.
    fn next(&mut self) -> CubeTensor {
        self.num_used += 1;
        self.cells.get(self.num_used - 1)
    }
}

/// A number to raise to the bits of a largest magnitude: zero, `[1]` in u32 on the device of `like`.
pub(crate) fn no_amax(like: &CubeTensor) -> CubeTensor {
    UNUSED.with_borrow_mut(|unused| {
        if !unused.as_ref().is_some_and(|cells| cells.suit(like)) {
            *unused = None;
        }
        unused.get_or_insert_with(|| UnusedCells::new(like)).next()
    })
}

/// The numbers in f32 that have these bits.
pub(crate) fn from_bits(bits: CubeTensor) -> CubeTensor {
    let shape = bits.meta.shape().clone();
    CubeTensor::new_contiguous(bits.client, bits.device, shape, bits.handle, DType::F32)
}
