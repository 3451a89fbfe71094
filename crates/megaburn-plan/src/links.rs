//! How fast the ranks of a group send to each other, inside of a server and between servers.
//!
//! Inside, every rank sends through NVLink. Between servers, every rank has a network adapter. What
//! a group sends through them depends on how it sends:
//!
//! - A collective that NCCL computes in rings (all-gather, reduce-scatter, all-reduce) passes each
//!   byte once from server to server, through all adapters of the group at once.
//! - In an all-to-all, each rank sends data for ranks of other servers through its own adapter.
//! - A rank that sends to the next rank only, which may be in another server, has its own adapter.

use megaburn_mesh::{Axis, Layout};

/// The connections between the ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Links {
    /// The number of ranks.
    pub(crate) ranks: usize,
    /// How many of them are in one server.
    pub(crate) inside: usize,
    /// Bytes per second that a rank sends inside of a server.
    pub(crate) nvlink: f64,
    /// Bytes per second that a rank sends to other servers.
    pub(crate) network: f64,
}

impl Links {
    fn is_inside(self) -> bool {
        self.inside == self.ranks
    }

    /// The bytes per second that a rank sends in a ring.
    pub(crate) fn ring(self) -> f64 {
        if self.is_inside() {
            return self.nvlink;
        }
        (self.inside as f64 * self.network).min(self.nvlink)
    }

    /// The bytes per second that a rank sends to the next one. All ranks wait for the slowest.
    pub(crate) fn neighbour(self) -> f64 {
        if self.is_inside() {
            return self.nvlink;
        }
        self.network.min(self.nvlink)
    }

    /// The bytes per second that a rank sends in equal parts to all others.
    pub(crate) fn exchange(self) -> f64 {
        if self.is_inside() {
            return self.nvlink;
        }
        let share = |ranks: usize| ranks as f64 / (self.ranks - 1) as f64;
        // Both at once.
        let inside = share(self.inside - 1) / self.nvlink;
        let outside = share(self.ranks - self.inside) / self.network;
        1.0 / inside.max(outside)
    }

    /// The links of the parts of `ranks` ranks, each of which follow each other in the group.
    pub(crate) fn part(self, ranks: usize) -> Self {
        Self {
            ranks,
            inside: self.inside.min(ranks),
            ..self
        }
    }
}

/// How many of the first `node` ranks are in the group of rank 0 over `axes`.
pub(crate) fn ranks_of_first_node(layout: &Layout, axes: &[Axis], node: usize) -> usize {
    let is_expert = axes.iter().any(|axis| !Axis::DENSE.contains(axis));
    let grid = if is_expert { Axis::EXPERT } else { Axis::DENSE };
    let is_member = |rank: &usize| {
        let mut left = *rank;
        grid.into_iter().all(|axis| {
            let degree = layout.degree(axis);
            let coordinate = left % degree;
            left /= degree;
            coordinate == 0 || axes.contains(&axis)
        })
    };
    (0..node.min(layout.world_size())).filter(is_member).count()
}

#[cfg(test)]
mod tests {
    use megaburn_mesh::Mesh;
    use megaburn_train::TrainConfig;

    use super::*;
    use crate::{gpu::Gpu, machine::Machine};

    const NVLINK: f64 = 0.72 * 450e9;
    const NETWORK: f64 = 0.8 * 50e9;

    fn links(layout: &str, axes: &[Axis]) -> Links {
        let machine = Machine::new(Gpu::H100, &TrainConfig::default()).unwrap();
        machine.links(&layout.parse().unwrap(), axes)
    }

    #[test]
    fn a_ring_over_servers_sends_through_as_many_adapters_as_it_has_ranks_in_a_server() {
        assert_eq!(links("tp8-dp4-sp", &[Axis::Tp]).ring(), NVLINK);
        assert_eq!(links("tp8-dp4-sp", &[Axis::Dp]).ring(), NETWORK);
        assert_eq!(links("dp16", &[Axis::Dp]).ring(), 8.0 * NETWORK);
    }

    #[test]
    fn in_an_all_to_all_each_rank_sends_to_other_servers_through_its_own_adapter() {
        assert_eq!(links("dp8-ep8", &[Axis::Ep]).exchange(), NVLINK);
        // Of 15 other ranks, 8 are in the other server, and NVLink has time for the other 7.
        let two = links("dp16-ep16", &[Axis::Ep]);
        assert!((two.exchange() / (NETWORK * 15.0 / 8.0) - 1.0).abs() < 1e-12);
        // Of 63 others, 56 are in other servers.
        let eight = links("dp64-ep64", &[Axis::Ep]);
        assert!((eight.exchange() / (NETWORK * 63.0 / 56.0) - 1.0).abs() < 1e-12);
        // One rank in each server.
        let apart = links("dp64-ep8-etp8-tp8-sp", &[Axis::Ep]);
        assert_eq!((apart.ranks, apart.inside), (8, 1));
        assert!((apart.exchange() / NETWORK - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_rank_sends_to_a_neighbour_in_another_server_through_one_adapter() {
        assert_eq!(links("cp8", &[Axis::Cp]).neighbour(), NVLINK);
        assert_eq!(links("cp16", &[Axis::Cp]).neighbour(), NETWORK);
        // Two stages in each server: every second one sends to another server.
        assert_eq!(links("tp4-pp4-sp", &[Axis::Pp]).neighbour(), NETWORK);
    }

    #[test]
    fn parts_of_a_group_inside_a_server_send_through_nvlink() {
        let links = links("cp16", &[Axis::Cp]);
        assert_eq!(links.part(4).exchange(), NVLINK);
        assert_eq!(links.part(16), links);
    }

    #[test]
    fn ranks_of_a_server_are_counted_as_the_mesh_numbers_them() {
        for text in ["tp2-cp2-dp4-sp", "tp2-dp8-ep4-etp2-sp", "cp2-pp2-dp4-ep4"] {
            let layout: Layout = text.parse().unwrap();
            let mesh = Mesh::new(layout);
            for axes in [
                &[Axis::Tp][..],
                &[Axis::Dp, Axis::Cp],
                &[Axis::Ep],
                &[Axis::Edp],
            ] {
                let members = mesh.group_of(axes, 0);
                let expected = members.iter().filter(|rank| **rank < 8).count();
                assert_eq!(
                    ranks_of_first_node(&layout, axes, 8),
                    expected,
                    "{text} {axes:?}"
                );
            }
        }
    }
}
