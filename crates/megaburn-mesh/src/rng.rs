//! Randomness as a function of position: `(seed, purpose, path, global index) -> number`.
//!
//! Philox 4x32-10 is implemented by hand (Salmon et al., "Parallel random numbers: as easy as 1, 2,
//! 3", SC11): it takes twenty lines, which must also run inside a CubeCL kernel for dropout, and no
//! crate's stateful generator does. The known answers of the authors' Random123 are among the
//! tests.

use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The purpose of a random number: streams of different purposes are independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Initial values of parameters.
    Init,
    /// Dropout masks.
    Dropout,
    /// The order of training samples.
    DataOrder,
    /// Sampling of generated text.
    Sampling,
    /// Rounding of gradients, and the signs of Hadamard transforms.
    Quantization,
}

/// A stream of random numbers addressed by index. The numbers do not depend on the layout, on
/// thread timing or on earlier draws.
///
/// ```
/// use megaburn_mesh::{PositionRng, Purpose};
///
/// let rng = PositionRng::new(42, Purpose::Init, "layers.0.mlp.down.weight");
/// let mut whole = [0.0; 10];
/// rng.fill_normal(0, &mut whole);
/// let mut tail = [0.0; 4];
/// rng.fill_normal(6, &mut tail);
/// assert_eq!(whole[6..], tail);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PositionRng {
    key: [u32; 2],
    stream: u64,
}

impl PositionRng {
    /// The stream of `path` for `purpose`.
    pub fn new(seed: u64, purpose: Purpose, path: &str) -> Self {
        let purpose = purpose as u64 + 1;
        let key = xxh3_64_with_seed(
            path.as_bytes(),
            xxh3_64_with_seed(&seed.to_le_bytes(), purpose),
        );
        Self {
            key: [key as u32, (key >> 32) as u32],
            stream: 0,
        }
    }

    /// The `stream`-th sibling of this stream, for numbers that differ each time (e.g. the dropout
    /// of each micro-batch).
    pub fn with_stream(self, stream: u64) -> Self {
        Self { stream, ..self }
    }

    /// Philox's key, for a kernel that draws the same numbers: lower word first.
    pub fn key(&self) -> [u32; 2] {
        self.key
    }

    /// The upper half of Philox's counter, lower word first. The lower half is the index of the
    /// block of four numbers.
    pub fn stream(&self) -> [u32; 2] {
        [self.stream as u32, (self.stream >> 32) as u32]
    }

    /// The 32 random bits at `index`.
    pub fn bits(&self, index: u64) -> u32 {
        self.block(index / 4)[(index % 4) as usize]
    }

    /// The 64 random bits at `index` (bits `2 * index` and the next).
    pub fn bits64(&self, index: u64) -> u64 {
        u64::from(self.bits(2 * index)) | u64::from(self.bits(2 * index + 1)) << 32
    }

    /// Uniform in `[0, 1)` at `index`, with 24 random bits.
    pub fn uniform(&self, index: u64) -> f32 {
        unit(self.bits(index))
    }

    /// Sets `out[i]` to a uniform number in `[0, 1)` at `start + i`.
    pub fn fill_uniform(&self, start: u64, out: &mut [f32]) {
        self.fill(start, out, |block| block.map(unit));
    }

    /// Sets `out[i]` to a standard normal at `start + i` (Box-Muller on the two pairs of a block).
    pub fn fill_normal(&self, start: u64, out: &mut [f32]) {
        self.fill(start, out, |[a, b, c, d]| {
            let [w, x] = normals(a, b);
            let [y, z] = normals(c, d);
            [w, x, y, z]
        });
    }

    /// A uniform integer below `bound` at `index` (multiply-shift; the bias is below 2^-32 for
    /// bounds under 2^32).
    pub fn below(&self, index: u64, bound: u64) -> u64 {
        ((u128::from(self.bits64(index)) * u128::from(bound)) >> 64) as u64
    }

    fn fill(&self, start: u64, out: &mut [f32], draw: impl Fn([u32; 4]) -> [f32; 4]) {
        let mut index = start;
        let mut rest = out;
        while !rest.is_empty() {
            let lane = (index % 4) as usize;
            let taken: Range<usize> = lane..4.min(lane + rest.len());
            let (head, tail) = rest.split_at_mut(taken.len());
            head.copy_from_slice(&draw(self.block(index / 4))[taken]);
            index += head.len() as u64;
            rest = tail;
        }
    }

    fn block(&self, block: u64) -> [u32; 4] {
        let [stream_0, stream_1] = self.stream();
        philox4x32_10(
            [block as u32, (block >> 32) as u32, stream_0, stream_1],
            self.key,
        )
    }
}

fn unit(bits: u32) -> f32 {
    (bits >> 8) as f32 * (1.0 / (1 << 24) as f32)
}

/// Two standard normals. The first uniform is in `(0, 1]`, so its logarithm is finite.
fn normals(a: u32, b: u32) -> [f32; 2] {
    let radius = (-2.0 * ((f64::from(a) + 1.0) / 4_294_967_296.0).ln()).sqrt();
    let angle = std::f64::consts::TAU * f64::from(b) / 4_294_967_296.0;
    [(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]
}

fn philox4x32_10(mut ctr: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    const M: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const W: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    for _ in 0..10 {
        let p = M[0] * u64::from(ctr[0]);
        let q = M[1] * u64::from(ctr[2]);
        ctr = [
            (q >> 32) as u32 ^ ctr[1] ^ key[0],
            q as u32,
            (p >> 32) as u32 ^ ctr[3] ^ key[1],
            p as u32,
        ];
        key = [key[0].wrapping_add(W[0]), key[1].wrapping_add(W[1])];
    }
    ctr
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_known_answers_of_random123() {
        assert_eq!(
            philox4x32_10([0; 4], [0; 2]),
            [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]
        );
        assert_eq!(
            philox4x32_10([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]
        );
        assert_eq!(
            philox4x32_10(
                [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
                [0xa4093822, 0x299f31d0]
            ),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn a_stretch_is_the_same_wherever_it_starts() {
        let rng = PositionRng::new(7, Purpose::Init, "w").with_stream(3);
        let mut whole = [0.0; 41];
        rng.fill_uniform(0, &mut whole);
        for start in 0..41 {
            for len in 0..(41 - start) {
                let mut part = vec![0.0; len];
                rng.fill_uniform(start as u64, &mut part);
                assert_eq!(part, whole[start..start + len]);
                part.iter().enumerate().for_each(|(i, &x)| {
                    assert_eq!(x, rng.uniform((start + i) as u64));
                });
            }
        }
    }

    #[test]
    fn streams_differ_by_seed_purpose_path_and_number() {
        let base = PositionRng::new(1, Purpose::Init, "a").bits(0);
        assert_ne!(base, PositionRng::new(2, Purpose::Init, "a").bits(0));
        assert_ne!(base, PositionRng::new(1, Purpose::Dropout, "a").bits(0));
        assert_ne!(base, PositionRng::new(1, Purpose::Init, "b").bits(0));
        assert_ne!(
            base,
            PositionRng::new(1, Purpose::Init, "a")
                .with_stream(1)
                .bits(0)
        );
        assert_ne!(base, PositionRng::new(1, Purpose::Init, "a").bits(1 << 40));
    }

    #[test]
    fn draws_have_the_moments_of_their_law() {
        let rng = PositionRng::new(3, Purpose::Init, "moments");
        let mut x = vec![0.0f32; 1 << 16];
        let moments = |x: &[f32]| {
            let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / x.len() as f64;
            let var = x
                .iter()
                .map(|&v| (f64::from(v) - mean).powi(2))
                .sum::<f64>()
                / x.len() as f64;
            (mean, var)
        };
        rng.fill_uniform(5, &mut x);
        let (mean, var) = moments(&x);
        assert!(
            (mean - 0.5).abs() < 0.005 && (var - 1.0 / 12.0).abs() < 0.002,
            "{mean} {var}"
        );
        assert!(x.iter().all(|v| (0.0..1.0).contains(v)));
        rng.fill_normal(5, &mut x);
        let (mean, var) = moments(&x);
        assert!(
            mean.abs() < 0.02 && (var - 1.0).abs() < 0.03,
            "{mean} {var}"
        );
        assert!(x.iter().all(|v| v.is_finite()));
        let below: Vec<u64> = (0..1000).map(|i| rng.below(i, 7)).collect();
        assert!((0..7).all(|v| below.contains(&v)) && below.iter().all(|&v| v < 7));
    }
}
