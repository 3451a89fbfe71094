//! Tensors of a file that are not the module's. PyTorch's batch norms count their batches, in a
//! tensor that Burn's have not.

use std::path::{Path, PathBuf};

use burn::{
    module::{Module, Param, ParamId},
    nn,
    prelude::{Device, Int},
    tensor::Tensor,
};
use burn_store::{BurnToPyTorchAdapter, ModuleSnapshot, SafetensorsStore};
use megaburn_collective::Group;
use megaburn_parallel::{ParallelError, ParallelLinear, ParallelLinearConfig, Sharded};
use megaburn_records::{Layout, RecordFile, load_from_ignoring};
use rstest::rstest;

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

impl Given {
    /// A module and its file in PyTorch's layout.
    fn saved(folder: &Path) -> (Self, PathBuf) {
        let device = Device::flex();
        let count = Tensor::from_ints([7], &device);
        let given = Self {
            up: nn::LinearConfig::new(3, 4).init(&device),
            norm: Counter {
                num_batches_tracked: Param::initialized(ParamId::new(), count),
            },
        };
        let file = folder.join("given.safetensors");
        let store = SafetensorsStore::from_file(&file).with_to_adapter(BurnToPyTorchAdapter);
        given.save_into(&mut { store }).unwrap();
        (given, file)
    }
}

#[derive(Module, Sharded, Debug)]
struct Net {
    up: ParallelLinear,
}

impl Net {
    fn new(group: &Group) -> Result<Self, ParallelError> {
        let up = ParallelLinearConfig::column(3, 4).with_name("up");
        let up = up.init(group, &Device::flex())?;
        Ok(Self { up })
    }
}

#[test]
fn the_number_of_batches_is_ignored_in_pytorchs_layout_only() {
    let folder = tempfile::tempdir().unwrap();
    let (given, file) = Given::saved(folder.path());
    for found in ranks(2, |group| {
        let file = RecordFile::new(&file).with_layout(Layout::Torch);
        Ok((group.rank(), file.load(Net::new(&group)?)?))
    }) {
        let (rank, net) = found.unwrap();
        let part = given.up.weight.val().narrow(1, 2 * rank, 2);
        assert_eq!(net.up.weight.val().into_data(), part.into_data());
    }
    for error in errors(2, |group| {
        let file = RecordFile::new(&file).with_layout(Layout::Burn);
        file.load(Net::new(&group)?).map(drop)
    }) {
        let expected = "no parameter for tensor `norm.num_batches_tracked` of the source";
        assert!(error.contains(expected), "{error}");
        assert!(error.contains("with_ignored"), "{error}");
    }
}

#[rstest]
#[case::the_name(&["num_batches_tracked"], true)]
#[case::the_whole_path(&["other", "norm.num_batches_tracked"], true)]
#[case::a_part_of_a_name(&["batches_tracked"], false)]
fn tensors_whose_names_are_given_are_ignored(#[case] names: &[&str], #[case] is_read: bool) {
    let folder = tempfile::tempdir().unwrap();
    let (_, file) = Given::saved(folder.path());
    let net = || Net::new(&Group::single(0)).unwrap();
    // In this layout `up.weight` is transposed, which is another error.
    let of_file = RecordFile::new(&file).with_ignored(names.iter().copied());
    let error = of_file.load(net()).unwrap_err().to_string();
    assert_eq!(error.contains("`up.weight` is [4, 3]"), is_read, "{error}");
    let mut store = SafetensorsStore::from_file(&file);
    let error = load_from_ignoring(net(), &mut store, Layout::Burn, names).unwrap_err();
    let error = error.to_string();
    assert_eq!(error.contains("`up.weight` is [4, 3]"), is_read, "{error}");
}
