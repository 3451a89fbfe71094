use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{axis::Axis, error::MeshError};

/// The degree of each kind of parallelism in a run, written like `tp2-dp2-sp`.
///
/// The world holds `tp * cp * pp * dp` ranks. Experts refold the same ranks as
/// `etp * ep * edp * pp`; `ep` does not multiply the world.
///
/// Source: Megatron-LM `megatron/core/parallel_state.py`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Layout {
    /// Tensor-parallel degree.
    pub tp: usize,
    /// Context-parallel degree.
    pub cp: usize,
    /// Pipeline-parallel degree.
    pub pp: usize,
    /// Data-parallel degree.
    pub dp: usize,
    /// Expert-parallel degree.
    pub ep: usize,
    /// Tensor-parallel degree inside an expert.
    pub etp: usize,
    /// Sequence parallelism: activations between tensor-parallel regions hold `1 / tp` of the
    /// sequence.
    pub sp: bool,
}

/// Larger than any machine, and small enough that the product of four degrees does not overflow.
const MAX_DEGREE: usize = u16::MAX as usize;

impl Layout {
    /// A single rank.
    pub const SINGLE: Layout = Layout {
        tp: 1,
        cp: 1,
        pp: 1,
        dp: 1,
        ep: 1,
        etp: 1,
        sp: false,
    };

    /// Parses a layout, e.g. `tp2-dp2-sp`. Its parts may be in any order, and an omitted axis has
    /// degree 1. An omitted `dp` is chosen to fill `world` or, without a world, as the smallest
    /// degree that the experts allow.
    ///
    /// # Errors
    /// The text is not a layout, or the layout is not valid or does not have `world` ranks.
    pub fn parse(text: &str, world: Option<usize>) -> Result<Self, MeshError> {
        let syntax = |why: String| MeshError::Syntax {
            text: text.to_string(),
            why,
        };
        let mut layout = Self::SINGLE;
        let mut seen = Vec::new();
        for part in text.split('-') {
            let digits = part
                .find(|c: char| c.is_ascii_digit())
                .unwrap_or(part.len());
            let (name, number) = part.split_at(digits);
            if seen.contains(&name) {
                return Err(syntax(format!("`{name}` is given twice")));
            }
            seen.push(name);
            if name == "sp" && number.is_empty() {
                layout.sp = true;
                continue;
            }
            let degree = match name {
                "tp" => &mut layout.tp,
                "cp" => &mut layout.cp,
                "pp" => &mut layout.pp,
                "dp" => &mut layout.dp,
                "ep" => &mut layout.ep,
                "etp" => &mut layout.etp,
                _ => return Err(syntax(format!("`{part}` is not a known axis or flag"))),
            };
            *degree = number
                .parse()
                .map_err(|_| syntax(format!("`{part}` needs a degree")))?;
            if *degree > MAX_DEGREE {
                return Err(syntax(format!(
                    "the degree in `{part}` is greater than {MAX_DEGREE}"
                )));
            }
        }
        if !seen.contains(&"dp") {
            layout.dp = match world {
                Some(world) => layout.filling_dp(world)?,
                None => layout.smallest_dp(),
            };
        }
        layout.validate()?;
        if let Some(world) = world {
            layout.check_world(world)?;
        }
        Ok(layout)
    }

    /// The degree along `axis`. `edp` is computed from the others.
    pub fn degree(&self, axis: Axis) -> usize {
        match axis {
            Axis::Tp => self.tp,
            Axis::Cp => self.cp,
            Axis::Dp => self.dp,
            Axis::Pp => self.pp,
            Axis::Ep => self.ep,
            Axis::Etp => self.etp,
            Axis::Edp => self.tp * self.cp * self.dp / (self.ep * self.etp),
        }
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.tp * self.cp * self.pp * self.dp
    }

    /// Refuses an impossible layout.
    ///
    /// # Errors
    /// A degree is 0; `sp` without `tp`; `tp` with `ep` but without `sp`; or the expert grid does
    /// not refold the dense one.
    pub fn validate(&self) -> Result<(), MeshError> {
        let layout = self.to_string();
        let Self {
            tp,
            cp,
            pp,
            dp,
            ep,
            etp,
            sp,
        } = *self;
        let degrees = [
            ("tp", tp),
            ("cp", cp),
            ("pp", pp),
            ("dp", dp),
            ("ep", ep),
            ("etp", etp),
        ];
        if let Some((axis, _)) = degrees.into_iter().find(|(_, degree)| *degree == 0) {
            return Err(MeshError::ZeroDegree { layout, axis });
        }
        if sp && tp == 1 {
            return Err(MeshError::SequenceWithoutTensor { layout });
        }
        if tp > 1 && ep > 1 && !sp {
            return Err(MeshError::ExpertsWithoutSequence { layout, tp });
        }
        if !(tp * cp * dp).is_multiple_of(ep * etp) {
            return Err(MeshError::ExpertGrid {
                layout,
                ep,
                etp,
                tp,
                cp,
                dp,
            });
        }
        Ok(())
    }

    /// Refuses a layout whose number of ranks is not `world`.
    ///
    /// # Errors
    /// The product of the degrees is not `world`.
    pub fn check_world(&self, world: usize) -> Result<(), MeshError> {
        let Self { tp, cp, pp, dp, .. } = *self;
        if self.world_size() == world {
            return Ok(());
        }
        Err(MeshError::World {
            layout: self.to_string(),
            tp,
            cp,
            pp,
            dp,
            world,
        })
    }

    fn filling_dp(&self, world: usize) -> Result<usize, MeshError> {
        let Self { tp, cp, pp, .. } = *self;
        let model = tp * cp * pp;
        if model == 0 || world == 0 || !world.is_multiple_of(model) {
            return Err(MeshError::NoDp {
                layout: self.to_string(),
                tp,
                cp,
                pp,
                world,
            });
        }
        Ok(world / model)
    }

    /// The smallest dp for which `ep * etp` divides `tp * cp * dp`.
    fn smallest_dp(&self) -> usize {
        let experts = (self.ep * self.etp).max(1);
        experts / gcd(experts, (self.tp * self.cp).max(1))
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Canonical text: `tp cp pp dp ep etp sp` in this order, without degrees of 1. A single rank is
/// `tp1`.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = [Axis::Tp, Axis::Cp, Axis::Pp, Axis::Dp, Axis::Ep, Axis::Etp];
        let mut parts: Vec<String> = axes
            .into_iter()
            .map(|axis| (axis, self.degree(axis)))
            .filter(|(_, degree)| *degree != 1)
            .map(|(axis, degree)| format!("{axis}{degree}"))
            .collect();
        if self.sp {
            parts.push("sp".into());
        }
        if parts.is_empty() {
            parts.push("tp1".into());
        }
        f.write_str(&parts.join("-"))
    }
}

impl FromStr for Layout {
    type Err = MeshError;

    fn from_str(text: &str) -> Result<Self, MeshError> {
        Self::parse(text, None)
    }
}

impl From<Layout> for String {
    fn from(layout: Layout) -> Self {
        layout.to_string()
    }
}

impl TryFrom<String> for Layout {
    type Error = MeshError;

    fn try_from(text: String) -> Result<Self, MeshError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("tp2-dp2-sp", None, "tp2-dp2-sp", 4)]
    #[case("sp-dp2-tp2", None, "tp2-dp2-sp", 4)]
    #[case("tp1", None, "tp1", 1)]
    #[case("dp1-tp1-pp1", None, "tp1", 1)]
    #[case("ep2", None, "dp2-ep2", 2)]
    #[case("tp2-ep4-sp", None, "tp2-dp2-ep4-sp", 4)]
    #[case("tp2-ep2-etp2-sp", None, "tp2-dp2-ep2-etp2-sp", 4)]
    #[case("tp2", Some(8), "tp2-dp4", 8)]
    #[case("tp2-pp2-cp2", Some(8), "tp2-cp2-pp2", 8)]
    fn texts_are_read_and_printed_canonically(
        #[case] text: &str,
        #[case] world: Option<usize>,
        #[case] canonical: &str,
        #[case] size: usize,
    ) {
        let layout = Layout::parse(text, world).unwrap();
        assert_eq!(layout.to_string(), canonical);
        assert_eq!(layout.world_size(), size);
        assert_eq!(canonical.parse(), Ok(layout));
    }

    #[rstest]
    #[case("", None, "`` is not a known axis")]
    #[case("tp2-tp4", None, "is given twice")]
    #[case("xp2", None, "`xp2` is not a known axis")]
    #[case("tp", None, "`tp` needs a degree")]
    #[case("tp2x", None, "`tp2x` needs a degree")]
    #[case("tp-2", None, "`tp` needs a degree")]
    #[case("sp2", None, "`sp2` is not a known axis")]
    #[case("tp0", None, "degree 0 on tp")]
    #[case("tp0", Some(2), "does not divide the 2 ranks")]
    #[case("tp99999999999999999999", None, "needs a degree")]
    #[case(
        "tp9999999999-cp9999999999",
        None,
        "the degree in `tp9999999999` is greater than 65535"
    )]
    #[case("sp", None, "needs tp > 1")]
    #[case("tp2-ep2", None, "add `-sp`")]
    #[case(
        "dp2-ep4",
        None,
        "ep 4 x etp 1 = 4 does not divide tp 1 x cp 1 x dp 2 = 2"
    )]
    #[case("tp3", Some(8), "tp 3 x cp 1 x pp 1 = 3 does not divide the 8 ranks")]
    #[case(
        "tp2-dp2",
        Some(8),
        "tp 2 x cp 1 x pp 1 x dp 2 = 4 ranks, but there are 8"
    )]
    fn a_bad_text_is_an_error_with_the_numbers(
        #[case] text: &str,
        #[case] world: Option<usize>,
        #[case] message: &str,
    ) {
        let error = Layout::parse(text, world).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}
