/// Which elements of a weight share a scale.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Scaling {
    /// All elements of the tensor share a scale.
    Tensor,
    /// The elements of a row, which is an output feature, share a scale.
    Channel,
    /// Blocks of this number of rows and columns share a scale; the last ones may be smaller.
    Block([usize; 2]),
}

/// A weight as consecutive matrices, and the scales of each as a matrix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Grid {
    /// Rows of a matrix.
    pub(super) rows: usize,
    /// Columns of a matrix.
    pub(super) cols: usize,
    /// Rows and columns that share a scale.
    pub(super) block: [usize; 2],
}

impl Grid {
    /// Rows and columns of a matrix's scales.
    pub(super) fn scales(&self) -> [usize; 2] {
        let [tall, wide] = self.block;
        [self.rows.div_ceil(tall), self.cols.div_ceil(wide)]
    }
}

impl Scaling {
    /// The scales of a weight of `shape`, whose dimensions but the last two number its matrices.
    pub(super) fn grid(self, shape: &[usize]) -> Grid {
        let cols = shape.last().copied().unwrap_or(1);
        let rows = shape.len().checked_sub(2).map_or(1, |dim| shape[dim]);
        let [rows, block] = match self {
            // The matrices of a stack are one.
            Self::Tensor => {
                let all: usize = shape.iter().rev().skip(1).product();
                [all, all]
            }
            Self::Channel => [rows, 1],
            Self::Block([tall, _]) => [rows, tall],
        };
        let wide = match self {
            Self::Tensor | Self::Channel => cols,
            Self::Block([_, wide]) => wide,
        };
        let block = [block.max(1), wide.max(1)];
        Grid { rows, cols, block }
    }

    /// The shapes that the scales of a weight of `shape` may have.
    pub(super) fn shapes(self, shape: &[usize]) -> Vec<Vec<usize>> {
        let matrices = &shape[..shape.len().saturating_sub(2)];
        let [rows, cols] = self.grid(shape).scales();
        match self {
            Self::Tensor => vec![vec![], vec![1], vec![1, 1]],
            Self::Channel => [&[rows, 1][..], &[rows]]
                .map(|of_matrix| [matrices, of_matrix].concat())
                .to_vec(),
            Self::Block(_) => vec![[matrices, &[rows, cols]].concat()],
        }
    }
}
