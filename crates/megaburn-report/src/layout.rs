use megaburn_mesh::{Axis, Layout, Mesh};

/// Describes a layout: `tp2-dp2-sp: 4 ranks; tp [0, 1] [2, 3]; dp [0, 2] [1, 3]`.
pub fn describe_layout(layout: &Layout) -> String {
    let mesh = Mesh::new(*layout);
    let ranks = layout.world_size();
    let groups = |axis| {
        let groups = mesh
            .groups(&[axis])
            .into_iter()
            .map(|group| format!("{group:?}"));
        format!("{axis} {}", groups.collect::<Vec<_>>().join(" "))
    };
    let split = Axis::DENSE
        .into_iter()
        .filter(|&axis| layout.degree(axis) > 1)
        .map(groups);
    let split = split.collect::<Vec<_>>().join("; ");
    if ranks == 1 {
        format!("{layout}: 1 rank")
    } else {
        format!("{layout}: {ranks} ranks; {split}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_told_with_its_groups() {
        let told = |text: &str| describe_layout(&text.parse().unwrap());
        assert_eq!(told("tp1"), "tp1: 1 rank");
        assert_eq!(told("pp2"), "pp2: 2 ranks; pp [0, 1]");
        assert_eq!(told("cp2"), "cp2: 2 ranks; cp [0, 1]");
        let all = "tp2-pp2-dp2: 8 ranks; tp [0, 1] [2, 3] [4, 5] [6, 7]; \
                   dp [0, 2] [1, 3] [4, 6] [5, 7]; pp [0, 4] [1, 5] [2, 6] [3, 7]";
        assert_eq!(told("tp2-pp2-dp2"), all);
    }
}
