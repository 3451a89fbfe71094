//! PyTorch's batch norms count their batches, in a tensor that Burn's have not.

use burn::{
    module::{Module, Param, ParamId},
    nn,
    prelude::{Device, Int},
    tensor::Tensor,
};
use burn_store::{BurnToPyTorchAdapter, ModuleSnapshot, SafetensorsStore};
use megaburn_parallel::{ParallelLinear, ParallelLinearConfig, Sharded};
use megaburn_records::{Layout, RecordFile};

use super::{errors, ranks};

/// The batch norm of a PyTorch module.
#[derive(Module, Debug)]
struct Counter {
    num_batches_tracked: Param<Tensor<1, Int>>,
}

#[derive(Module, Debug)]
struct Given {
    up: nn::Linear,
    norm: Counter,
}

#[derive(Module, Sharded, Debug)]
struct Net {
    up: ParallelLinear,
}

#[test]
fn the_number_of_batches_is_ignored_in_pytorchs_layout_only() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("given.safetensors");
    let device = Device::flex();
    let given = Given {
        up: nn::LinearConfig::new(3, 4).init(&device),
        norm: Counter {
            num_batches_tracked: Param::initialized(
                ParamId::new(),
                Tensor::from_ints([7], &device),
            ),
        },
    };
    let store = SafetensorsStore::from_file(&file).with_to_adapter(BurnToPyTorchAdapter);
    given.save_into(&mut { store }).unwrap();
    let read = |group, layout| {
        let up = ParallelLinearConfig::column(3, 4).with_name("up");
        let up = up.init(&group, &Device::flex())?;
        let file = RecordFile::new(&file).with_layout(layout);
        Ok((group.rank(), file.load(Net { up })?))
    };
    for found in ranks(2, |group| read(group, Layout::Torch)) {
        let (rank, net) = found.unwrap();
        let part = given.up.weight.val().narrow(1, 2 * rank, 2);
        assert_eq!(net.up.weight.val().into_data(), part.into_data());
    }
    for error in errors(2, |group| read(group, Layout::Burn).map(drop)) {
        let expected = "no parameter for tensor `norm.num_batches_tracked` of the source";
        assert!(error.contains(expected), "{error}");
    }
}
