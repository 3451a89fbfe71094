//! How a rank declares the section of its work that it is in.

use std::{collections::BTreeMap, sync::Arc};

use crate::{activity::Activity, group::Group, section::SectionTime};

impl Group {
    /// Declares that this rank is in the section `name` of its work until the returned guard is
    /// dropped. Sections nest. Reports of a hang say in which section a rank is, and
    /// [`take_section_times`](Self::take_section_times) says how long it was in each.
    pub fn section(&self, name: &'static str) -> SectionGuard {
        let activity = self.0.activity.clone();
        let id = activity.enter_section(name);
        SectionGuard { activity, id }
    }

    /// The times of the sections that have ended since the last call, by name.
    pub fn take_section_times(&self) -> BTreeMap<&'static str, SectionTime> {
        self.0
            .activity
            .with_sections(|sections| std::mem::take(&mut sections.ended))
    }
}

/// A section that a rank is in. It ends when this is dropped.
#[must_use = "the section ends when this is dropped"]
#[derive(Debug)]
pub struct SectionGuard {
    activity: Arc<Activity>,
    id: u64,
}

impl Drop for SectionGuard {
    fn drop(&mut self) {
        self.activity
            .with_sections(|sections| sections.leave(self.id));
    }
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use crate::{error::CollectiveError, launch::run_threads, options::GroupOptions};

    const SLOW: Duration = Duration::from_millis(60);

    /// Rank 0 waits for rank 1, which works: the wait is not work of rank 0.
    #[test]
    fn work_is_counted_without_waits_and_without_the_sections_inside() {
        let found = run_threads(2, GroupOptions::default(), |world| {
            drop(world.section("before"));
            world.take_section_times();
            {
                let _step = world.section("step");
                {
                    let _data = world.section("data");
                    if world.rank() == 1 {
                        thread::sleep(SLOW);
                    }
                }
                world.barrier()?;
            }
            let times = world.take_section_times();
            assert!(world.take_section_times().is_empty());
            Ok::<_, CollectiveError>(times)
        });
        let [fast, slow] = found
            .try_into()
            .map(|it: [_; 2]| it.map(Result::unwrap))
            .unwrap();
        assert_eq!(fast.keys().copied().collect::<Vec<_>>(), ["data", "step"]);
        assert!(slow["data"].work >= SLOW && fast["data"].work < SLOW / 2);
        assert!(fast["step"].waiting >= SLOW / 2, "{fast:?}");
        for step in [fast["step"], slow["step"]] {
            assert!(step.work < SLOW / 2, "{step:?}");
        }
    }
}
