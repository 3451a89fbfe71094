use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Tensor;
use megaburn_autograd::{CheckpointOperands, OverlappedWgrads};
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
    dispatcher: Arc<dyn TokenDispatcher>,
    payload: Payload,
    direction: Direction,
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
    graph_token: Tensor<2>,
    /// The transfer that backward starts.
    backward: BackwardTransfer,
}

/// The transfer of backward, once it was started.
type BackwardTransfer = Arc<Mutex<Option<Work<Tensor<2>>>>>;

impl InFlight {
    /// Starts the transfer of `x` by `dispatcher`. Its backward computes `overlapped_wgrads`
    /// meanwhile, if it returns the gradients of token rows.
    pub(super) fn start(
        dispatcher: Arc<dyn TokenDispatcher>,
        overlapped_wgrads: &OverlappedWgrads,
        x: Tensor<2>,
        payload: Payload,
        direction: Direction,
    ) -> Self {
        let device = x.device();
        let state = if !device.is_autodiff() {
            TransferState::Plain(unwrap_collective(dispatcher.start(x, payload, direction)))
        } else if dispatcher.sends() {
            TransferState::TrackedTransfer(Box::new(tracked(
                &dispatcher,
                overlapped_wgrads,
                x,
                payload,
                direction,
            )))
        } else {
            let dispatcher = dispatcher.clone();
            let go = move |x, direction| {
                unwrap_collective(dispatcher.finish(
                    unwrap_collective(dispatcher.start(x, payload, direction)).wait(),
                    payload,
                    direction,
                ))
            };
            let y = go(x.clone().inner(), direction);
            TransferState::Done(function(x, y, move |dy| go(dy, direction.transposed())))
        };
        Self {
            dispatcher,
            payload,
            direction,
            state,
        }
    }

    /// Waits for the rows. On a GPU this does not block the host.
    pub(in crate::moe) fn wait(self) -> Tensor<2> {
        let Self {
            dispatcher,
            payload,
            direction,
            state,
        } = self;
        match state {
            TransferState::Plain(received) => {
                unwrap_collective(dispatcher.finish(received.wait(), payload, direction))
            }
            TransferState::Done(y) => y,
            TransferState::TrackedTransfer(tracked) => {
                let TrackedTransfer {
                    received,
                    graph_token,
                    backward,
                } = *tracked;
                let y = unwrap_collective(dispatcher.finish(received.wait(), payload, direction));
                function(graph_token, y, move |dy| {
                    let graph_token = scalar_tensor(&dy);
                    let sent =
                        unwrap_collective(dispatcher.start(dy, payload, direction.transposed()));
                    *backward.lock().unwrap_or_else(PoisonError::into_inner) = Some(sent);
                    graph_token
                })
            }
        }
    }
}

fn tracked(
    dispatcher: &Arc<dyn TokenDispatcher>,
    overlapped_wgrads: &OverlappedWgrads,
    x: Tensor<2>,
    payload: Payload,
    direction: Direction,
) -> TrackedTransfer {
    let dispatcher = dispatcher.clone();
    let overlapped_wgrads = overlapped_wgrads.clone();
    let received = unwrap_collective(dispatcher.start(x.clone().inner(), payload, direction));
    let backward = BackwardTransfer::default();
    let sent = backward.clone();
    let graph_token = function(x, scalar_tensor(&received.peek()), move |_| {
        let received = sent.lock().unwrap_or_else(PoisonError::into_inner).take();
        if (payload, direction) == (Payload::Tokens, Direction::Dispatch) {
            overlapped_wgrads.compute();
        }
        let received = received
            .expect("the backward of the wait has started the transfer")
            .wait();
        unwrap_collective(dispatcher.finish(received, payload, direction.transposed()))
    });
    TrackedTransfer {
        received,
        graph_token,
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
    let mut operands = CheckpointOperands::new(&x.device());
    operands.add(x);
    let [y] = operands.results([Tensor::from_inner(y)], move |[dy]| {
        vec![Some(as_row(gradient(
            dy.expect("the result has a gradient"),
        )))]
    });
    y
}
