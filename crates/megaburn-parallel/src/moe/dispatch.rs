//! Rows on their way to the experts' ranks and back.
//!
//! The way there is a linear map that has no numbers of its own: rows are copied, sent and put in order. The way
//! back is its transpose, and so is the backward of either.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use megaburn_collective::{CollectiveError, ReduceOp, region::FAILED_REGION, tensors};
use megaburn_kernels::{Operands, sum_rows, take_rows};

use super::{
    ExpertGroups,
    plan::{Place, Read, Sent},
};

/// The way of one pass's tokens to the experts of a layer.
#[derive(Clone, Debug)]
pub(super) struct Dispatch(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    sent: Sent,
    read: Read,
    top_k: usize,
    groups: ExpertGroups,
    /// On the device: of [`Sent::slots`] the tokens and themselves, [`Sent::rows`].
    tokens: Tensor<1, Int>,
    slots: Tensor<1, Int>,
    rows: Tensor<1, Int>,
    /// Where rows stand that experts read, and which of those each place has; none: they come in order.
    order: Option<[Tensor<1, Int>; 2]>,
}

/// What is sent.
#[derive(Clone, Copy, Debug)]
enum Of {
    /// A row a token, which goes to all its experts.
    Tokens,
    /// A row a slot.
    Slots,
}

impl Dispatch {
    /// Of the experts of all slots, `top_k` a token. Every expert of this rank gets `padded` rows if it is told
    /// to, zeros where fewer come.
    ///
    /// # Collective
    /// All ranks of `groups.experts`, which tell each other how many rows go where.
    pub(super) fn new(
        (experts, top_k): (&[u32], usize),
        num_experts: usize,
        padded: Option<usize>,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Self {
        let sent = Sent::new(experts, num_experts);
        let counts = ok(all_counts(&sent.counts, groups, device));
        let place =
            |group: &megaburn_collective::Group| Place { rank: group.rank(), ranks: group.size() };
        let etp = place(&groups.etp);
        let read = Read::new(&counts, place(&groups.ep), etp);
        let read = match padded {
            Some(rows) => read.padded(rows, etp.ranks),
            None => read,
        };
        let device = if device.is_autodiff() { device.clone().inner() } else { device.clone() };
        let index = |of: Vec<i64>| {
            let len = of.len();
            Tensor::<1, Int>::from_data(TensorData::new(of, [len]), &device)
        };
        let num_places = read.shown * groups.etp.size();
        let is_in_order = read.places.iter().copied().eq(0..num_places);
        let order = (!is_in_order).then(|| {
            // A place that is shown and has no row.
            let mut back = vec![read.places.len() as i64; num_places];
            let rows = read.places.iter().enumerate().filter(|(_, place)| **place < num_places);
            rows.for_each(|(row, &place)| back[place] = row as i64);
            [index(read.places.iter().map(|&place| place as i64).collect()), index(back)]
        });
        Self(Arc::new(Inner {
            tokens: index(sent.slots.iter().map(|&slot| (slot / top_k) as i64).collect()),
            slots: index(sent.slots.iter().map(|&slot| slot as i64).collect()),
            rows: index(sent.rows.iter().map(|&row| row as i64).collect()),
            order,
            sent,
            read,
            top_k,
            groups: groups.clone(),
        }))
    }

    /// Rows of each expert of this rank.
    pub(super) fn rows_of_experts(&self) -> &[usize] {
        &self.0.read.rows
    }

    /// Each token to the ranks of its experts.
    ///
    /// # Shapes
    /// `[tokens, d_model]` to `[rows, d_model]`
    pub(super) fn rows_there(&self, x: Tensor<2>) -> Tensor<2> {
        self.moved(x, |way, x| way.there(x, Of::Tokens), |way, y| way.back(y, Of::Tokens))
    }

    /// The sum of what each token's experts made of it.
    ///
    /// # Shapes
    /// `[rows, d_model]` to `[tokens, d_model]`
    pub(super) fn rows_back(&self, y: Tensor<2>) -> Tensor<2> {
        self.moved(y, |way, y| way.back(y, Of::Tokens), |way, x| way.there(x, Of::Tokens))
    }

    /// The weight of each slot to where its row goes.
    ///
    /// # Shapes
    /// `[tokens, top_k]` to `[rows]`
    pub(super) fn weights_there(&self, weights: Tensor<2>) -> Tensor<1> {
        let slots = self.0.sent.rows.len();
        let weights = weights.reshape([slots, 1]);
        let moved =
            self.moved(weights, |way, x| way.there(x, Of::Slots), |way, y| way.back(y, Of::Slots));
        moved.squeeze_dim(1)
    }

    fn moved(
        &self,
        x: Tensor<2>,
        forward: fn(&Inner, Tensor<2>) -> Result<Tensor<2>, CollectiveError>,
        backward: fn(&Inner, Tensor<2>) -> Result<Tensor<2>, CollectiveError>,
    ) -> Tensor<2> {
        let device = x.device();
        if !device.is_autodiff() {
            return ok(forward(&self.0, x));
        }
        let y = ok(forward(&self.0, x.clone().inner()));
        let mut operands = Operands::new(&device);
        operands.add(x);
        let way = self.0.clone();
        let [y] = operands.results([Tensor::from_inner(y)], move |[dy]| {
            let dx = ok(backward(&way, dy.expect("backward came from it")));
            vec![Some(as_row(dx))]
        });
        y
    }
}

impl Inner {
    fn there(&self, x: Tensor<2>, of: Of) -> Result<Tensor<2>, CollectiveError> {
        let Self { read: Read { send, recv, shown, .. }, groups, .. } = self;
        let index = match of {
            Of::Tokens => &self.tokens,
            Of::Slots => &self.slots,
        };
        let sent = taken(x, index);
        let mut came = tensors::all_to_all(sent, send, recv, &groups.ep)?;
        if groups.etp.size() > 1 {
            came = tensors::all_gather(lengthened(came, *shown), &groups.etp)?;
        }
        Ok(match &self.order {
            // Padding is the row behind all others.
            Some([order, _]) => {
                let rows = came.dims()[0] + usize::from(self.read.is_padded);
                taken(lengthened(came, rows), order)
            }
            None => came,
        })
    }

    fn back(&self, y: Tensor<2>, of: Of) -> Result<Tensor<2>, CollectiveError> {
        let Self { read: Read { send, recv, .. }, groups, rows, .. } = self;
        let mut came = match &self.order {
            Some([_, back]) => summed(y, back, 1),
            None => y,
        };
        if groups.etp.size() > 1 {
            let shown = tensors::reduce_scatter(came, ReduceOp::Sum, &groups.etp)?;
            came = shortened(shown, recv.iter().sum());
        }
        let sent = tensors::all_to_all(came, recv, send, &groups.ep)?;
        Ok(match of {
            Of::Tokens => summed(sent, rows, self.top_k),
            Of::Slots => summed(sent, rows, 1),
        })
    }
}

/// What each rank has for each expert.
fn all_counts(
    own: &[usize],
    groups: &ExpertGroups,
    device: &Device,
) -> Result<Vec<Vec<usize>>, CollectiveError> {
    if groups.experts.size() == 1 {
        return Ok(vec![own.to_vec()]);
    }
    let device = if device.is_autodiff() { device.clone().inner() } else { device.clone() };
    let counts: Vec<i32> = own.iter().map(|&count| count as i32).collect();
    let counts = TensorData::new(counts, [1, own.len()]);
    let counts = Tensor::<2, Int>::from_data(counts, (&device, DType::I32));
    let all = tensors::all_gather(counts, &groups.experts)?;
    let all: Vec<usize> = all.into_data().iter::<i32>().map(|count| count as usize).collect();
    Ok(all.chunks(own.len()).map(<[usize]>::to_vec).collect())
}

/// [`take_rows`], where there may be none.
fn taken(x: Tensor<2>, index: &Tensor<1, Int>) -> Tensor<2> {
    match index.dims() {
        [0] => Tensor::empty([0, x.dims()[1]], (&x.device(), x.dtype())),
        _ => take_rows(x, index.clone()),
    }
}

/// [`sum_rows`] of `terms` each, where there may be none.
fn summed(y: Tensor<2>, index: &Tensor<1, Int>, terms: usize) -> Tensor<2> {
    let [len] = index.dims();
    match len {
        0 => Tensor::empty([0, y.dims()[1]], (&y.device(), y.dtype())),
        _ => sum_rows(y, index.clone().reshape([len / terms, terms])),
    }
}

/// With rows of zeros behind, so that there are `len`.
fn lengthened(x: Tensor<2>, len: usize) -> Tensor<2> {
    let [rows, n] = x.dims();
    if rows == len {
        return x;
    }
    let zeros = Tensor::zeros([len - rows, n], (&x.device(), x.dtype()));
    if rows == 0 { zeros } else { Tensor::cat(vec![x, zeros], 0) }
}

/// The first `len` rows.
fn shortened(x: Tensor<2>, len: usize) -> Tensor<2> {
    let [_, n] = x.dims();
    match len {
        0 => Tensor::empty([0, n], (&x.device(), x.dtype())),
        _ => x.narrow(0, 0, len),
    }
}

fn as_row(x: Tensor<2>) -> Tensor<2> {
    let [rows, n] = x.dims();
    match rows * n {
        // A size of 0 means another one to Burn's `reshape`.
        0 => Tensor::empty([1, 0], (&x.device(), x.dtype())),
        len => x.reshape([1, len]),
    }
}

/// What is sent while tensors are computed fails as a region does.
fn ok<T>(result: Result<T, CollectiveError>) -> T {
    result.unwrap_or_else(|error| panic!("{FAILED_REGION}{error}"))
}
