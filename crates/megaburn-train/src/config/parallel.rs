use megaburn_mesh::Layout;
use serde::{Deserialize, Serialize};

use super::check::require;
use crate::TrainError;

/// `[parallel]`: how the run is split over ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelConfig {
    /// Rank threads to start where neither a launcher nor `dp` says how many ranks there are.
    pub ranks: usize,
    /// Tensor-parallel degree.
    pub tp: usize,
    /// Context-parallel degree.
    pub cp: usize,
    /// Pipeline-parallel degree.
    pub pp: usize,
    /// Data-parallel degree. Default: what fills the ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dp: Option<usize>,
    /// Expert-parallel degree.
    pub ep: usize,
    /// Tensor-parallel degree inside an expert.
    pub etp: usize,
    /// Sequence parallelism. Default: on if tp > 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sp: Option<bool>,
}

impl Default for ParallelConfig {
    fn default() -> Self {
        Self { ranks: 4, tp: 2, cp: 1, pp: 1, dp: None, ep: 1, etp: 1, sp: None }
    }
}

/// Degrees up to this multiply without overflow.
const MAX_DEGREE: usize = u16::MAX as usize;

impl ParallelConfig {
    /// The section that a layout text stands for. A text without `dp` still fills the world of a
    /// launcher; without one it takes as few ranks as the other degrees allow.
    ///
    /// # Errors
    /// A text that is no layout, or a layout that cannot be.
    pub fn from_layout(text: &str) -> Result<Self, TrainError> {
        let layout: Layout = text.parse()?;
        let Layout { tp, cp, pp, dp, ep, etp, sp } = layout;
        let dp = text.split('-').any(|part| part.starts_with("dp")).then_some(dp);
        Ok(Self { ranks: layout.world_size(), tp, cp, pp, dp, ep, etp, sp: Some(sp) })
    }

    /// The layout on `world` ranks (`None`: no launcher says how many).
    ///
    /// # Errors
    /// A layout that cannot be, or that does not take `world` ranks.
    pub fn layout(&self, world: Option<usize>) -> Result<Layout, TrainError> {
        self.validate()?;
        let Self { ranks, tp, cp, pp, ep, etp, .. } = *self;
        let mut text = format!("tp{tp}-cp{cp}-pp{pp}-ep{ep}-etp{etp}");
        if self.sp.unwrap_or(tp > 1) {
            text.push_str("-sp");
        }
        match (self.dp, world) {
            (Some(dp), world) => Ok(Layout::parse(&format!("{text}-dp{dp}"), world)?),
            (None, Some(world)) => Ok(Layout::parse(&text, Some(world))?),
            (None, None) => Layout::parse(&text, Some(ranks))
                .map_err(|source| TrainError::Ranks { ranks, source }),
        }
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        let degree = |key, value| {
            let rule = format!("from 1 to {MAX_DEGREE}");
            require((1..=MAX_DEGREE).contains(&value), key, value, rule)
        };
        degree("parallel.ranks", self.ranks)?;
        degree("parallel.tp", self.tp)?;
        degree("parallel.cp", self.cp)?;
        degree("parallel.pp", self.pp)?;
        degree("parallel.dp", self.dp.unwrap_or(1))?;
        degree("parallel.ep", self.ep)?;
        degree("parallel.etp", self.etp)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{ConfigLayers, Exit};

    fn section(lines: &str) -> Result<ParallelConfig, TrainError> {
        let layers = ConfigLayers::new().with_text("p.toml", &format!("[parallel]\n{lines}"))?;
        Ok(layers.load()?.parallel)
    }

    #[rstest]
    #[case("", None, "tp2-dp2-sp")]
    #[case("", Some(8), "tp2-dp4-sp")]
    #[case("tp = 1", None, "dp4")]
    #[case("tp = 4", None, "tp4-sp")]
    #[case("sp = false", None, "tp2-dp2")]
    #[case("pp = 2", None, "tp2-pp2-sp")]
    #[case("dp = 4", None, "tp2-dp4-sp")]
    #[case("tp = 8\nranks = 16", None, "tp8-dp2-sp")]
    #[case("tp = 1\nranks = 1", None, "tp1")]
    #[case("ep = 2", None, "tp2-dp2-ep2-sp")]
    fn absent_degrees_follow_from_the_others(
        #[case] lines: &str,
        #[case] world: Option<usize>,
        #[case] layout: &str,
    ) {
        assert_eq!(section(lines).unwrap().layout(world).unwrap().to_string(), layout);
    }

    #[rstest]
    #[case("tp2", None, "tp2")]
    #[case("tp2", Some(8), "tp2-dp4")]
    #[case("tp2-dp2-sp", None, "tp2-dp2-sp")]
    #[case("ep2", None, "dp2-ep2")]
    #[case("tp1", None, "tp1")]
    fn a_layout_text_becomes_a_section(
        #[case] text: &str,
        #[case] world: Option<usize>,
        #[case] layout: &str,
    ) {
        let section = ParallelConfig::from_layout(text).unwrap();
        assert_eq!(section.layout(world).unwrap().to_string(), layout);
    }

    #[rstest]
    #[case("tp = 0", None, "`parallel.tp` is 0: it must be from 1 to 65535")]
    #[case("cp = 0", None, "`parallel.cp` is 0: it must be from 1 to 65535")]
    #[case("pp = 0", None, "`parallel.pp` is 0: it must be from 1 to 65535")]
    #[case("dp = 0", None, "`parallel.dp` is 0: it must be from 1 to 65535")]
    #[case("ep = 0", None, "`parallel.ep` is 0: it must be from 1 to 65535")]
    #[case("etp = 65536", None, "`parallel.etp` is 65536: it must be from 1 to 65535")]
    #[case("ranks = 0", None, "`parallel.ranks` is 0: it must be from 1 to 65535")]
    #[case("tp = 1\nsp = true", None, "sequence parallelism (sp) needs tp > 1")]
    #[case("dp = 2", Some(8), "= 4 ranks, and there are 8")]
    #[case("tp = 3", Some(8), "3 does not divide the 8 ranks, so no dp fills the world")]
    #[case(
        "tp = 8",
        None,
        "does not divide the 4 ranks, so no dp fills the world; no launcher says how many ranks there are, so it is `parallel.ranks` = 4: change it, or set `parallel.dp`"
    )]
    fn a_section_that_is_no_layout_is_refused(
        #[case] lines: &str,
        #[case] world: Option<usize>,
        #[case] message: &str,
    ) {
        let error = section(lines).and_then(|section| section.layout(world)).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }
}
