use std::cell::RefCell;

use super::WgradQueue;

/// Products that were put off, for [whoever waits](Spare::compute_share) for what was sent.
///
/// Source: Megatron-LM `--overlap-moe-expert-parallel-comm` with `--delay-wgrad-compute`; DeepSeek-AI (2024),
/// <https://arxiv.org/abs/2412.19437>, section 3.2.1.
#[derive(Debug, Default)]
pub struct Spare {
    /// Those of some backwards, the oldest first. The pass's own may be among them.
    pub put_off: Vec<WgradQueue>,
    /// How much of them is worth the time that something is on its way, in [`WgradQueue::size`].
    pub share: u64,
}

struct State {
    spare: Spare,
    /// What waits that are over were worth beyond what was computed; less than 0 where one product was more.
    balance: i128,
    waits: usize,
}

thread_local! {
    /// Of the pass on this thread, if it has any.
    static STATE: RefCell<Option<State>> = const { RefCell::new(None) };
}

impl Spare {
    /// Runs a pass on this thread, beside whose waits a share of the products is computed; how many waits it had.
    pub fn beside_waits_of<T>(self, pass: impl FnOnce() -> T) -> (T, usize) {
        /// What was there, also where a pass panics and somebody goes on.
        struct Before(Option<State>);
        impl Drop for Before {
            fn drop(&mut self) {
                STATE.set(self.0.take());
            }
        }
        let state = State {
            spare: self,
            balance: 0,
            waits: 0,
        };
        let _before = Before(STATE.replace(Some(state)));
        let done = pass();
        (done, STATE.take().map_or(0, |state| state.waits))
    }

    /// Computes the share of one wait: to be called where something is on its way, and nothing else can be computed
    /// until it is there.
    ///
    /// # Collective
    /// Ranks that have parts of a layer or of its input: all compute the same products then, of whose input
    /// some may be gathered.
    pub fn compute_share() {
        let next = || {
            STATE.with_borrow(|state| {
                let State { spare, balance, .. } = state.as_ref()?;
                (*balance > 0).then(|| spare.put_off.clone())
            })
        };
        STATE.with_borrow_mut(|state| {
            let Some(State {
                spare,
                balance,
                waits,
            }) = state
            else {
                return;
            };
            *balance += i128::from(spare.share);
            *waits += 1;
        });
        while let Some(put_off) = next() {
            let size = put_off.iter().find_map(WgradQueue::compute_next);
            STATE.with_borrow_mut(|state| {
                let Some(State { balance, .. }) = state else {
                    return;
                };
                // Where there is nothing to compute, nothing is owed later.
                *balance = size.map_or(0, |size| *balance - i128::from(size));
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::testing::{constant, leaf};
    use crate::{LinearOptions, MainGrad, linear};

    type Heard = Arc<Mutex<Vec<String>>>;

    /// Puts off products that give 4 elements each, of a backward.
    fn put_off(later: &WgradQueue, names: &[&str], heard: &Heard) {
        // Backward comes to the last one first.
        let through = |x, name: &&str| {
            let main_grad = MainGrad::default();
            let heard = heard.clone();
            let name = name.to_string();
            main_grad.attach();
            main_grad.on_gradient(move || heard.lock().unwrap().push(name.clone()));
            let options = LinearOptions {
                main_grad: Some(main_grad),
                ..Default::default()
            };
            linear::<2>(x, leaf(constant([2, 2])), None, options)
        };
        let y = names.iter().rev().fold(leaf(constant([6, 2])), through);
        later.defer(|| y.sum().backward());
        assert_eq!(
            (later.size(), heard.lock().unwrap().len()),
            (4 * names.len() as u64, 0)
        );
    }

    fn of(names: &[&str], heard: &Heard) -> WgradQueue {
        let later = WgradQueue::default();
        put_off(&later, names, heard);
        later
    }

    fn taken(heard: &Heard) -> Vec<String> {
        std::mem::take(&mut heard.lock().unwrap())
    }

    #[test]
    fn waits_compute_their_shares_in_order() {
        let heard = Heard::default();
        let [first, second] = [&["a", "b"][..], &["c", "d", "e"]].map(|names| of(names, &heard));
        let spare = Spare {
            put_off: vec![first.clone(), second.clone()],
            share: 5,
        };
        let ((), waits) = spare.beside_waits_of(|| {
            assert!(taken(&heard).is_empty());
            Spare::compute_share();
            // The second is begun, as 5 is more than 4; the next wait owes for it.
            assert_eq!(taken(&heard), ["a", "b"]);
            Spare::compute_share();
            assert_eq!(taken(&heard), ["c"]);
            Spare::compute_share();
            assert_eq!(taken(&heard), ["d"]);
        });
        assert_eq!(waits, 3);
        first.compute();
        assert!(taken(&heard).is_empty());
        second.compute();
        assert_eq!(taken(&heard), ["e"]);
    }

    #[test]
    fn what_nothing_was_there_for_is_not_owed() {
        let heard = Heard::default();
        let own = WgradQueue::default();
        let spare = Spare {
            put_off: vec![own.clone()],
            share: 4,
        };
        let ((), waits) = spare.beside_waits_of(|| {
            (0..9).for_each(|_| Spare::compute_share());
            put_off(&own, &["a", "b"], &heard);
            Spare::compute_share();
            assert_eq!(taken(&heard), ["a"]);
        });
        assert_eq!(waits, 10);
    }

    #[test]
    fn waits_of_others_compute_nothing() {
        let heard = Heard::default();
        let of = of(&["a"], &heard);
        Spare::compute_share();
        let ((), waits) = Spare {
            put_off: vec![of.clone()],
            share: 0,
        }
        .beside_waits_of(Spare::compute_share);
        assert_eq!((waits, taken(&heard).len()), (1, 0));
        let panics = || -> ((), usize) {
            Spare {
                put_off: vec![of.clone()],
                share: 1,
            }
            .beside_waits_of(|| panic!("a pass"))
        };
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        Spare::compute_share();
        assert!(taken(&heard).is_empty());
        of.compute();
        assert_eq!(taken(&heard), ["a"]);
    }
}
