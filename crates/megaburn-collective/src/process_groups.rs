use megaburn_mesh::{Axis, Coords, Layout, Mesh};

use crate::{error::CollectiveError, group::Group};

/// The groups of one rank under a layout: one per axis, and the unions that a step needs. Built
/// once from the world and passed to all code that communicates.
///
/// On GPUs each group has a communicator, whose calls run one after the other. Groups with the same
/// members are therefore shared, except where layers would then wait for gradient reductions that
/// are in flight in the same group.
///
/// After Megatron-LM's `megatron/core/process_groups_config.py`.
#[derive(Clone, Debug)]
pub struct ProcessGroups {
    /// The mesh from which the groups were computed.
    pub mesh: Mesh,
    /// This rank's coordinates.
    pub coords: Coords,
    /// All ranks.
    pub world: Group,
    /// The ranks that split the layers' matrices.
    pub tp: Group,
    /// The ranks that split the sequence.
    pub cp: Group,
    /// The ranks that split the batch.
    pub dp: Group,
    /// The ranks that split the layers.
    pub pp: Group,
    /// The ranks with the same dense parameters, whose gradients are summed over this group.
    pub dp_cp: Group,
    /// The ranks that work on the same micro-batch.
    pub tp_cp: Group,
    /// The ranks that together hold one full model, except for experts. Norms are summed over it.
    pub model: Group,
    /// The ranks over which the losses of the global batch are summed. It includes all pipeline
    /// stages, although only one of them computes losses.
    pub batch: Group,
    /// The ranks that split the experts of a layer.
    pub ep: Group,
    /// The ranks that split an expert's matrices.
    pub etp: Group,
    /// The ranks with the same experts, whose gradients are summed over this group.
    pub edp: Group,
    /// The ranks that together hold all experts of their layers; tokens are dispatched over it.
    pub experts: Group,
}

impl ProcessGroups {
    /// Creates the groups of this rank.
    ///
    /// # Errors
    /// The world and the layout have different numbers of ranks.
    /// # Collective
    /// Nothing is sent.
    pub fn new(world: &Group, layout: Layout) -> Result<Self, CollectiveError> {
        layout
            .check_world(world.size())
            .map_err(|error| CollectiveError::Rendezvous {
                why: error.to_string(),
            })?;
        let mesh = Mesh::new(layout);
        let group = |name: &str, axes: &[Axis], known: &[&Group]| {
            world.subgroup_among(name, &mesh.group_of(axes, world.rank()), known)
        };
        let tp = group("tp", &[Axis::Tp], &[])?;
        let cp = group("cp", &[Axis::Cp], &[])?;
        let tp_cp = group("tp-cp", &[Axis::Tp, Axis::Cp], &[&tp, &cp])?;
        let model = group("model", &[Axis::Tp, Axis::Pp], &[&tp])?;
        let dp_cp = group("dp-cp", &[Axis::Dp, Axis::Cp], &[])?;
        let batch = group("batch", &[Axis::Dp, Axis::Cp, Axis::Pp], &[&dp_cp])?;
        let edp = group("edp", &[Axis::Edp], &[&dp_cp])?;
        let known = [&tp, &cp, &tp_cp, &model, world];
        let etp = group("etp", &[Axis::Etp], &known)?;
        let ep = group("ep", &[Axis::Ep], &known)?;
        let known = [&etp, &ep, &tp, &cp, &tp_cp, &model, world];
        let experts = group("experts", &[Axis::Etp, Axis::Ep], &known)?;
        Ok(Self {
            mesh,
            coords: mesh.coords(world.rank()),
            world: world.clone(),
            tp,
            cp,
            dp: group("dp", &[Axis::Dp], &[])?,
            pp: group("pp", &[Axis::Pp], &[])?,
            dp_cp,
            tp_cp,
            model,
            batch,
            ep,
            etp,
            edp,
            experts,
        })
    }

    /// The groups of a run with a single rank.
    pub fn single(seed: u64) -> Self {
        Self::new(&Group::single(seed), Layout::SINGLE).expect(
            "the layout of a single rank fits \
            one rank",
        )
    }

    /// The layout.
    pub fn layout(&self) -> Layout {
        self.mesh.layout()
    }

    /// Whether this is rank 0 of the world, which prints and writes for all.
    pub fn is_main(&self) -> bool {
        self.world.rank() == 0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rstest::rstest;

    use super::*;
    use crate::{launch::run_threads, options::GroupOptions};

    #[rstest]
    fn groups_are_those_of_the_mesh_and_the_same_members_are_one_group(
        #[values(
            "dp1",
            "tp2",
            "dp2-ep2",
            "cp2-ep2",
            "dp4-ep2",
            "tp2-dp2-ep2-sp",
            "tp2-dp2-ep2-etp2-sp",
            "tp2-pp2-dp2-ep2-sp",
            "cp2-dp2-ep4"
        )]
        layout: &str,
    ) {
        let layout: Layout = layout.parse().unwrap();
        let ranks = run_threads(layout.world_size(), GroupOptions::default(), |world| {
            let g = ProcessGroups::new(&world, layout)?;
            use Axis::{Cp, Dp, Edp, Ep, Etp, Tp};
            let layers: [(&Group, &[Axis]); 5] = [
                (&g.tp, &[Tp]),
                (&g.tp_cp, &[Tp, Cp]),
                (&g.ep, &[Ep]),
                (&g.etp, &[Etp]),
                (&g.experts, &[Etp, Ep]),
            ];
            let sums: [(&Group, &[Axis]); 2] = [(&g.dp_cp, &[Dp, Cp]), (&g.edp, &[Edp])];
            for (group, axes) in layers.into_iter().chain(sums) {
                assert_eq!(
                    group.members(),
                    g.mesh.group_of(axes, world.rank()),
                    "{axes:?}"
                );
            }
            let is_one = |a: &Group, b: &Group| Arc::ptr_eq(&a.0, &b.0);
            for of_one_use in [&layers[..], &sums] {
                for (a, b) in of_one_use
                    .iter()
                    .flat_map(|a| of_one_use.iter().map(|b| (a.0, b.0)))
                {
                    assert_eq!(is_one(a, b), a.members() == b.members(), "{a:?} {b:?}");
                }
            }
            // Layers must not wait for gradient reductions.
            for (layer, sum) in layers
                .iter()
                .flat_map(|layer| sums.map(|sum| (layer.0, sum.0)))
            {
                assert!(!is_one(layer, sum), "{layer:?} {sum:?}");
            }
            Ok::<_, CollectiveError>(())
        });
        ranks.into_iter().for_each(|rank| rank.unwrap());
    }

    /// The groups of a world that does not run have the same members, and cannot communicate.
    #[test]
    fn groups_of_shapes_are_those_of_ranks_that_run() {
        let layout: Layout = "tp2-pp2-dp2-ep2-sp".parse().unwrap();
        let ranks = run_threads(layout.world_size(), GroupOptions::default(), |world| {
            let shapes = Group::of_shapes(world.rank(), world.size());
            let of = |world| ProcessGroups::new(world, layout);
            let [running, shapes] = [of(&world)?, of(&shapes)?];
            for (one, other) in [
                (&running.tp, &shapes.tp),
                (&running.ep, &shapes.ep),
                (&running.dp_cp, &shapes.dp_cp),
                (&running.pp, &shapes.pp),
            ] {
                assert_eq!(one.members(), other.members());
                assert_eq!(one.rank(), other.rank());
            }
            let error = shapes.tp.barrier().unwrap_err().to_string();
            assert!(error.contains("do not run"), "{error}");
            assert!(shapes.dp.subgroup("alone", &[world.rank()]).is_ok());
            Ok::<_, CollectiveError>(())
        });
        ranks.into_iter().for_each(|rank| rank.unwrap());
    }
}
