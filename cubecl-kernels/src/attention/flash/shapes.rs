//! How much of the work a cube takes: what fits a unit's registers, and what was measured.

use std::env;
use std::sync::OnceLock;

use super::AttentionOptions;
use super::backward::Backward;
use super::dropped::Dropped;
use super::forward::Forward;
use super::visible::Mask;

/// Another choice than the one below, for measurements: up to three of `forward=PLANES,STRETCHES,KEYS`,
/// `queries=PLANES,TILE` and `keys=PLANES,TILE` with spaces between.
pub(super) const VARIABLE: &str = "MEGABURN_ATTENTION_SHAPES";

pub(super) fn forward_shape(d: usize, d_v: usize, options: &AttentionOptions) -> Forward {
    let [planes, stretches, keys] = chosen().forward.unwrap_or([4, 1, 64]);
    Forward {
        d,
        d_v,
        planes,
        stretches,
        keys,
        mask: Mask::of(options),
        capped: options.soft_cap.is_some(),
        dropped: Dropped::of(options),
    }
}

/// The kernels of the backward: that of queries, then of keys and values.
pub(super) fn backward_shapes(d: usize, d_v: usize, options: &AttentionOptions) -> Vec<Backward> {
    let shape = |[planes, tile]: [usize; 2], of_keys, of_values| Backward {
        d,
        d_v,
        planes,
        tile,
        mask: Mask::of(options),
        capped: options.soft_cap.is_some(),
        dropped: Dropped::of(options),
        of_keys,
        of_values,
    };
    let Choice { queries, keys, .. } = chosen();
    let mut shapes = vec![shape(queries.unwrap_or([4, 64]), false, false)];
    // Sums and scores are in registers, of which a unit has 255: half of `d + d_v`, and a tile's rows.
    let of_keys = |tile| keys.unwrap_or([4, tile]);
    shapes.extend(match (d + d_v) / 2 {
        ..=128 => vec![shape(of_keys(64), true, true)],
        129..=160 => vec![shape(of_keys(32), true, true)],
        _ => vec![shape(of_keys(32), true, false), shape(of_keys(32), false, true)],
    });
    shapes
}

/// Whether the variable asks for any.
pub(super) fn are_asked() -> bool {
    chosen() != Choice::default()
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Choice {
    forward: Option<[usize; 3]>,
    queries: Option<[usize; 2]>,
    keys: Option<[usize; 2]>,
}

fn chosen() -> Choice {
    static CHOSEN: OnceLock<Choice> = OnceLock::new();
    *CHOSEN.get_or_init(|| {
        let text = env::var(VARIABLE).unwrap_or_default();
        Choice::parse(&text).unwrap_or_else(|| {
            panic!(
                "{VARIABLE}={text:?} is not of the form `forward=4,1,64 queries=4,64 keys=4,64`: \
                 planes of 1 to 16, stretches of 1 or 2, rows of a tile in multiples of 16 up to 256, of `keys` up to 32 for each plane"
            )
        })
    })
}

impl Choice {
    fn parse(text: &str) -> Option<Self> {
        let mut choice = Self::default();
        for part in text.split_whitespace() {
            let (name, numbers) = part.split_once('=')?;
            let numbers: Vec<usize> =
                numbers.split(',').map(|number| number.parse().ok()).collect::<Option<_>>()?;
            let tile = *numbers.last()?;
            let fits = (1..=16).contains(&numbers[0]) && tile.is_multiple_of(16);
            if !fits || !(16..=256).contains(&tile) {
                return None;
            }
            match (name, numbers.as_slice()) {
                ("forward", &[planes, stretches @ 1..=2, keys]) => {
                    choice.forward = Some([planes, stretches, keys]);
                }
                ("queries", &[planes, tile]) => choice.queries = Some([planes, tile]),
                // A unit brings the sums of one row of the tile.
                ("keys", &[planes, tile]) if tile <= 32 * planes => {
                    choice.keys = Some([planes, tile]);
                }
                _ => return None,
            }
        }
        Some(choice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read_and_others_refused() {
        assert_eq!(Choice::parse(""), Some(Choice::default()));
        let some = Choice::parse("keys=8,32 forward=4,2,32").unwrap();
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
            assert_eq!(Choice::parse(bad), None, "{bad}");
        }
    }
}
