//! A save asks for the values of a tensor when it reads them.

use std::{cell::RefCell, rc::Rc};

use burn::tensor::{DType, TensorData};
use megaburn_checkpoint::{Checkpoint, CheckpointError, NamedTensor, Snapshot, save_single};
use megaburn_mesh::{Axis, FusedPart, ShardSpec};

use crate::model::Random;

#[test]
fn each_tensor_is_asked_for_once_in_the_order_of_the_file_and_let_go() {
    let mut random = Random::fresh();
    let dir = tempfile::tempdir().unwrap();
    // Two pieces each, longer than any buffer between them and the file.
    let specs: Vec<(ShardSpec, DType)> = [DType::BF16, DType::F64, DType::F32, DType::F64]
        .into_iter()
        .map(|dtype| {
            let len = 40_000 + random.below(40_000) as usize;
            let parts = [FusedPart::new(len), FusedPart::new(7)];
            let shape = [2, len + 7];
            (
                ShardSpec::split(&shape, 1, &parts, Axis::Tp, 0, 1).unwrap(),
                dtype,
            )
        })
        .collect();
    let asked = RefCell::new(Vec::new());
    // Counts the closures that still exist, each of which holds a clone.
    let alive = Rc::new(());
    let tensors = specs.iter().enumerate().map(|(number, tensor)| {
        let (spec, dtype) = tensor;
        let asked = &asked;
        let held = alive.clone();
        let name = format!("t{number}");
        NamedTensor::lazy(name, spec, *dtype, move || {
            asked.borrow_mut().push((number, Rc::strong_count(&held)));
            let data = vec![number as u8; spec.num_global() * dtype.size()];
            Ok(TensorData::from_bytes_vec(data, spec.local_shape(), *dtype))
        })
    });
    let path = dir.path().join("out");
    save_single(&path, false, &Snapshot::default(), "dp1", tensors, &[]).unwrap();

    let order: Vec<usize> = asked.borrow().iter().map(|(number, ..)| *number).collect();
    assert_eq!(order, [1, 3, 2, 0], "wide types first");
    for (turn, (number, held)) in asked.borrow().iter().enumerate() {
        assert_eq!(*held, 1 + specs.len() - turn, "tensor {number}");
    }
    let checkpoint = Checkpoint::open(&path).unwrap();
    checkpoint.verify().unwrap();
    for (number, (spec, dtype)) in specs.iter().enumerate() {
        let read = checkpoint
            .read(&format!("t{number}"), spec, *dtype)
            .unwrap();
        assert!(read.as_bytes().iter().all(|byte| *byte == number as u8));
    }
}

#[test]
fn a_tensor_that_this_rank_does_not_write_is_not_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    // The copy of another pipeline stage, which writes it.
    let copy = ShardSpec::whole(&[3], Axis::Tp, 0, 1).copy(1);
    let other = NamedTensor::lazy("other", &copy, DType::F32, || panic!("nobody wants it"));
    let own = ShardSpec::whole(&[2], Axis::Tp, 0, 1);
    let own = NamedTensor::new("own", &own, TensorData::from([1.0f32, 2.0]));
    let path = dir.path().join("out");
    let result = save_single(&path, false, &Snapshot::default(), "dp1", [other, own], &[]);
    let error = result.unwrap_err();
    assert!(matches!(error, CheckpointError::Untiled { .. }), "{error}");
    let why = "no rank owns any part of its shape [3]";
    assert!(error.to_string().contains(why), "{error}");
}
