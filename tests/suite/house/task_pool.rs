//! Tasks of the GPU tests share places and never take more than there are.

use std::{sync::Mutex, thread, time::Duration};

use megaburn_test_support::task_pool::{TaskSize, run_all};

/// The places in use, and the most that were in use so far.
#[derive(Default)]
struct Seen {
    now: Vec<usize>,
    most: usize,
    done: Vec<usize>,
    beside_alone: bool,
}

#[test]
fn tasks_share_places_and_some_have_them_alone() {
    const PLACES: usize = 4;
    let tasks: Vec<TaskSize> = (0..24)
        .map(|i| match i % 6 {
            0 => TaskSize::Alone,
            1 => TaskSize::Places(3),
            2 => TaskSize::Places(100),
            _ => TaskSize::Places(1),
        })
        .collect();
    let taken = |index: usize| match tasks[index] {
        TaskSize::Places(wanted) => wanted.min(PLACES),
        TaskSize::Alone => PLACES,
    };
    let seen = Mutex::new(Seen::default());
    run_all(PLACES, &tasks, |index| {
        {
            let mut seen = seen.lock().unwrap();
            seen.now.push(index);
            seen.most = seen
                .most
                .max(seen.now.iter().map(|&index| taken(index)).sum());
            let is_alone = seen
                .now
                .iter()
                .any(|&index| tasks[index] == TaskSize::Alone);
            seen.beside_alone |= is_alone && seen.now.len() > 1;
        }
        thread::sleep(Duration::from_millis(3));
        let mut seen = seen.lock().unwrap();
        seen.now.retain(|&other| other != index);
        seen.done.push(index);
    });
    let Seen {
        most,
        mut done,
        beside_alone,
        ..
    } = seen.into_inner().unwrap();
    assert_eq!(
        most, PLACES,
        "tasks run beside each other, and no more than there is room for"
    );
    assert!(!beside_alone);
    done.sort_unstable();
    assert_eq!(done, (0..tasks.len()).collect::<Vec<_>>());
}
