use megaburn_mesh::{Axis, Coords, Layout, Mesh};

use crate::{CollectiveError, Group};

/// The groups of one rank under a layout: one an axis, and the unions that a step needs. Built once
/// from the world and handed to whatever communicates.
///
/// After Megatron-LM's `megatron/core/process_groups_config.py`.
#[derive(Clone, Debug)]
pub struct ProcessGroups {
    /// The mesh behind it.
    pub mesh: Mesh,
    /// Where this rank stands.
    pub coords: Coords,
    /// All ranks.
    pub world: Group,
    /// Shares the layers' matrices.
    pub tp: Group,
    /// Shares the sequence.
    pub cp: Group,
    /// Shares the batch.
    pub dp: Group,
    /// Shares the layers.
    pub pp: Group,
    /// Holds the same dense parameters: their gradients are summed over it.
    pub dp_cp: Group,
    /// Holds one whole model between them: norms are summed over it.
    pub model: Group,
    /// Holds the losses of the whole batch between them: the stages of pipelines, one of which has some.
    pub batch: Group,
}

impl ProcessGroups {
    /// The groups of this rank.
    ///
    /// # Errors
    /// The world has another size than the layout.
    /// # Collective
    /// Nothing is sent.
    pub fn new(world: &Group, layout: Layout) -> Result<Self, CollectiveError> {
        layout
            .check_world(world.size())
            .map_err(|error| CollectiveError::Rendezvous { why: error.to_string() })?;
        let mesh = Mesh::new(layout);
        let group =
            |name: &str, axes: &[Axis]| world.subgroup(name, &mesh.group_of(axes, world.rank()));
        let tp = group("tp", &[Axis::Tp])?;
        // One group, one communicator on the GPU.
        let model = match layout.pp {
            1 => tp.clone(),
            _ => group("model", &[Axis::Tp, Axis::Pp])?,
        };
        let dp_cp = group("dp-cp", &[Axis::Dp, Axis::Cp])?;
        let batch = match layout.pp {
            1 => dp_cp.clone(),
            _ => group("batch", &[Axis::Dp, Axis::Cp, Axis::Pp])?,
        };
        Ok(Self {
            mesh,
            coords: mesh.coords(world.rank()),
            world: world.clone(),
            tp,
            cp: group("cp", &[Axis::Cp])?,
            dp: group("dp", &[Axis::Dp])?,
            pp: group("pp", &[Axis::Pp])?,
            dp_cp,
            model,
            batch,
        })
    }

    /// The groups of a run of one rank.
    pub fn single(seed: u64) -> Self {
        Self::new(&Group::single(seed), Layout::SINGLE).expect("one rank fits one rank")
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
