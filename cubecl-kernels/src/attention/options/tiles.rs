use std::str::FromStr;

/// Tile shapes of the CubeCL kernel that replace those that were measured to be fast. The default
/// replaces none; others are for measurements.
///
/// As text it has up to three of `forward=PLANES,ROW_BLOCKS,KEYS`, `queries=PLANES,TILE` and
/// `keys=PLANES,TILE`, separated by spaces, and optionally `mma`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionTiles {
    /// Planes, row blocks per plane and keys per tile of the forward pass.
    pub forward: Option<[usize; 3]>,
    /// Planes and rows per tile of the gradients of queries.
    pub queries: Option<[usize; 2]>,
    /// Planes and rows per tile of the gradients of keys and values.
    pub keys: Option<[usize; 2]>,
    /// Whether Hopper multiplies with the instructions of older GPUs. So it does with a number of
    /// planes that is not a multiple of four.
    pub mma: bool,
}

impl AttentionTiles {
    fn parse(text: &str) -> Option<Self> {
        let mut choice = Self::default();
        for part in text.split_whitespace() {
            if part == "mma" {
                choice.mma = true;
                continue;
            }
            let (name, numbers) = part.split_once('=')?;
            let numbers: Vec<usize> = numbers
                .split(',')
                .map(|number| number.parse().ok())
                .collect::<Option<_>>()?;
            let tile = *numbers.last()?;
            let fits = (1..=16).contains(&numbers[0]) && tile.is_multiple_of(16);
            if !fits || !(16..=256).contains(&tile) {
                return None;
            }
            match (name, numbers.as_slice()) {
                ("forward", &[planes, row_blocks @ 1..=2, keys]) => {
                    choice.forward = Some([planes, row_blocks, keys]);
                }
                ("queries", &[planes, tile]) => choice.queries = Some([planes, tile]),
                // Each unit loads the LSE and delta of one row of the tile.
                ("keys", &[planes, tile]) if tile <= 32 * planes => {
                    choice.keys = Some([planes, tile]);
                }
                _ => return None,
            }
        }
        Some(choice)
    }
}

impl FromStr for AttentionTiles {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text).ok_or_else(|| {
            format!(
                "{text:?} is not of the form `forward=4,1,64 queries=4,64 keys=4,64`: 1 to 16 \
                planes; for `forward`, 1 or 2 row blocks per plane; rows per tile a multiple of 16 \
                up to 256, and for `keys` at most 32 per plane"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read_and_others_refused() {
        assert_eq!(AttentionTiles::parse(""), Some(AttentionTiles::default()));
        let some = AttentionTiles::parse("keys=8,32 forward=4,2,32").unwrap();
        assert_eq!(
            (some.forward, some.queries, some.keys),
            (Some([4, 2, 32]), None, Some([8, 32]))
        );
        for bad in [
            "forward",
            "forward=4,64",
            "keys=4,1,64",
            "keys=0,64",
            "keys=4,20",
            "keys=1,64",
            "rows=4,64",
        ] {
            assert_eq!(AttentionTiles::parse(bad), None, "{bad}");
        }
    }
}
