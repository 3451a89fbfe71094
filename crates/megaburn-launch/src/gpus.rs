use megaburn_collective::RankEnv;

use crate::options::LaunchOptions;

const VISIBLE: &str = RankEnv::VISIBLE_GPUS;
const RANKS_PER_GPU: &str = RankEnv::RANKS_PER_GPU;

/// NCCL's host id. NCCL refuses two ranks of one host on one GPU.
const HOST: &str = "NCCL_HOSTID";
/// The network interface that NCCL's sockets use.
const NETWORK: &str = "NCCL_SOCKET_IFNAME";

/// Refuses more ranks than the visible GPUs can share, if a list of visible GPUs is set.
pub(crate) fn check(options: &LaunchOptions, visible: Option<&str>) -> Result<(), String> {
    let LaunchOptions {
        nproc,
        ranks_per_gpu,
        ..
    } = *options;
    let (needed, gpus) = match visible {
        Some(visible) if ranks_per_gpu > 1 => {
            let names = visible.split(',').filter(|name| !name.trim().is_empty());
            (nproc.div_ceil(ranks_per_gpu), names.count())
        }
        _ => return Ok(()),
    };
    if needed <= gpus {
        return Ok(());
    }
    Err(format!(
        "{nproc} ranks, {ranks_per_gpu} per GPU, need {needed} GPUs, but {VISIBLE} lists {gpus}"
    ))
}

/// The environment variables of a rank. A rank that shares its GPU also gets its GPU, its own host
/// id and, on a single host, the loopback interface; otherwise only the number of ranks per GPU is
/// set.
pub(crate) fn of_rank(
    options: &LaunchOptions,
    local_rank: usize,
    get: impl Fn(&str) -> Option<String>,
) -> Vec<(&'static str, String)> {
    let LaunchOptions {
        ranks_per_gpu,
        nnodes,
        node_rank,
        ..
    } = *options;
    let together = (RANKS_PER_GPU, ranks_per_gpu.to_string());
    if ranks_per_gpu == 1 {
        return vec![together];
    }
    let index = local_rank / ranks_per_gpu;
    let visible = get(VISIBLE).and_then(|all| Some(all.split(',').nth(index)?.trim().to_string()));
    let mut told = vec![
        together,
        (VISIBLE, visible.unwrap_or_else(|| index.to_string())),
        (HOST, format!("{node_rank}-{local_rank}")),
    ];
    if nnodes == 1 && get(NETWORK).is_none() {
        told.push((NETWORK, "lo".into()));
    }
    told
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(2, None, &[("0", "0-0"), ("0", "0-1"), ("1", "0-2"), ("1", "0-3")])]
    #[case(4, Some("GPU-a, GPU-b"), &[("GPU-a", "0-0"), ("GPU-a", "0-1"), ("GPU-a", "0-2"), ("GPU-a", "0-3"), ("GPU-b", "0-4")])]
    #[case(1, Some("3,5"), &[])]
    fn ranks_are_told_their_gpu_and_to_be_hosts(
        #[case] ranks_per_gpu: usize,
        #[case] visible: Option<&str>,
        #[case] expected: &[(&str, &str)],
    ) {
        let options = LaunchOptions::new(8, vec!["true".into()]).with_ranks_per_gpu(ranks_per_gpu);
        let get = |name: &str| visible.filter(|_| name == VISIBLE).map(String::from);
        let told = |rank| of_rank(&options, rank, get);
        assert_eq!(told(0).len() == 1, ranks_per_gpu == 1);
        for (rank, (gpu, host)) in expected.iter().enumerate() {
            let told = told(rank);
            let of = |name| &told.iter().find(|(told, _)| *told == name).unwrap().1;
            assert_eq!(
                (of(VISIBLE), of(HOST)),
                (&gpu.to_string(), &host.to_string())
            );
            assert_eq!(
                (of(NETWORK), of(RANKS_PER_GPU)),
                (&"lo".to_string(), &ranks_per_gpu.to_string())
            );
        }
    }

    #[rstest]
    #[case(8, 4, Some("4"), "need 2 GPUs, but CUDA_VISIBLE_DEVICES lists 1")]
    #[case(2, 2, Some(""), "need 1 GPUs, but CUDA_VISIBLE_DEVICES lists 0")]
    #[case(8, 4, Some("4,7"), "")]
    #[case(8, 1, Some("4"), "")]
    #[case(8, 4, None, "")]
    fn more_ranks_than_the_visible_gpus_take_are_refused(
        #[case] nproc: usize,
        #[case] ranks_per_gpu: usize,
        #[case] visible: Option<&str>,
        #[case] message: &str,
    ) {
        let options =
            LaunchOptions::new(nproc, vec!["true".into()]).with_ranks_per_gpu(ranks_per_gpu);
        let error = check(&options, visible).err().unwrap_or_default();
        assert!(
            error.is_empty() == message.is_empty() && error.contains(message),
            "{error}"
        );
    }

    #[test]
    fn a_chosen_network_is_kept_and_several_hosts_have_none() {
        let options = LaunchOptions::new(2, vec!["true".into()]).with_ranks_per_gpu(2);
        let eth = |name: &str| (name == NETWORK).then(|| "eth0".to_string());
        let has_network = |told: Vec<(&str, String)>| told.iter().any(|(name, _)| *name == NETWORK);
        assert!(!has_network(of_rank(&options, 0, eth)));
        assert!(!has_network(of_rank(&options.with_nodes(2, 1), 0, |_| {
            None
        })));
    }
}
