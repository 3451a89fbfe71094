//! Every collective, element type, size and group, over both transports, compared bit for bit.

mod fixture;

use std::time::Duration;

use burn::tensor::{DType, TensorData};
use fixture::{
    Over, bounded,
    data::{FLOATS, INTS, contribution, reduced},
    fresh_seed, world,
};
use megaburn_collective::{CollectiveError, Group, GroupOptions, ReduceOp};
use rstest::rstest;

const LIMIT: Duration = Duration::from_secs(120);
/// Zero, one, an odd number, and more elements than one exchange carries.
const SIZES: [usize; 4] = [0, 1, 37, 9001];

/// One rank's view of the suite: a group, and the contributions of all members.
struct Suite {
    group: Group,
    seed: u64,
    case: u64,
}

impl Suite {
    fn inputs(&mut self, shape: &[usize], dtype: DType, nans: bool) -> Vec<TensorData> {
        self.case += 1;
        let input = |&rank: &usize| contribution(self.seed, self.case, rank, shape, dtype, nans);
        self.group.members().iter().map(input).collect()
    }

    fn check(&self, what: &str, result: &TensorData, shape: &[usize], expected: &[u8]) {
        let Self { group, seed, case } = self;
        assert_eq!(
            result.shape().to_vec(),
            shape,
            "{what}: {group:?}, seed {seed}, case {case}"
        );
        assert!(
            result.as_bytes() == expected,
            "{what}: {group:?}, seed {seed}, case {case}"
        );
    }

    fn reductions(&mut self, dtype: DType, size: usize) -> Result<(), CollectiveError> {
        let (group, n) = (self.group.clone(), self.group.size());
        for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Mean] {
            if op == ReduceOp::Mean && INTS.contains(&dtype) {
                continue;
            }
            let nans = op == ReduceOp::Max;
            let inputs = self.inputs(&[size, 1], dtype, nans);
            let result = group.all_reduce(inputs[group.rank()].clone(), op)?;
            self.check(
                "all_reduce",
                &result,
                &[size, 1],
                reduced(&inputs, op).as_bytes(),
            );
            let inputs = self.inputs(&[n * size, 1], dtype, nans);
            let result = group.reduce_scatter(inputs[group.rank()].clone(), op)?;
            let whole = reduced(&inputs, op);
            let share = whole.as_bytes().len() / n;
            let expected = &whole.as_bytes()[group.rank() * share..][..share];
            self.check("reduce_scatter", &result, &[size, 1], expected);
        }
        Ok(())
    }

    fn movements(&mut self, dtype: DType, size: usize) -> Result<(), CollectiveError> {
        let (group, n, me) = (self.group.clone(), self.group.size(), self.group.rank());
        let inputs = self.inputs(&[size, 1], dtype, true);
        let bytes = |rank: usize| inputs[rank].as_bytes();
        let result = group.all_gather(inputs[me].clone())?;
        let all: Vec<u8> = (0..n).flat_map(|rank| bytes(rank).to_vec()).collect();
        self.check("all_gather", &result, &[n * size, 1], &all);
        for root in 0..n {
            let result = group.broadcast(inputs[me].clone(), root)?;
            self.check("broadcast", &result, &[size, 1], bytes(root));
        }
        group.barrier()?;
        if n > 1 {
            let next = (me + 1) % n;
            let last = (me + n - 1) % n;
            group.send(inputs[me].clone(), next)?;
            let result = group.recv(last, Some(&[size, 1]), dtype)?;
            self.check("send and recv", &result, &[size, 1], bytes(last));
        }
        self.exchanges(dtype, size)
    }

    /// Exchanges parts whose size differs for each pair; some are empty.
    fn exchanges(&mut self, dtype: DType, size: usize) -> Result<(), CollectiveError> {
        let (group, n, me) = (self.group.clone(), self.group.size(), self.group.rank());
        self.case += 1;
        let part = |from: usize, to: usize| {
            let shape = [size * ((from + 2 * to) % 3), 1];
            let case = self.case ^ ((to as u64) << 32);
            contribution(self.seed, case, group.members()[from], &shape, dtype, false)
        };
        let received = group.all_to_all((0..n).map(|to| part(me, to)).collect())?;
        assert_eq!(received.len(), n);
        for (from, received) in received.iter().enumerate() {
            let expected = part(from, me);
            let shape = expected.shape().to_vec();
            self.check("all_to_all", received, &shape, expected.as_bytes());
        }
        Ok(())
    }

    fn run(&mut self) -> Result<(), CollectiveError> {
        for dtype in FLOATS.into_iter().chain(INTS) {
            for size in SIZES {
                self.reductions(dtype, size)?;
                self.movements(dtype, size)?;
            }
        }
        Ok(())
    }
}

fn all_pass(
    over: Over,
    size: usize,
    body: impl Fn(Group) -> Result<(), CollectiveError> + Send + Sync + 'static,
) {
    bounded(LIMIT, move || {
        let ends = world(over, size, GroupOptions::default(), body);
        ends.into_iter().for_each(|end| end.unwrap());
    });
}

#[rstest]
fn every_collective_gives_the_plain_result(
    #[values(Over::Threads, Over::Tcp)] over: Over,
    #[values(1, 2, 3, 4)] size: usize,
) {
    let seed = fresh_seed();
    all_pass(over, size, move |group| {
        Suite {
            group,
            seed,
            case: 0,
        }
        .run()
    });
}

#[rstest]
fn subgroups_work_beside_each_other(#[values(Over::Threads, Over::Tcp)] over: Over) {
    const GROUPS: [(&str, &[usize]); 6] = [
        ("tp", &[0, 1]),
        ("tp", &[2, 3]),
        ("dp", &[0, 2]),
        ("dp", &[1, 3]),
        ("odd", &[0, 1, 3]),
        ("alone", &[2]),
    ];
    let seed = fresh_seed();
    all_pass(over, 4, move |world| {
        for (name, members) in GROUPS {
            if members.contains(&world.rank()) {
                let group = world.subgroup(name, members)?;
                Suite {
                    group,
                    seed,
                    case: 0,
                }
                .run()?;
            }
        }
        world.barrier()
    });
}

#[rstest]
fn several_megabytes_arrive_whole(
    #[values(Over::Threads, Over::Tcp)] over: Over,
    #[values(2, 3)] size: usize,
) {
    let seed = fresh_seed();
    all_pass(over, size, move |group| {
        let mut suite = Suite {
            group,
            seed,
            case: 0,
        };
        suite.reductions(DType::F32, 1_000_003)?;
        suite.movements(DType::BF16, 3_000_001)
    });
}

#[rstest]
fn what_arrives_before_its_receiver_asks_is_kept_in_order(
    #[values(Over::Threads, Over::Tcp)] over: Over,
) {
    const COUNT: i64 = 200;
    all_pass(over, 2, |group| {
        let peer = 1 - group.rank();
        for i in 0..COUNT {
            group.send(TensorData::from([i, -i]), peer)?;
        }
        for i in 0..COUNT {
            let got = group.recv(peer, None, DType::I64)?;
            assert_eq!(got, TensorData::from([i, -i]));
        }
        Ok(())
    });
}

#[rstest]
fn a_rank_that_finishes_first_takes_nothing_from_the_others(
    #[values(Over::Threads, Over::Tcp)] over: Over,
) {
    all_pass(over, 3, |group| {
        let big = TensorData::new(vec![group.rank() as f32; 500_000], [500_000]);
        match group.rank() {
            0 => group.send(big, 1),
            1 => {
                std::thread::sleep(Duration::from_millis(200));
                let got = group.recv(0, None, DType::F32)?;
                assert_eq!(got.as_bytes().len(), 2_000_000);
                group.subgroup("rest", &[1, 2])?.barrier()
            }
            _ => group.subgroup("rest", &[1, 2])?.barrier(),
        }
    });
}
