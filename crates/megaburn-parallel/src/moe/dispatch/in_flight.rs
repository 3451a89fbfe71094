use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Tensor;
use megaburn_autograd::{CheckpointFunction, OverlappedWgrads};
use megaburn_collective::{region::unwrap_collective, tensors::Work};

use super::{
    rows::as_row,
    token_dispatcher::{Direction, Payload, TokenDispatcher},
};

/// Rows that were sent and not yet [waited for](Self::wait); what is computed in between overlaps
/// the transfer. In the graph, start and wait are two operations. The backward of the wait starts
/// the transposed transfer, and the backward of the start waits for it, so that backward overlaps
/// the same computation.
#[must_use = "call `wait` to get the rows"]
pub(in crate::moe) struct InFlight {
    way: Arc<dyn TokenDispatcher>,
    of: Payload,
    to: Direction,
    state: TransferState,
}

enum TransferState {
    /// Without autodiff.
    Plain(Work<Tensor<2>>),
    /// With autodiff, where nothing is sent that could overlap: a single operation, already done.
    Done(Tensor<2>),
    TrackedTransfer(Box<TrackedTransfer>),
}

struct TrackedTransfer {
    received: Work<Tensor<2>>,
    /// A `[1, 1]` tensor that represents the transfer in the graph, because rows in flight must not
    /// be touched.
    sign: Tensor<2>,
    /// The transfer that backward starts.
    backward: Sent,
}

/// The transfer of backward, once it was started.
type Sent = Arc<Mutex<Option<Work<Tensor<2>>>>>;

impl InFlight {
    /// Starts the transfer of `x` by `way`. Its backward computes `overlapped_wgrads` meanwhile, if
    /// it returns the gradients of token rows.
    pub(super) fn start(
        way: Arc<dyn TokenDispatcher>,
        overlapped_wgrads: &OverlappedWgrads,
        x: Tensor<2>,
        of: Payload,
        to: Direction,
    ) -> Self {
        let device = x.device();
        let state = if !device.is_autodiff() {
            TransferState::Plain(unwrap_collective(way.start(x, of, to)))
        } else if way.sends() {
            TransferState::TrackedTransfer(Box::new(tracked(&way, overlapped_wgrads, x, of, to)))
        } else {
            let way = way.clone();
            let go = move |x, to| {
                unwrap_collective(way.finish(
                    unwrap_collective(way.start(x, of, to)).wait(),
                    of,
                    to,
                ))
            };
            let y = go(x.clone().inner(), to);
            TransferState::Done(function(x, y, move |dy| go(dy, to.back())))
        };
        Self { way, of, to, state }
    }

    /// Waits for the rows. On a GPU this does not block the host.
    pub(in crate::moe) fn wait(self) -> Tensor<2> {
        let Self { way, of, to, state } = self;
        match state {
            TransferState::Plain(received) => {
                unwrap_collective(way.finish(received.wait(), of, to))
            }
            TransferState::Done(y) => y,
            TransferState::TrackedTransfer(tracked) => {
                let TrackedTransfer {
                    received,
                    sign,
                    backward,
                } = *tracked;
                let y = unwrap_collective(way.finish(received.wait(), of, to));
                function(sign, y, move |dy| {
                    let sign = scalar_tensor(&dy);
                    let sent = unwrap_collective(way.start(dy, of, to.back()));
                    *backward.lock().unwrap_or_else(PoisonError::into_inner) = Some(sent);
                    sign
                })
            }
        }
    }
}

fn tracked(
    way: &Arc<dyn TokenDispatcher>,
    overlapped_wgrads: &OverlappedWgrads,
    x: Tensor<2>,
    of: Payload,
    to: Direction,
) -> TrackedTransfer {
    let way = way.clone();
    let overlapped_wgrads = overlapped_wgrads.clone();
    let received = unwrap_collective(way.start(x.clone().inner(), of, to));
    let backward = Sent::default();
    let sent = backward.clone();
    let sign = function(x, scalar_tensor(&received.peek()), move |_| {
        let received = sent.lock().unwrap_or_else(PoisonError::into_inner).take();
        if (of, to) == (Payload::Tokens, Direction::Dispatch) {
            overlapped_wgrads.compute();
        }
        let received = received
            .expect("the backward of the wait has started the transfer")
            .wait();
        unwrap_collective(way.finish(received, of, to.back()))
    });
    TrackedTransfer {
        received,
        sign,
        backward,
    }
}

fn scalar_tensor(like: &Tensor<2>) -> Tensor<2> {
    Tensor::empty([1, 1], (&like.device(), like.dtype()))
}

/// Makes `y` a function of `x` with this gradient.
fn function(
    x: Tensor<2>,
    y: Tensor<2>,
    gradient: impl FnOnce(Tensor<2>) -> Tensor<2> + Send + 'static,
) -> Tensor<2> {
    let mut operands = CheckpointFunction::new(&x.device());
    operands.add(x);
    let [y] = operands.results([Tensor::from_inner(y)], move |[dy]| {
        vec![Some(as_row(gradient(
            dy.expect("the result has a gradient"),
        )))]
    });
    y
}
