//! Which ranks are on which host.

use megaburn_collective::{Group, objects};

use crate::error::CheckpointError;

/// The host of each rank, and how many other hosts keep a copy of a rank's file.
#[derive(Debug)]
pub struct Hosts {
    /// The number of the host of each rank. Hosts are numbered in the order of their first ranks.
    of_rank: Vec<usize>,
    names: Vec<String>,
    num_replicas: usize,
    /// Groups of all ranks for threads that send files while the other groups are in use.
    pub(crate) files: Group,
    pub(crate) answers: Group,
    /// The ranks of this host.
    pub(crate) of_host: Group,
    /// The first ranks of the hosts; only on these.
    pub(crate) firsts: Option<Group>,
}

impl Hosts {
    /// Learns the host of each rank. `name` is the name of this rank's host. Each file gets
    /// `num_replicas` copies, or one on every host if there are fewer hosts.
    ///
    /// # Errors
    /// A rank is gone.
    /// # Collective
    /// All ranks of `world`; their names.
    ///
    /// Source: Megatron-LM `--replication`, `--replication-factor`.
    pub fn find(world: &Group, name: &str, num_replicas: usize) -> Result<Self, CheckpointError> {
        let all: Vec<String> = objects::gather(world, &name.to_string())?;
        let all: Vec<String> = objects::broadcast(world, &all)?;
        let mut names: Vec<String> = Vec::new();
        let number = |name: String| {
            let known = names.iter().position(|known| *known == name);
            known.unwrap_or_else(|| {
                names.push(name);
                names.len() - 1
            })
        };
        let of_rank: Vec<usize> = all.into_iter().map(number).collect();
        let first = |host: usize| of_rank.iter().position(|&of| of == host);
        let mut firsts: Vec<usize> = (0..names.len()).filter_map(first).collect();
        firsts.sort_unstable();
        let is_first = firsts.contains(&world.rank());
        let firsts = is_first.then(|| world.subgroup("first ranks of hosts", &firsts));
        let own = of_rank[world.rank()];
        let ranks = (0..of_rank.len()).filter(|&rank| of_rank[rank] == own);
        let ranks: Vec<usize> = ranks.collect();
        Ok(Self {
            firsts: firsts.transpose()?,
            of_host: world.subgroup("ranks of a host", &ranks)?,
            num_replicas: num_replicas.min(names.len() - 1),
            of_rank,
            names,
            files: world.subgroup("files", world.members())?,
            answers: world.subgroup("answers", world.members())?,
        })
    }

    /// The number of hosts.
    pub fn num_hosts(&self) -> usize {
        self.names.len()
    }

    /// The number of other hosts that keep a copy of a rank's file.
    pub fn num_replicas(&self) -> usize {
        self.num_replicas
    }

    /// The number of the host of a rank.
    pub(crate) fn of(&self, rank: usize) -> usize {
        self.of_rank[rank]
    }

    /// The names of the hosts, in the order of their first ranks.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    pub(crate) fn name(&self, host: usize) -> &str {
        &self.names[host]
    }

    /// The ranks of a host, in order.
    pub(crate) fn ranks(&self, host: usize) -> impl Iterator<Item = usize> {
        let of_host = move |(rank, &of): (usize, &usize)| (of == host).then_some(rank);
        self.of_rank.iter().enumerate().filter_map(of_host)
    }

    /// Whether a rank is the first one of its host.
    pub(crate) fn is_first(&self, rank: usize) -> bool {
        self.ranks(self.of(rank)).next() == Some(rank)
    }

    /// The local rank within its host, and the number of ranks of that host.
    pub(crate) fn local(&self, rank: usize) -> (usize, usize) {
        let ranks: Vec<_> = self.ranks(self.of(rank)).collect();
        let index = ranks.iter().position(|&other| other == rank);
        (index.expect("it is a rank of its host"), ranks.len())
    }

    /// The rank of a host with local rank `number` modulo the host's number of ranks.
    pub(crate) fn rank(&self, host: usize, number: usize) -> usize {
        let ranks: Vec<_> = self.ranks(host).collect();
        ranks[number % ranks.len()]
    }

    /// The hosts that keep a copy of the files of `host`, which are the next ones after it.
    pub(crate) fn replicas(&self, host: usize) -> impl Iterator<Item = usize> {
        let num_hosts = self.num_hosts();
        (1..=self.num_replicas).map(move |step| (host + step) % num_hosts)
    }
}
