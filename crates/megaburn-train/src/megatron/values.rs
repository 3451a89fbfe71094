//! Rearranges the values of a parameter between megaburn's order and Megatron-Core's.

use megaburn_models::DecoderConfig;

use super::names::Form;

/// Rows and columns of the square that is transposed at a time, which fits into a core's cache.
const TILE: usize = 32;

/// The values of a parameter in megaburn's order, from those of its tensor in Megatron-Core's.
///
/// `shape` is the shape of the parameter, and `item` the number of bytes of an element.
pub(super) fn in_our_order(
    form: Form,
    shape: &[usize],
    model: &DecoderConfig,
    item: usize,
    theirs: &[u8],
) -> Vec<u8> {
    let Some((rows, columns)) = matrix(form, shape) else {
        let len = shape.iter().product::<usize>() * item;
        return theirs[..len].to_vec();
    };
    let order = order(form, columns, model);
    let mut ours = vec![0; rows * columns * item];
    tiles(rows, columns, |row, column| {
        let from = (order[column] * rows + row) * item;
        let to = (row * columns + column) * item;
        ours[to..to + item].copy_from_slice(&theirs[from..from + item]);
    });
    ours
}

/// The values of a tensor in Megatron-Core's order, from those of a parameter in megaburn's. Rows
/// that the tensor has in addition are zero: `len` is the number of its elements.
pub(super) fn in_their_order(
    form: Form,
    shape: &[usize],
    model: &DecoderConfig,
    item: usize,
    ours: &[u8],
    len: usize,
) -> Vec<u8> {
    let mut theirs = vec![0; len * item];
    let Some((rows, columns)) = matrix(form, shape) else {
        theirs[..ours.len()].copy_from_slice(ours);
        return theirs;
    };
    let order = order(form, columns, model);
    tiles(rows, columns, |row, column| {
        let to = (order[column] * rows + row) * item;
        let from = (row * columns + column) * item;
        theirs[to..to + item].copy_from_slice(&ours[from..from + item]);
    });
    theirs
}

/// Rows and columns of a parameter that is transposed or reordered; a bias has one row.
fn matrix(form: Form, shape: &[usize]) -> Option<(usize, usize)> {
    match (form, shape) {
        (Form::Plain | Form::Vocab, _) => None,
        (_, [columns]) => Some((1, *columns)),
        (_, [rows, columns]) => Some((*rows, *columns)),
        _ => None,
    }
}

/// For each column of a parameter, the row of Megatron-Core's tensor that it is.
fn order(form: Form, columns: usize, model: &DecoderConfig) -> Vec<usize> {
    if form != Form::Groups {
        return (0..columns).collect();
    }
    let (head, groups) = (model.head_dim, model.kv_heads);
    let queries = model.heads / groups;
    let group = (queries + 2) * head;
    let part = |first: usize, count: usize| {
        (0..groups).flat_map(move |number| {
            let start = number * group + first * head;
            start..start + count * head
        })
    };
    part(0, queries)
        .chain(part(queries, 1))
        .chain(part(queries + 1, 1))
        .collect()
}

/// Calls `each` for all rows and columns, square by square.
fn tiles(rows: usize, columns: usize, mut each: impl FnMut(usize, usize)) {
    for first_row in (0..rows).step_by(TILE) {
        for first_column in (0..columns).step_by(TILE) {
            for row in first_row..rows.min(first_row + TILE) {
                for column in first_column..columns.min(first_column + TILE) {
                    each(row, column);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use megaburn_models::Family;
    use rstest::rstest;

    use super::*;

    #[test]
    fn groups_are_queries_then_one_key_then_one_value() {
        let model = DecoderConfig {
            heads: 4,
            kv_heads: 2,
            head_dim: 1,
            ..Family::LLAMA.template()
        };
        let ours = in_our_order(Form::Groups, &[8], &model, 1, b"abKVcdkv");
        assert_eq!(ours, b"abcdKkVv");
        // Of two inputs: Megatron-Core's rows are the columns here.
        let ours = in_our_order(Form::Groups, &[2, 8], &model, 1, b"aAbBkKvVcCdDlLwW");
        assert_eq!(ours, b"abcdklvwABCDKLVW");
    }

    #[rstest]
    #[case(Form::Plain, &[7, 5])]
    #[case(Form::Vocab, &[33, 6])]
    #[case(Form::Transposed, &[45, 70])]
    #[case(Form::Groups, &[33, 96])]
    #[case(Form::Groups, &[96])]
    fn what_is_rearranged_and_back_is_the_same(#[case] form: Form, #[case] shape: &[usize]) {
        let model = DecoderConfig {
            heads: 6,
            kv_heads: 3,
            head_dim: 8,
            ..Family::LLAMA.template()
        };
        let len: usize = shape.iter().product();
        for (item, more) in [(2, 0), (4, if form == Form::Vocab { 12 } else { 0 })] {
            let ours: Vec<u8> = (0..len * item).map(|n| (n * 7 + n / 250) as u8).collect();
            let theirs = in_their_order(form, shape, &model, item, &ours, len + more);
            assert_eq!(theirs.len(), (len + more) * item);
            assert!(theirs[len * item..].iter().all(|byte| *byte == 0));
            assert_eq!(in_our_order(form, shape, &model, item, &theirs), ours);
        }
    }
}
