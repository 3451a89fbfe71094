use serde::{Deserialize, Serialize};

use crate::{error::MeshError, layout::Layout};

/// The sizes of a model that a layout must be able to split. The vocabulary is not included because
/// it is padded, and the layers are not because a pipeline can split them in several ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelShape {
    /// Width inside the MLP, or the common divisor of several widths; 0 if there are no MLPs.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads (KV groups). If there are fewer than tp, each is replicated.
    pub kv_heads: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Experts in place of MLPs; `None` for a dense model.
    pub experts: Option<ExpertShape>,
}

/// The sizes of experts that a layout must be able to split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertShape {
    /// Experts per layer.
    pub num: usize,
    /// Width inside an expert.
    pub ffn: usize,
}

impl Layout {
    /// Refuses a model that this layout cannot split.
    ///
    /// The first size that is not divisible, with all numbers and the setting to change.
    pub fn validate_for(&self, model: &ModelShape) -> Result<(), MeshError> {
        let ModelShape {
            ffn,
            heads,
            kv_heads,
            seq_len,
            experts,
        } = *model;
        let tp = self.tp;
        let cp = self.cp;
        self.divides(
            "attention heads",
            heads,
            "tp",
            tp,
            "choose a tp that divides the heads",
        )?;
        if kv_heads == 0 || !(kv_heads.is_multiple_of(tp) || tp.is_multiple_of(kv_heads)) {
            return Err(MeshError::KvHeads {
                layout: self.to_string(),
                kv_heads,
                heads,
                tp,
            });
        }
        if ffn > 0 {
            self.divides("MLP width", ffn, "tp", tp, "choose a tp that divides it")?;
        }
        match experts {
            Some(experts) => self.validate_experts_for(&experts)?,
            None if self.ep * self.etp > 1 => {
                let Self { ep, etp, .. } = *self;
                return Err(MeshError::NoExperts {
                    layout: self.to_string(),
                    ep,
                    etp,
                });
            }
            None => {}
        }
        if cp > 1 {
            let hint = "the zigzag split cuts 2 x cp chunks: change the sequence length, or pad \
                       it (`parallel.cp_pad = true`)";
            self.divides("sequence length", seq_len, "2 x cp =", 2 * cp, hint)?;
        }
        if self.sp {
            let hint = "change the sequence length, or drop `sp`";
            self.divides("sequence length", seq_len, "tp x cp =", tp * cp, hint)?;
        }
        Ok(())
    }

    fn validate_experts_for(&self, experts: &ExpertShape) -> Result<(), MeshError> {
        let Self {
            tp, ep, etp, sp, ..
        } = *self;
        if tp > 1 && !sp {
            return Err(MeshError::ExpertsWithoutSequence {
                layout: self.to_string(),
                tp,
            });
        }
        let hint = "choose an ep that divides the experts";
        self.divides("experts", experts.num, "ep", ep, hint)?;
        let hint = "choose an etp that divides it";
        self.divides("width of an expert", experts.ffn, "etp", etp, hint)
    }

    fn divides(
        &self,
        what: &'static str,
        size: usize,
        divisor_name: &'static str,
        divisor: usize,
        hint: &str,
    ) -> Result<(), MeshError> {
        if size > 0 && size.is_multiple_of(divisor) {
            return Ok(());
        }
        let layout = self.to_string();
        let hint = hint.to_string();
        Err(MeshError::Indivisible {
            layout,
            what,
            size,
            divisor_name,
            divisor,
            hint,
        })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const MODEL: ModelShape = ModelShape {
        ffn: 160,
        heads: 8,
        kv_heads: 4,
        seq_len: 64,
        experts: None,
    };
    const EXPERTS: ExpertShape = ExpertShape { num: 12, ffn: 48 };

    #[rstest]
    #[case("tp8-sp")]
    #[case("tp2-cp2-pp4-sp")]
    #[case("pp3")]
    #[case("dp7")]
    fn a_layout_that_divides_is_accepted(#[case] layout: Layout) {
        layout.validate_for(&MODEL).unwrap();
    }

    #[rstest]
    #[case("tp3", "attention heads 8 is not divisible by tp 3")]
    #[case("tp16", "attention heads 8 is not divisible by tp 16")]
    #[case("cp3", "sequence length 64 is not divisible by 2 x cp = 6")]
    fn a_layout_that_does_not_divide_is_refused_with_the_numbers(
        #[case] layout: Layout,
        #[case] message: &str,
    ) {
        let error = layout.validate_for(&MODEL).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }

    #[rstest]
    #[case("dp4-ep4", "")]
    #[case("tp2-dp2-ep2-etp2-sp", "")]
    #[case("dp5-ep5", "experts 12 is not divisible by ep 5")]
    #[case("dp5-etp5", "width of an expert 48 is not divisible by etp 5")]
    #[case("tp2", "tp 2 with experts needs sequence parallelism")]
    fn experts_are_split_over_their_own_grid(#[case] layout: Layout, #[case] message: &str) {
        let model = ModelShape {
            ffn: 0,
            experts: Some(EXPERTS),
            ..MODEL
        };
        let found = layout
            .validate_for(&model)
            .map_err(|error| error.to_string());
        assert!(found.err().unwrap_or_default().contains(message));
        assert_eq!(layout.validate_for(&model).is_ok(), message.is_empty());
        let dense = layout
            .validate_for(&MODEL)
            .map_err(|error| error.to_string());
        let is_of_experts = layout.ep * layout.etp > 1;
        assert_eq!(
            dense.is_err_and(|error| error.contains("has no experts")),
            is_of_experts
        );
    }

    #[test]
    fn kv_heads_divide_or_are_divided() {
        let layout: Layout = "tp2".parse().unwrap();
        layout
            .validate_for(&ModelShape {
                kv_heads: 1,
                ..MODEL
            })
            .unwrap();
        let error = layout
            .validate_for(&ModelShape {
                kv_heads: 3,
                ..MODEL
            })
            .unwrap_err()
            .to_string();
        assert!(error.contains("3 key/value heads over tp 2"), "{error}");
    }

    #[test]
    fn sequence_parallelism_needs_a_divisible_sequence() {
        let layout: Layout = "tp2-sp".parse().unwrap();
        let error = layout
            .validate_for(&ModelShape {
                seq_len: 63,
                ..MODEL
            })
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("sequence length 63 is not divisible by tp x cp = 2"),
            "{error}"
        );
    }
}
