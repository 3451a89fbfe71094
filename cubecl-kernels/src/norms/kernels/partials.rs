use cubecl::prelude::*;

/// Sums the teams' partial sums `[teams, len]`: 32 columns a cube, every plane a part of the teams,
/// in a fixed order.
#[cube(launch, address_type = "dynamic")]
pub(in crate::norms) fn partials_kernel<G: Float, H: Float>(
    dgamma_parts: &[f32],
    dbeta_parts: &[f32],
    dgamma: &mut [G],
    dbeta: &mut [H],
    teams: u32,
    len: u32,
    #[comptime] beta: bool,
    #[define(G, H)] _dtypes: [ElemType; 2],
) {
    let mut shared = Shared::new_slice(1024usize);
    let column = CUBE_POS_X * 32 + UNIT_POS_X;
    let mut for_gamma = f32::new(0.0);
    let mut for_beta = f32::new(0.0);
    if column < len {
        let mut part = UNIT_POS_Y;
        while part < teams {
            let at = part as usize * len as usize + column as usize;
            for_gamma += dgamma_parts[at];
            if comptime!(beta) {
                for_beta += dbeta_parts[at];
            }
            part += 16;
        }
    }
    shared[UNIT_POS as usize] = for_gamma;
    shared[(512 + UNIT_POS) as usize] = for_beta;
    sync_cube();
    if UNIT_POS_Y == 0 && column < len {
        for_gamma = 0.0;
        for_beta = 0.0;
        #[unroll]
        for plane in 0..16u32 {
            for_gamma += shared[(plane * 32 + UNIT_POS_X) as usize];
            for_beta += shared[(512 + plane * 32 + UNIT_POS_X) as usize];
        }
        dgamma[column as usize] = G::cast_from(for_gamma);
        if comptime!(beta) {
            dbeta[column as usize] = H::cast_from(for_beta);
        }
    }
}
