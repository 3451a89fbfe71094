use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{Float, Tensor};
use megaburn_collective::tensors::Pending;
use megaburn_kernels::{Operands, Spare};

use super::{Dispatch, Of, To, ok, rows::as_row};

/// Rows that were sent, and what is computed until they are [there](Self::arrived) runs beside. In the graph these are
/// two operations, of which each one's backward is the transpose of the other, so that backward sends in the
/// same place.
#[must_use = "rows have to arrive"]
pub(in crate::moe) struct OnTheWay {
    dispatch: Dispatch,
    of: Of,
    to: To,
    state: State,
}

enum State {
    /// Nothing was sent, or nobody goes backward.
    Plain(Pending<2, Float>),
    /// All of it, one operation.
    Done(Tensor<2>),
    Tracked(Box<Tracked>),
}

struct Tracked {
    came: Pending<2, Float>,
    /// A number that stands for what comes in the graph, where what is not there yet shall not be touched.
    sign: Tensor<2>,
    /// What backward sends.
    backward: Sent,
}

/// What backward has sent, once it has.
type Sent = Arc<Mutex<Option<Pending<2, Float>>>>;

impl OnTheWay {
    pub(super) fn start(dispatch: &Dispatch, x: Tensor<2>, of: Of, to: To) -> Self {
        let (way, device) = (dispatch.way.clone(), x.device());
        let state = if !device.is_autodiff() {
            State::Plain(ok(way.start(x, of, to)))
        } else if way.sends() {
            State::Tracked(Box::new(tracked(dispatch, x, of, to)))
        } else {
            let go = move |x, to| ok(way.finish(ok(way.start(x, of, to)).wait(), of, to));
            let y = go(x.clone().inner(), to);
            State::Done(function(x, y, move |dy| go(dy, to.back())))
        };
        Self {
            dispatch: dispatch.clone(),
            of,
            to,
            state,
        }
    }

    /// Waits for them; on a GPU the host does not.
    pub(in crate::moe) fn arrived(self) -> Tensor<2> {
        let Self {
            dispatch: Dispatch { way, .. },
            of,
            to,
            state,
        } = self;
        if of == Of::Tokens && way.sends() {
            Spare::compute_share();
        }
        match state {
            State::Plain(came) => ok(way.finish(came.wait(), of, to)),
            State::Done(y) => y,
            State::Tracked(tracked) => {
                let Tracked {
                    came,
                    sign,
                    backward,
                } = *tracked;
                let y = ok(way.finish(came.wait(), of, to));
                function(sign, y, move |dy| {
                    let sign = a_number(&dy);
                    let sent = ok(way.start(dy, of, to.back()));
                    *backward.lock().unwrap_or_else(PoisonError::into_inner) = Some(sent);
                    sign
                })
            }
        }
    }
}

fn tracked(dispatch: &Dispatch, x: Tensor<2>, of: Of, to: To) -> Tracked {
    let Dispatch { way, beside, .. } = dispatch.clone();
    let came = ok(way.start(x.clone().inner(), of, to));
    let backward = Sent::default();
    let sent = backward.clone();
    let sign = function(x, a_number(&came.peek()), move |_| {
        let came = sent.lock().unwrap_or_else(PoisonError::into_inner).take();
        if of == Of::Tokens {
            if to == To::Experts {
                beside.compute();
            }
            Spare::compute_share();
        }
        let came = came.expect("backward sent it before it came here").wait();
        ok(way.finish(came, of, to.back()))
    });
    Tracked {
        came,
        sign,
        backward,
    }
}

fn a_number(like: &Tensor<2>) -> Tensor<2> {
    Tensor::empty([1, 1], (&like.device(), like.dtype()))
}

/// `y` as a function of `x`, with this gradient of it.
fn function(
    x: Tensor<2>,
    y: Tensor<2>,
    gradient: impl FnOnce(Tensor<2>) -> Tensor<2> + Send + 'static,
) -> Tensor<2> {
    let mut operands = Operands::new(&x.device());
    operands.add(x);
    let [y] = operands.results([Tensor::from_inner(y)], move |[dy]| {
        vec![Some(as_row(gradient(dy.expect("backward came from it"))))]
    });
    y
}
