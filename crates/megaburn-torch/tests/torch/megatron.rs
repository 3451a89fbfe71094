//! Checkpoints of Megatron-Core hold what its ranks had.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;

use megaburn_torch::DType;
use megaburn_torch::dcp::DcpWriter;
use megaburn_torch::megatron::{MegatronDir, OptimizerForm, ShardedKey, write_iteration};
use megaburn_torch::pickle::{Kind, Tree, write_pickle};
use serde_json::Value;

use crate::{copy_folder, dcp_object, megatron, torch_size};

#[test]
fn every_tensor_is_what_its_ranks_had() {
    for (name, form) in [
        ("tp2-pp2", OptimizerForm::ByParameter),
        ("dp2", OptimizerForm::ByBucket),
    ] {
        let about = fs::read(megatron(&format!("{name}.json"))).unwrap();
        let about: serde_json::Map<String, Value> = serde_json::from_slice(&about).unwrap();
        // The folder above, and the folder of the iteration.
        let dir = MegatronDir::open(megatron(name)).unwrap();
        let same = MegatronDir::open(megatron(name).join("iter_0000010")).unwrap();
        assert_eq!(dir.dcp().path(), same.dcp().path());
        assert_eq!(dir.dcp().tensors().len(), about.len());
        for (name, tensor) in dir.dcp().tensors() {
            let expected = &about[name];
            assert_eq!(tensor.dtype().name(), expected["dtype"].as_str().unwrap());
            let shape: Vec<usize> = serde_json::from_value(expected["shape"].clone()).unwrap();
            assert_eq!(tensor.shape(), shape, "{name}");
            let crc = rawzip::crc32(&dir.dcp().read(name).unwrap());
            assert_eq!(
                u64::from(crc),
                expected["crc32"].as_u64().unwrap(),
                "{name}"
            );
        }
        assert_eq!(dir.optimizer_form(), form);
    }
}

#[test]
fn the_common_part_is_read() {
    let dir = MegatronDir::open(megatron("tp2-pp2")).unwrap();
    assert_eq!(dir.iteration(), Some(10));
    assert_eq!(dir.arg("hidden_size").unwrap().as_i64(), Some(16));
    assert_eq!(dir.arg("lr").unwrap().as_f64(), Some(0.1));
    assert_eq!(dir.arg("swiglu").unwrap().as_bool(), Some(true));
    assert!(dir.arg("data_path").unwrap().is_none());
    assert!(dir.arg("hidden").is_none());
    let root = dir.common().root();
    assert_eq!(root.get("checkpoint_version").unwrap().as_f64(), Some(3.0));
    let form = root
        .get("content_metadata")
        .unwrap()
        .get("distrib_optim_sharding_type");
    assert_eq!(form.unwrap().as_str(), Some("fully_reshardable"));
    let groups = root.get("optimizer").unwrap().get("optimizer").unwrap();
    let groups = groups.get("param_groups").unwrap().sequence().unwrap();
    let step = groups.get(0).unwrap().get("step").unwrap();
    assert_eq!(step.as_f64(), Some(1.0));
}

#[test]
fn the_optimizer_has_three_tensors_for_each_parameter() {
    let dir = MegatronDir::open(megatron("tp2-pp2")).unwrap();
    let model: BTreeSet<&str> = dir.model().map(|(name, _)| name).collect();
    assert!(
        model.contains("decoder.layers.mlp.linear_fc1.weight"),
        "{model:?}"
    );
    let tensors = dir.optimizer().unwrap();
    for state in ["param", "exp_avg", "exp_avg_sq"] {
        let of = tensors.iter().filter(|tensor| tensor.state == state);
        let parameters: BTreeSet<&str> = of.map(|tensor| tensor.parameter).collect();
        assert_eq!(parameters, model, "{state}");
    }
    for tensor in &tensors {
        let parameter = dir.dcp().tensor(tensor.parameter).unwrap();
        assert_eq!(tensor.tensor.shape(), parameter.shape(), "{}", tensor.name);
    }
    assert_eq!(tensors.len(), 3 * model.len());
    let dir = MegatronDir::open(megatron("dp2")).unwrap();
    let error = dir.optimizer().unwrap_err().to_string();
    assert!(
        error.contains("--dist-ckpt-optim-fully-reshardable"),
        "{error}"
    );
    assert!(dir.model().all(|(name, _)| !name.contains("optimizer")));
}

#[test]
fn parts_of_objects_are_read() {
    let dir = MegatronDir::open(megatron("tp2-pp2")).unwrap();
    let keys: Vec<ShardedKey> = dir.sharded_objects().collect();
    let rng: Vec<&ShardedKey> = keys.iter().filter(|key| key.key == "rng_state").collect();
    assert_eq!(rng.len(), 4);
    assert!(rng.iter().all(|key| key.shape == [2, 2]));
    let file = dir.sharded_object(rng[3]).unwrap();
    let states = file.root().sequence().unwrap().get(0).unwrap();
    let state = states.sequence().unwrap().get(0).unwrap();
    let numbers = file
        .tensor(state.get("torch_rng_state").unwrap())
        .unwrap()
        .unwrap();
    assert_eq!(file.read(&numbers).unwrap(), [0, 1, 2, 3, 4]);
    let random = state.get("random_rng_state").unwrap().sequence().unwrap();
    assert_eq!(random.get(1).unwrap().sequence().unwrap().len(), 625);
    let extra = "decoder.layers.mlp.linear_fc1._extra_state/shard_1_2";
    let file = dir
        .sharded_object(&ShardedKey::parse(extra).unwrap())
        .unwrap();
    assert!(matches!(file.root().kind(), Kind::List(_)));
    assert_eq!(file.root().to_string(), "[None]");
}

#[test]
fn other_formats_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let error = || MegatronDir::open(path).unwrap_err().to_string();
    assert!(
        error().contains("it has neither `metadata.json` nor"),
        "{}",
        error()
    );
    fs::create_dir(path.join("mp_rank_00")).unwrap();
    assert!(error().contains("format `torch`"), "{}", error());
    let write = |name: &str, text: &str| fs::write(path.join(name), text).unwrap();
    write("latest_checkpointed_iteration.txt", "1x");
    assert!(error().contains("says \"1x\""), "{}", error());
    write("latest_checkpointed_iteration.txt", "12\n");
    assert!(error().contains("iter_0000012"), "{}", error());
    write("latest_checkpointed_iteration.txt", &"1".repeat(1 << 17));
    assert!(error().contains("cannot read"), "{}", error());
    for (text, expected) in [
        ("{}", "missing field `sharded_backend`"),
        (
            "{\"sharded_backend\": \"zarr\"}",
            "the format zarr 1, torch 1",
        ),
        (
            "{\"sharded_backend\": \"torch_dist\", \"sharded_backend_version\": 2}",
            "--ckpt-format torch_dist",
        ),
        ("{\"sharded_backend\": \"torch_dist\"}", "common.pt"),
    ] {
        write("metadata.json", text);
        assert!(error().contains(expected), "{}", error());
    }
}

#[test]
fn buckets_are_listed_with_their_groups() {
    // Of one rank of model parallelism: GPT-2 in bf16.
    let dir = MegatronDir::open(megatron("dp2")).unwrap();
    let buckets = dir.buckets().unwrap();
    let [bucket] = buckets.as_slice() else {
        panic!("{buckets:?}");
    };
    assert_eq!(
        (bucket.optimizer, bucket.group, bucket.buffer, bucket.index),
        (0, 0, 0, 0)
    );
    assert_eq!(bucket.dtype, DType::BF16);
    for state in ["param", "exp_avg", "exp_avg_sq"] {
        let tensor = dir.dcp().tensor(&bucket.tensor(state)).unwrap();
        assert_eq!(
            (tensor.dtype(), tensor.shape()),
            (DType::F32, &[bucket.len][..])
        );
    }
    let groups: Vec<_> = dir.bucket_groups().map(|groups| groups.unwrap()).collect();
    let [groups] = groups.as_slice() else {
        panic!("{groups:?}");
    };
    let group = groups.root().sequence().unwrap().get(0).unwrap();
    let group = group
        .get("param_groups")
        .unwrap()
        .sequence()
        .unwrap()
        .get(0)
        .unwrap();
    assert_eq!(group.get("step").unwrap().as_f64(), Some(1.0));
    // The other form has none.
    let dir = MegatronDir::open(megatron("tp2-pp2")).unwrap();
    assert_eq!(dir.buckets().unwrap(), []);
    assert_eq!(dir.bucket_groups().count(), 0);
}

/// Names, types and shapes of tensors.
type Tensors = Vec<(String, DType, Vec<usize>)>;

#[test]
fn buckets_of_another_kind_are_named() {
    let key = |bucket: usize| {
        format!(
            "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32)\
            .bucket_idx_{bucket}"
        )
    };
    let states = [".param", ".exp_avg", ".exp_avg_sq"];
    let all = |bucket: usize, len: usize| {
        states.map(|state| (key(bucket) + state, DType::F32, vec![len]))
    };
    let with = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors: Vec<_> = [all(0, 70), all(1, 9)].concat();
        change(&mut tensors);
        let folder = tempfile::tempdir().unwrap();
        let mut writer = DcpWriter::create(folder.path(), 0).unwrap();
        for (name, dtype, shape) in tensors {
            let bytes = vec![0; shape.iter().product::<usize>() * dtype.num_bytes()];
            let zeros = vec![0; shape.len()];
            let write = |out: &mut dyn Write| out.write_all(&bytes);
            writer
                .tensor(&name, dtype, &shape, &zeros, &shape, write)
                .unwrap();
        }
        let records = [writer.finish().unwrap()];
        write_iteration(folder.path(), &records, &Tree::Dict(Vec::new()), &[]).unwrap();
        let dir = MegatronDir::open(folder.path()).unwrap();
        dir.buckets()
            .map(|buckets| buckets.len())
            .map_err(|error| error.to_string())
    };
    assert_eq!(with(&|_| ()), Ok(2));
    let error = |change: &dyn Fn(&mut Tensors)| with(change).unwrap_err();
    let found = error(&|tensors| tensors[1].2 = vec![7, 10]);
    assert!(found.contains("[7, 10], not one dim"), "{found}");
    let found = error(&|tensors| tensors[1].2 = vec![71]);
    assert!(
        found.contains("has 70 elements") && found.contains("has 71;"),
        "{found}"
    );
    let found = error(&|tensors| tensors[4].1 = DType::BF16);
    assert!(found.contains("bfloat16, not f32"), "{found}");
    let found = error(&|tensors| tensors[5].0 = key(1) + ".momentum_buffer");
    assert!(found.contains("momentum_buffer` is no state"), "{found}");
    let found = error(&|tensors| drop(tensors.remove(2)));
    assert!(found.contains("bucket_idx_0` lacks one of"), "{found}");
    let found = error(&|tensors| drop(tensors.drain(..3)));
    assert!(
        found.contains("the bucket before") && found.contains("bucket_idx_1"),
        "{found}"
    );
}

/// What Megatron-Core before 0.14 wrote: tensors of the optimizer in another shape.
#[test]
fn reshaped_states_are_named() {
    let folder = tempfile::tempdir().unwrap();
    copy_folder(&megatron("tp2-pp2/iter_0000010"), folder.path());
    let name = "optimizer.state.exp_avg.output_layer.weight";
    let tensor = vec![
        (
            "properties",
            dcp_object(
                "metadata",
                "TensorProperties",
                vec![("dtype", Tree::global("torch", "float32"))],
            ),
        ),
        ("size", torch_size(&[4, 8])),
        ("chunks", Tree::List(Vec::new())),
    ];
    let tensor = dcp_object("metadata", "TensorStorageMetadata", tensor);
    let about = Tree::Dict(vec![(
        "nd_reformulated_orig_global_shape".into(),
        torch_size(&[32]),
    )]);
    let whole = vec![
        (
            "state_dict_metadata",
            Tree::Dict(vec![(name.into(), tensor)]),
        ),
        ("storage_data", Tree::Dict(Vec::new())),
        ("mcore_data", Tree::Dict(vec![(name.into(), about)])),
    ];
    let metadata = write_pickle(&dcp_object("metadata", "Metadata", whole)).unwrap();
    fs::write(folder.path().join(".metadata"), metadata).unwrap();
    let dir = MegatronDir::open(folder.path());
    let error = dir
        .and_then(|dir| dir.optimizer().map(|_| ()))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("before 0.14") && error.contains(name),
        "{error}"
    );
}
