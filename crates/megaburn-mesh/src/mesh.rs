use crate::{axis::Axis, layout::Layout};

/// The grid of ranks that a [`Layout`] describes.
///
/// Ranks run fastest along tp, then cp, dp, pp (experts: etp, ep, edp, pp), so that tensor-parallel
/// peers are neighbours on one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    layout: Layout,
}

/// The coordinates of a rank on both grids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "there is one field per axis")]
pub struct Coords {
    pub tp: usize,
    pub cp: usize,
    pub dp: usize,
    pub pp: usize,
    pub etp: usize,
    pub ep: usize,
    pub edp: usize,
}

impl Coords {
    /// The coordinate along `axis`.
    pub fn get(&self, axis: Axis) -> usize {
        match axis {
            Axis::Tp => self.tp,
            Axis::Cp => self.cp,
            Axis::Dp => self.dp,
            Axis::Pp => self.pp,
            Axis::Etp => self.etp,
            Axis::Ep => self.ep,
            Axis::Edp => self.edp,
        }
    }
}

impl Mesh {
    /// The mesh of a validated layout.
    pub fn new(layout: Layout) -> Self {
        Self { layout }
    }

    /// The layout that it was created from.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.layout.world_size()
    }

    /// The coordinates of `rank`.
    ///
    /// # Panics
    /// If `rank` is not less than the world size.
    pub fn coords(&self, rank: usize) -> Coords {
        assert!(
            rank < self.world_size(),
            "rank {rank} must be less than the world size {}",
            self.world_size()
        );
        let [tp, cp, dp, pp] = self.digits(rank, Axis::DENSE);
        let [etp, ep, edp, _] = self.digits(rank, Axis::EXPERT);
        Coords {
            tp,
            cp,
            dp,
            pp,
            etp,
            ep,
            edp,
        }
    }

    /// The rank at these dense coordinates.
    pub fn rank_at(&self, tp: usize, cp: usize, dp: usize, pp: usize) -> usize {
        let Layout {
            tp: tps,
            cp: cps,
            dp: dps,
            ..
        } = self.layout;
        ((pp * dps + dp) * cps + cp) * tps + tp
    }

    /// The ranks that differ from `rank` only along `axes`, in rank order.
    ///
    /// # Panics
    /// If `axes` mixes the dense and the expert grid, which a group cannot do.
    #[expect(
        clippy::panic,
        reason = "documented: the axes are those of the program, not of a user"
    )]
    pub fn group_of(&self, axes: &[Axis], rank: usize) -> Vec<usize> {
        let grid = [Axis::DENSE, Axis::EXPERT]
            .into_iter()
            .find(|grid| axes.iter().all(|axis| grid.contains(axis)))
            .unwrap_or_else(|| panic!("{axes:?} mixes axes of the dense and the expert grid"));
        let here = self.coords(rank);
        let fixed = grid.into_iter().filter(|axis| !axes.contains(axis));
        let fixed: Vec<Axis> = fixed.collect();
        (0..self.world_size())
            .filter(|&other| {
                let there = self.coords(other);
                fixed.iter().all(|&axis| there.get(axis) == here.get(axis))
            })
            .collect()
    }

    /// All groups along `axes`. They partition the world; each is in rank order, and they are
    /// ordered by their first member.
    pub fn groups(&self, axes: &[Axis]) -> Vec<Vec<usize>> {
        (0..self.world_size())
            .map(|rank| (rank, self.group_of(axes, rank)))
            .filter(|(rank, group)| group[0] == *rank)
            .map(|(_, group)| group)
            .collect()
    }

    fn digits(&self, rank: usize, grid: [Axis; 4]) -> [usize; 4] {
        let mut rest = rank;
        grid.map(|axis| {
            let degree = self.layout.degree(axis);
            let digit = rest % degree;
            rest /= degree;
            digit
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn groups_are_those_of_megatrons_documentation() {
        // From the docstring of Megatron's `initialize_model_parallel`: 16 ranks, TP 2, PP 4.
        let mesh = Mesh::new("tp2-pp4-dp2".parse().unwrap());
        assert_eq!(mesh.groups(&[Axis::Tp])[..3], [[0, 1], [2, 3], [4, 5]]);
        assert_eq!(mesh.groups(&[Axis::Dp])[..3], [[0, 2], [1, 3], [4, 6]]);
        assert_eq!(
            mesh.groups(&[Axis::Pp])[..2],
            [[0, 4, 8, 12], [1, 5, 9, 13]]
        );
    }

    #[test]
    fn experts_refold_the_same_ranks() {
        let mesh = Mesh::new("dp8-ep8".parse().unwrap());
        assert_eq!(mesh.world_size(), 8);
        assert_eq!(mesh.layout().degree(Axis::Edp), 1);
        assert_eq!(mesh.groups(&[Axis::Ep]), [[0, 1, 2, 3, 4, 5, 6, 7]]);
        let folded = Mesh::new("tp2-dp4-ep2-etp1-sp".parse().unwrap());
        assert_eq!(folded.groups(&[Axis::Ep]), [[0, 1], [2, 3], [4, 5], [6, 7]]);
        assert_eq!(folded.groups(&[Axis::Edp]), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    }

    fn any_layout() -> impl Strategy<Value = Layout> {
        (
            1usize..5,
            1usize..4,
            1usize..4,
            1usize..5,
            1usize..5,
            1usize..3,
        )
            .prop_filter_map("expert grid", |(tp, cp, pp, dp, ep, etp)| {
                let layout = Layout {
                    tp,
                    cp,
                    pp,
                    dp,
                    ep,
                    etp,
                    sp: tp > 1,
                };
                layout.validate().is_ok().then_some(layout)
            })
    }

    proptest! {
        #[test]
        fn coordinates_are_a_bijection(layout in any_layout()) {
            let mesh = Mesh::new(layout);
            let mut dense = HashSet::new();
            let mut expert = HashSet::new();
            for rank in 0..mesh.world_size() {
                let c = mesh.coords(rank);
                prop_assert_eq!(mesh.rank_at(c.tp, c.cp, c.dp, c.pp), rank);
                prop_assert!(dense.insert((c.tp, c.cp, c.dp, c.pp)));
                prop_assert!(expert.insert((c.etp, c.ep, c.edp, c.pp)));
                for axis in Axis::DENSE.into_iter().chain(Axis::EXPERT) {
                    prop_assert!(c.get(axis) < layout.degree(axis));
                }
            }
        }

        #[test]
        fn groups_partition_the_world(layout in any_layout(), grid in 0usize..2, mask in 1usize..16) {
            let mesh = Mesh::new(layout);
            let grid = [Axis::DENSE, Axis::EXPERT][grid];
            let axes: Vec<Axis> =
                (0..4).filter(|bit| mask >> bit & 1 == 1).map(|bit| grid[bit]).collect();
            let size: usize = axes.iter().map(|&axis| layout.degree(axis)).product();
            let mut seen = HashSet::new();
            for group in mesh.groups(&axes) {
                prop_assert_eq!(group.len(), size);
                for &rank in &group {
                    prop_assert!(seen.insert(rank));
                    prop_assert_eq!(&mesh.group_of(&axes, rank), &group);
                }
            }
            prop_assert_eq!(seen.len(), mesh.world_size());
        }

        #[test]
        fn canonical_text_round_trips(layout in any_layout()) {
            prop_assert_eq!(layout.to_string().parse(), Ok(layout));
        }
    }
}
