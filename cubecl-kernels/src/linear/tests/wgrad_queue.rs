//! Weight gradients that are computed after the backward pass.

use std::sync::{Arc, Mutex};

use megaburn_autograd::testing::{constant, leaf, values};
use megaburn_autograd::{MainGrad, WgradQueue, without_deferral};

use crate::{LinearOptions, linear};

#[test]
fn deferred_products_are_added_later_in_the_same_order() {
    let x = leaf(constant([5, 2, 6]));
    let heard = Arc::new(Mutex::new(Vec::new()));
    let bias = leaf(constant([6]));
    let layer = |name: &'static str| {
        let main_grad = MainGrad::default();
        main_grad.attach();
        let heard = heard.clone();
        main_grad.on_gradient(move || heard.lock().unwrap().push(name));
        (leaf(constant([6, 6])), main_grad)
    };
    let layers = ["first", "second"].map(layer);
    let loss = || {
        let through = |x, (w, main): &(_, MainGrad)| {
            let options = LinearOptions {
                out_in: true,
                main_grad: Some(main.clone()),
                ..Default::default()
            };
            linear(
                x,
                burn::tensor::Tensor::clone(w),
                Some(bias.clone()),
                options,
            )
        };
        let y = layers.iter().fold(x.clone(), through);
        (y.clone() * y).sum()
    };
    let taken = || layers.each_ref().map(|(_, main)| main.take().map(values));
    let at_once = loss().backward();
    let expected = taken();
    let order = std::mem::take(&mut *heard.lock().unwrap());
    assert_eq!(order, ["second", "first"]);

    let deferred = WgradQueue::default();
    let grads = deferred.defer(|| loss().backward());
    assert_eq!((taken(), heard.lock().unwrap().len()), ([None, None], 0));
    assert_eq!(
        values(x.grad(&grads).unwrap()),
        values(x.grad(&at_once).unwrap())
    );
    assert_eq!(
        values(bias.grad(&grads).unwrap()),
        values(bias.grad(&at_once).unwrap())
    );
    deferred.compute();
    assert_eq!(
        (taken(), &*heard.lock().unwrap()),
        (expected.clone(), &order)
    );
    // A backward pass inside that asks for its weight gradients gets them at once.
    let deferred = WgradQueue::default();
    deferred.defer(|| without_deferral(|| loss().backward()));
    assert_eq!(format!("{deferred:?}"), "WgradQueue(0)");
    assert_eq!(taken(), expected);
    // The backward passes that follow defer nothing.
    loss().backward();
    assert!(taken().iter().all(Option::is_some));
}
