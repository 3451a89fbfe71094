//! The arithmetic of a parallel run: the coordinates of a rank, its groups, the part of each tensor
//! that it holds, and the random number at each position. There is no Burn, no thread and no I/O
//! here: everything is a pure function.
//!
//! ```
//! use megaburn_mesh::{Axis, Layout, Mesh};
//!
//! let layout: Layout = "tp2-dp2-sp".parse()?;
//! let mesh = Mesh::new(layout);
//! assert_eq!(mesh.world_size(), 4);
//! assert_eq!(mesh.group_of(&[Axis::Tp], 3), [2, 3]);
//! assert_eq!(mesh.group_of(&[Axis::Dp], 3), [1, 3]);
//! # Ok::<(), megaburn_mesh::MeshError>(())
//! ```

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]

mod axis;
mod error;
mod layout;
mod mesh;
mod model_shape;
mod packed_rows;
mod plan;
mod rng;
mod shard;
mod zigzag;

pub use axis::Axis;
pub use error::MeshError;
pub use layout::Layout;
pub use mesh::{Coords, Mesh};
pub use model_shape::{ExpertShape, ModelShape};
pub use packed_rows::PackedRows;
pub use plan::{ParamSpec, ShardPlan};
pub use rng::{PositionRng, Purpose};
pub use shard::{FusedPart, ShardPiece, ShardSpec, pad_vocab};
pub use zigzag::Zigzag;
