use crate::megatron::names::{Name, Place};

/// Bytes of an element in a bucket.
const ITEM: usize = 4;

/// How the ranks of tensor parallelism divide a tensor of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Split {
    /// Each rank has a copy.
    Copies,
    /// Each rank has rows.
    Rows,
    /// Each rank has rows of the gate, then the same rows of up.
    GatedRows,
    /// Each rank has columns.
    Columns,
}

impl Split {
    /// How a tensor is divided. `is_gated` says whether the first matrix of an MLP has a gate.
    ///
    /// Source: Megatron-Core, `tensor_parallel/layers.py`, `SelfAttention`, `MLP`.
    pub(super) fn of(place: &Place, is_gated: bool) -> Self {
        let (Name::Whole(name) | Name::OfLayer(_, name)) = &place.name;
        let (module, kind) = name.rsplit_once('.').unwrap_or_default();
        let last = module.rsplit('.').next().unwrap_or_default();
        match (last, kind) {
            ("word_embeddings" | "output_layer", _) => Self::Rows,
            ("linear_qkv", "weight" | "bias") => Self::Rows,
            ("linear_fc1", "weight" | "bias") if is_gated => Self::GatedRows,
            ("linear_fc1", "weight" | "bias") => Self::Rows,
            ("linear_proj" | "linear_fc2", "weight") => Self::Columns,
            _ => Self::Copies,
        }
    }

    /// The elements of a rank's part of a tensor; `None` if `ranks` do not divide it.
    pub(super) fn len(self, shape: &[usize], ranks: usize) -> Option<usize> {
        let len: usize = shape.iter().product();
        let (divided, unit) = match self {
            Self::Copies => return Some(len),
            Self::Rows => (shape.first()?, ranks),
            Self::GatedRows => (shape.first()?, 2 * ranks),
            Self::Columns => (shape.get(1)?, ranks),
        };
        divided.is_multiple_of(unit).then_some(len / ranks)
    }

    /// Copies the part of a rank into the whole tensor, which has the shape `shape`. The ranks
    /// divide the tensor, and both have f32 values.
    pub(super) fn copy_into(
        self,
        whole: &mut [u8],
        shape: &[usize],
        part: &[u8],
        rank: usize,
        ranks: usize,
    ) {
        // The part is blocks of equal length, and those of all ranks lie next to each other.
        let blocks = match self {
            Self::Copies | Self::Rows => 1,
            Self::GatedRows => 2,
            Self::Columns => shape[0],
        };
        let len = part.len() / blocks;
        debug_assert_eq!(len % ITEM, 0, "a block has whole elements");
        for (number, block) in part.chunks_exact(len).enumerate() {
            let start = (number * ranks + rank) * len;
            whole[start..start + len].copy_from_slice(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("embedding.weight", Split::Rows)]
    #[case("positions.weight", Split::Copies)]
    #[case("head.weight", Split::Rows)]
    #[case("norm.gamma", Split::Copies)]
    #[case("blocks.1.attention_norm.gamma", Split::Copies)]
    #[case("blocks.1.attention.qkv.bias", Split::Rows)]
    #[case("blocks.1.attention.q_norm.gamma", Split::Copies)]
    #[case("blocks.1.attention.output.weight", Split::Columns)]
    #[case("blocks.1.attention.output.bias", Split::Copies)]
    #[case("blocks.1.mlp_norm.beta", Split::Copies)]
    #[case("blocks.1.mlp.up.weight", Split::GatedRows)]
    #[case("blocks.1.mlp.down.weight", Split::Columns)]
    #[case("blocks.1.moe.router.weight", Split::Copies)]
    #[case("blocks.1.moe.experts.3.up.weight", Split::GatedRows)]
    #[case("blocks.1.moe.experts.3.down.weight", Split::Columns)]
    fn every_parameter_is_split_as_there(#[case] path: &str, #[case] expected: Split) {
        let place = Place::of(path).unwrap();
        assert_eq!(Split::of(&place, true), expected);
        let plain = match expected {
            Split::GatedRows => Split::Rows,
            other => other,
        };
        assert_eq!(Split::of(&place, false), plain);
    }

    /// Elements of a tensor whose values are their numbers.
    fn numbers(numbers: impl IntoIterator<Item = u32>) -> Vec<u8> {
        numbers.into_iter().flat_map(u32::to_le_bytes).collect()
    }

    #[rstest]
    #[case(Split::Rows, &[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]])]
    #[case(Split::GatedRows, &[[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]])]
    fn parts_of_rows_are_put_together(#[case] split: Split, #[case] parts: &[[u32; 6]]) {
        let shape = [4, 3];
        assert_eq!(split.len(&shape, 2), Some(6));
        let mut whole = numbers([99; 12]);
        for (rank, part) in parts.iter().enumerate() {
            split.copy_into(&mut whole, &shape, &numbers(*part), rank, 2);
        }
        assert_eq!(whole, numbers(0..12));
    }

    #[test]
    fn parts_of_columns_are_put_together() {
        let shape = [2, 6];
        assert_eq!(Split::Columns.len(&shape, 3), Some(4));
        let mut whole = numbers([99; 12]);
        for (rank, part) in [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
            .iter()
            .enumerate()
        {
            Split::Columns.copy_into(&mut whole, &shape, &numbers(*part), rank, 3);
        }
        assert_eq!(whole, numbers(0..12));
    }

    #[test]
    fn ranks_that_do_not_divide_a_tensor_have_no_part() {
        assert_eq!(Split::Rows.len(&[5, 4], 2), None);
        assert_eq!(Split::GatedRows.len(&[6, 4], 2), None);
        assert_eq!(Split::Columns.len(&[4, 5], 2), None);
        assert_eq!(Split::Columns.len(&[4], 2), None);
        assert_eq!(Split::Copies.len(&[5], 2), Some(5));
    }
}
