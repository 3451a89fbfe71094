use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use burn::tensor::DType;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    activity::Activity,
    call::{Call, Collective},
    error::CollectiveError,
    options::GroupOptions,
    rank_context::{FAILURE_GRACE, RankContext},
    recorder::FlightRecord,
};

/// The name of the group of all ranks.
const WORLD: &str = "world";
/// Up to this many ranks, each has a connection to all others also in a tree.
const MAX_DIRECT_WORLD: usize = 4;
/// In groups that share tensors, a direct message is faster than several along a tree.
const MAX_DIRECT: usize = 16;

/// A rank's handle on a set of ranks that communicate: the members, this rank's number among them,
/// the run's seed and the collectives. Cloning is cheap and refers to the same group.
///
/// Members are numbered `0..size()` in rank order; all arguments and results of collectives use
/// these numbers. A group of one never communicates.
///
/// # Collective
/// Methods with a `# Collective` section must be called by every member they name, in the same
/// order.
#[derive(Clone)]
pub struct Group(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    name: String,
    pub(crate) members: Vec<usize>,
    rank: usize,
    pub(crate) channel: u64,
    pub(crate) options: GroupOptions,
    pub(crate) activity: Arc<Activity>,
    /// In a group of more members, small contributions travel along a tree.
    max_direct: usize,
    seq: AtomicU64,
    /// Counts of messages sent to and received from each member by `send` and `recv`.
    pairs: Mutex<Vec<[u64; 2]>>,
    /// Declared before `link` in order to be dropped first: the link watches it until it is closed.
    #[cfg(feature = "cuda")]
    pub(crate) device: std::sync::OnceLock<crate::device::NcclGroup>,
    pub(crate) link: Option<Arc<RankContext>>,
}

impl Group {
    /// A group of one.
    pub fn single(seed: u64) -> Self {
        let options = GroupOptions {
            seed,
            ..Default::default()
        };
        Self::of_one("single", options)
    }

    /// Rank `rank` of a world of `size` ranks that do not run, for code that only asks which
    /// part of a tensor a rank holds, such as an estimate of memory.
    ///
    /// # Collective
    /// None is possible: each fails where there is more than one rank.
    ///
    /// # Panics
    /// `rank` is not below `size`.
    pub fn of_shapes(rank: usize, size: usize) -> Self {
        assert!(rank < size, "rank {rank} of {size}");
        let options = GroupOptions::default();
        let activity = Activity::new(rank, options);
        Self::assemble(WORLD, (0..size).collect(), rank, options, activity, None)
    }

    /// The world group of a single rank, which never communicates.
    pub(crate) fn alone(options: GroupOptions) -> Self {
        Self::of_one(WORLD, options)
    }

    fn of_one(name: &str, options: GroupOptions) -> Self {
        let activity = Activity::new(0, options);
        Self::assemble(name, vec![0], 0, options, activity, None)
    }

    /// The group of all ranks of a transport.
    pub(crate) fn world(link: Arc<RankContext>, options: GroupOptions) -> Self {
        let rank = link.transport.rank();
        let size = link.transport.world_size();
        let activity = link.transport.activity().clone();
        let members: Vec<usize> = (0..size).collect();
        link.recorder
            .note_group(channel(WORLD, &members), WORLD, &members);
        Self::assemble(WORLD, members, rank, options, activity, Some(link))
    }

    fn assemble(
        name: &str,
        members: Vec<usize>,
        rank: usize,
        options: GroupOptions,
        activity: Arc<Activity>,
        link: Option<Arc<RankContext>>,
    ) -> Self {
        let channel = channel(name, &members);
        let pairs = Mutex::new(vec![[0; 2]; members.len()]);
        let name = name.to_string();
        let max_direct = if name == WORLD {
            MAX_DIRECT_WORLD
        } else {
            MAX_DIRECT
        };
        let seq = AtomicU64::new(0);
        Self(Arc::new(Inner {
            name,
            members,
            rank,
            channel,
            options,
            activity,
            max_direct,
            seq,
            pairs,
            #[cfg(feature = "cuda")]
            device: Default::default(),
            link,
        }))
    }

    /// A group of the same members under another name, with a channel of its own.
    #[cfg(feature = "cuda")]
    pub(crate) fn control(&self, name: &str) -> Self {
        self.with_members(name, self.0.members.clone(), self.0.rank)
    }

    /// A group of other members that shares this one's options, activity and transport.
    fn with_members(&self, name: &str, members: Vec<usize>, rank: usize) -> Self {
        let Inner {
            options,
            activity,
            link,
            ..
        } = &*self.0;
        if let Some(link) = link {
            link.transport.note_group(name, &members);
            link.recorder
                .note_group(channel(name, &members), name, &members);
        }
        Self::assemble(
            name,
            members,
            rank,
            *options,
            activity.clone(),
            link.clone(),
        )
    }

    /// Creates a group of some members of this one, given by global rank. Nothing is sent: each
    /// member creates it independently, with the same name and list.
    ///
    /// # Errors
    /// The list is not ascending, names a rank outside of the world, or does not contain this rank.
    pub fn subgroup(&self, name: &str, members: &[usize]) -> Result<Self, CollectiveError> {
        let me = self.global_rank();
        let bad = |why: &str| CollectiveError::BadGroup {
            rank: me,
            group: name.to_string(),
            members: members.to_vec(),
            world_size: self
                .0
                .link
                .as_ref()
                .map_or(1, |link| link.transport.world_size()),
            why: why.to_string(),
        };
        if !members.is_sorted_by(|a, b| a < b) {
            return Err(bad("members must be in ascending order"));
        }
        if let Some(outside) = members
            .iter()
            .find(|member| self.0.members.binary_search(member).is_err())
        {
            return Err(bad(&format!(
                "rank {outside} is not a member of group {}",
                self.0.name
            )));
        }
        let rank = members.iter().position(|&member| member == me);
        let rank = rank.ok_or_else(|| bad("it does not contain this rank"))?;
        Ok(self.with_members(name, members.to_vec(), rank))
    }

    /// Returns the group of `known` that has these members, or creates it with
    /// [`subgroup`](Self::subgroup). Sharing the group means sharing one communicator on the GPU,
    /// so all members must make their calls on it in one order.
    ///
    /// # Errors
    /// As [`subgroup`](Self::subgroup).
    pub fn subgroup_among(
        &self,
        name: &str,
        members: &[usize],
        known: &[&Group],
    ) -> Result<Self, CollectiveError> {
        match known.iter().find(|known| known.members() == members) {
            Some(known) => Ok((*known).clone()),
            None => self.subgroup(name, members),
        }
    }

    /// The name used in messages: `tp`, `dp`, `world`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// This rank's number within the group.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// The number of members.
    pub fn size(&self) -> usize {
        self.0.members.len()
    }

    /// The members' global ranks, ascending.
    pub fn members(&self) -> &[usize] {
        &self.0.members
    }

    /// This rank's number in the world.
    pub fn global_rank(&self) -> usize {
        self.0.members[self.0.rank]
    }

    /// The run's seed.
    pub fn seed(&self) -> u64 {
        self.0.options.seed
    }

    /// The first failure of any group of this rank. After a failure every collective fails.
    pub fn failure(&self) -> Option<CollectiveError> {
        self.0.link.as_ref()?.failure.get().cloned()
    }

    /// The last collectives of this rank over all its groups, oldest first.
    pub fn flight_records(&self) -> Vec<FlightRecord> {
        self.0
            .link
            .as_ref()
            .map(|link| link.recorder.records())
            .unwrap_or_default()
    }

    /// The flight recorder as text, one line per collective.
    pub fn flight_dump(&self) -> String {
        let rank = self.global_rank();
        self.0
            .link
            .as_ref()
            .map(|link| link.recorder.dump_all(rank))
            .unwrap_or_default()
    }

    /// Ends every rank's current and later collectives with an error that carries `reason`, for a
    /// rank that cannot continue. The others have a tenth of a second to finish a collective that
    /// this rank has already finished.
    pub fn abort(&self, reason: &str) {
        self.abort_for(reason, false);
    }

    /// As [`abort`](Self::abort), for a rank that makes no progress: the others report that ranks hang.
    pub fn abort_hang(&self, reason: &str) {
        self.abort_for(reason, true);
    }

    fn abort_for(&self, reason: &str, is_hang: bool) {
        if let Some(link) = &self.0.link {
            thread::sleep(FAILURE_GRACE);
            link.transport.abort(self.global_rank(), reason, is_hang);
        }
    }

    /// Whether it has more members than should all be connected to each other.
    pub(crate) fn is_large(&self) -> bool {
        self.size() > self.0.max_direct
    }

    /// The member `steps` places further in the ring of members.
    pub(crate) fn at(&self, steps: isize) -> usize {
        (self.rank() as isize + steps).rem_euclid(self.size() as isize) as usize
    }

    /// The description of this rank's next call.
    pub(crate) fn next_call(&self, op: Collective, dtype: DType, shape: &[usize]) -> Call {
        Call {
            op,
            seq: self.0.seq.fetch_add(1, Ordering::Relaxed),
            dtype,
            shape: shape.to_vec(),
        }
    }

    /// The sequence number of the next `send` to (or `recv` from) `member`.
    pub(crate) fn next_pair(&self, member: usize, direction: usize) -> u64 {
        let mut pairs = self.0.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        let next = &mut pairs[member][direction];
        *next += 1;
        *next - 1
    }
}

/// The channel of the group with this name and these members.
fn channel(name: &str, members: &[usize]) -> u64 {
    xxh3_64(format!("{name} {members:?}").as_bytes())
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Group({} rank {} of {:?})",
            self.name(),
            self.rank(),
            self.members()
        )
    }
}
