//! Replicated linear layers of Burn with `LinearLayout::Col`, whose files have the transposed matrix.

use std::{fs, path::Path};

use burn::{
    module::Module,
    nn::{Linear, LinearConfig, LinearLayout},
    prelude::Device,
};
use burn_store::{BurnToPyTorchAdapter, ModuleSnapshot, SafetensorsStore};
use megaburn_collective::Group;
use megaburn_parallel::{ParallelError, ParallelLinear, ParallelLinearConfig, Sharded, shard_plan};
use megaburn_records::{Layout, RecordFile};
use rstest::rstest;
use safetensors::SafeTensors;

use crate::ranks;

#[derive(Module, Debug)]
struct Plain {
    up: Linear,
    head: Linear,
}

impl Plain {
    /// A module, of which `head` has the weights of `other`'s.
    fn new(sizes: [usize; 2], layout: LinearLayout, other: Option<&Self>) -> Self {
        let device = Device::flex();
        let mut net = Self {
            up: LinearConfig::new(4, 4).init(&device),
            head: head(sizes, layout),
        };
        if let Some(other) = other {
            let value = other.head.weight.val();
            net.head.weight = net.head.weight.map(|_| value);
        }
        net
    }

    fn save(&self, path: &Path, layout: Layout) {
        let mut store = SafetensorsStore::from_file(path);
        if layout == Layout::Torch {
            store = store.with_to_adapter(BurnToPyTorchAdapter);
        }
        self.save_into(&mut store).unwrap();
    }
}

fn head([d_input, d_output]: [usize; 2], layout: LinearLayout) -> Linear {
    let config = LinearConfig::new(d_input, d_output).with_layout(layout);
    config.init(&Device::flex())
}

#[derive(Module, Sharded, Debug)]
struct Net {
    up: ParallelLinear,
    #[sharded(replicated)]
    head: Linear,
}

impl Net {
    fn new(sizes: [usize; 2], group: &Group) -> Result<Self, ParallelError> {
        let up = ParallelLinearConfig::column(4, 4).with_name("up");
        Ok(Self {
            up: up.init(group, &Device::flex())?,
            head: head(sizes, LinearLayout::Col),
        })
    }
}

/// The shape and the bytes of the head's weight in a file.
fn in_file(path: &Path) -> (Vec<usize>, Vec<u8>) {
    let bytes = fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = tensors.tensor("head.weight").unwrap();
    (tensor.shape().to_vec(), tensor.data().to_vec())
}

#[rstest]
#[case::burn(Layout::Burn)]
#[case::torch(Layout::Torch)]
fn a_column_major_weight_is_read_and_written_as_files_have_it(
    #[case] layout: Layout,
    #[values([4, 4], [3, 5])] sizes: [usize; 2],
    #[values(false, true)] is_drawn: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    let given = folder.path().join("given.safetensors");
    let row = Plain::new(sizes, LinearLayout::Row, None);
    let expected = row.head.weight.val().into_data();
    match layout {
        // Burn's adapter for PyTorch does not know the layout of columns.
        Layout::Torch => row.save(&given, layout),
        Layout::Burn => Plain::new(sizes, LinearLayout::Col, Some(&row)).save(&given, layout),
    }
    let [d_input, d_output] = sizes;
    assert_eq!(in_file(&given).0, [d_output, d_input]);
    for size in [1, 2] {
        let written = folder.path().join(format!("written{size}.safetensors"));
        let found = ranks(size, |group| {
            let net = Net::new(sizes, &group)?;
            if is_drawn {
                net.head.weight.val();
            }
            let plan = shard_plan(&net)?;
            let planned = &plan.get("head.weight").unwrap().shard;
            assert_eq!(planned.global_shape, sizes);
            let net = RecordFile::new(&given).with_layout(layout).load(net)?;
            let file = RecordFile::new(&written).with_layout(layout);
            file.save(&net, &group)?;
            Ok(net.head.weight.val().into_data())
        });
        for found in found {
            assert_eq!(found.unwrap(), expected);
        }
        assert_eq!(in_file(&written), in_file(&given));
    }
}
