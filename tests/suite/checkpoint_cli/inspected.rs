//! `ls`, `show`, `stats` and `verify`.

use std::{collections::BTreeMap, fs, time::SystemTime};

use megaburn::checkpoint::Checkpoint;
use megaburn_test_support::run::Run;
use serde_json::{Value, json};

use super::{checkpoint, copy, flip, json, names, output, refused, step, trained};

/// The files of a run with their times of change.
fn times(run: &Run) -> BTreeMap<String, SystemTime> {
    let mut times = BTreeMap::new();
    for folder in [run.path("run"), run.checkpoints(), step(run, 6)] {
        for name in names(&folder) {
            let path = folder.join(name);
            let time = fs::metadata(&path).unwrap().modified().unwrap();
            times.insert(path.display().to_string(), time);
        }
    }
    times
}

fn states(listed: &[Value]) -> Vec<(u64, &str, Option<&str>)> {
    let state = |row: &Value| row["state"].as_str().unwrap().to_string();
    let states = listed.iter().map(|row| {
        assert!(!state(row).is_empty());
        (
            row["step"].as_u64().unwrap(),
            row["state"].as_str().unwrap(),
            row["resume"].as_str(),
        )
    });
    states.collect()
}

#[test]
fn ls_shows_the_state_of_each_checkpoint_and_changes_nothing() {
    let run = trained("tp2");
    let before = times(&run);
    let listed = json(&run, "ls /run", 0);
    let whole = [
        (2, "whole", None),
        (4, "whole", None),
        (6, "whole", Some("takes")),
    ];
    assert_eq!(states(&listed), whole);
    let id = Checkpoint::open(&step(&run, 6))
        .unwrap()
        .manifest()
        .run_id
        .clone();
    for row in &listed {
        assert_eq!((&row["run_id"], &row["is_own"]), (&json!(id), &json!(true)));
        assert_eq!((&row["layout"], &row["files"]), (&json!("tp2"), &json!(2)));
        assert!(
            row["age_seconds"].as_u64().unwrap() < 100 && row["bytes"].as_u64().unwrap() > 1000
        );
    }
    let text = output(&run, "ls /run /run/checkpoints/step-00000004", 0);
    assert!(text.contains("whole, a resume takes it\n\n"), "{text}");
    assert_eq!(text.lines().count(), 5 + 1 + 3, "{text}");
    assert_eq!(times(&run), before);

    // A newer one of another run, a truncated one, one that was set aside, a user's folder.
    let other = trained("tp1");
    copy(&step(&other, 6), &step(&run, 8));
    let file = step(&run, 4).join("rank-00001.safetensors");
    fs::File::options()
        .write(true)
        .open(file)
        .unwrap()
        .set_len(999)
        .unwrap();
    let aside = run.checkpoints().join("step-00000002.damaged-1f-2a");
    fs::rename(step(&run, 2), &aside).unwrap();
    fs::create_dir(run.checkpoints().join("notes")).unwrap();
    let listed = json(&run, "ls /run/checkpoints", 1);
    let found = [
        (2, "set_aside", None),
        (4, "damaged", None),
        (6, "whole", None),
        (8, "whole", Some("refuses")),
    ];
    assert_eq!(states(&listed), found);
    assert_eq!(listed[3]["is_own"], json!(false));
    let text = output(&run, "ls /run", 1);
    assert!(
        text.contains("damaged: rank-00001.safetensors: it has 999 bytes of "),
        "{text}"
    );
    assert!(text.contains("saved at step 6, of run "), "{text}");
}

#[test]
fn show_and_stats_describe_what_a_checkpoint_holds() {
    let run = trained("tp2");
    let shown = json(&run, "show /run --tensors model.*norm*", 0);
    let opened = Checkpoint::open(&step(&run, 6)).unwrap();
    let manifest = opened.manifest();
    let all = &shown[0];
    assert_eq!((&all["step"], &all["layout"]), (&json!(6), &json!("tp2")));
    assert_eq!(
        (&all["model"], &all["trainer"]),
        (&manifest.model, &manifest.trainer)
    );
    let kinds: Vec<_> = all["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|of| &of["kind"])
        .collect();
    assert_eq!(kinds, ["exp_avg", "exp_avg_sq", "model"]);
    let sum = |list: &Value, key: &str| -> u64 {
        let all = list.as_array().unwrap().iter();
        all.map(|of| of[key].as_u64().unwrap()).sum()
    };
    let elements = manifest
        .tensors
        .values()
        .map(|info| info.global_shape.iter().product::<usize>());
    assert_eq!(
        sum(&all["tensors"], "elements"),
        elements.sum::<usize>() as u64
    );
    assert_eq!(
        sum(&all["tensors"], "tensors"),
        manifest.tensors.len() as u64
    );
    let bytes: u64 = manifest.files.iter().map(|file| file.bytes).sum();
    assert_eq!(sum(&all["files"], "bytes"), bytes);

    let listed: Vec<_> = shown[1..]
        .iter()
        .map(|of| of["name"].as_str().unwrap())
        .collect();
    let is_norm = |name: &&String| name.starts_with("model.") && name.contains("norm");
    let expected: Vec<_> = manifest.tensors.keys().filter(is_norm).collect();
    assert!(expected.len() > 2 && listed == expected, "{listed:?}");
    assert_eq!(shown[1]["shape"], json!([32]));

    let text = output(&run, "show /run", 0);
    for part in [
        "step     6 of run ",
        "vocabulary",
        "2 files of ",
        "progress.step",
        "adamw",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let with = json(&run, "show /run --statistics --tensors model.norm.*", 0);
    let only = json(&run, "stats /run/checkpoints/step-00000006 model.norm.*", 0);
    assert_eq!(with[1..], only);
    let statistics = &only[0]["statistics"];
    let gamma = opened
        .read("model.norm.gamma", &whole_of(32), burn::tensor::DType::F64)
        .unwrap();
    let gamma = gamma.try_to_vec::<f64>().unwrap();
    let norm = gamma.iter().map(|x| x * x).sum::<f64>().sqrt();
    let mean = gamma.iter().sum::<f64>() / 32.0;
    for (key, value) in [("norm", norm), ("mean", mean)] {
        let found = statistics[key].as_f64().unwrap();
        assert!((found - value).abs() < 1e-12, "{key} {found}, not {value}");
    }
    assert!(refused(&run, "stats /run model.nrom.*").contains("matches the full name of a tensor"));
    assert!(refused(&run, "show /text.txt").contains("is not a folder"));
}

fn whole_of(len: usize) -> megaburn::mesh::ShardSpec {
    megaburn::mesh::ShardSpec::whole(&[len], megaburn::mesh::Axis::Tp, 0, 1)
}

#[test]
fn verify_reads_every_file_and_names_all_damage() {
    let run = trained("tp2");
    let text = output(&run, "verify /run", 0);
    assert_eq!(text.matches(": whole, 2 files, ").count(), 3, "{text}");
    for (of, file) in [
        (2, "rank-00000.safetensors"),
        (2, "rank-00001.safetensors"),
        (4, "manifest.json"),
    ] {
        flip(&step(&run, of).join(file));
    }
    let found = json(&run, "verify /run", 1);
    let states: Vec<_> = found
        .iter()
        .map(|of| of["state"].as_str().unwrap())
        .collect();
    assert_eq!(states, ["damaged", "damaged", "whole"]);
    let damage = found[0]["damage"].as_array().unwrap();
    assert_eq!(damage.len(), 2, "{damage:#?}");
    for (damage, file) in damage
        .iter()
        .zip(["rank-00000.safetensors", "rank-00001.safetensors"])
    {
        assert_eq!(
            (&damage["file"], &damage["chunk"]),
            (&json!(file), &json!(0))
        );
        assert!(damage["tensor"].is_string(), "{damage}");
    }
    let text = output(
        &run,
        "verify /run/checkpoints/step-00000002 /run/checkpoints/step-00000006",
        1,
    );
    assert!(text.contains("step-00000002: DAMAGED, 2 files, "), "{text}");
    assert!(
        text.contains("  rank-00001.safetensors: tensor `"),
        "{text}"
    );
    assert!(text.contains("step-00000006: whole, "), "{text}");

    // Only what is damaged cannot be read, and that is no bad input.
    let stats = checkpoint(&run, "stats /run/checkpoints/step-00000002");
    assert_eq!(stats.code, Some(1), "{stats:#?}");
    fs::create_dir_all(run.path("empty/checkpoints")).unwrap();
    assert!(refused(&run, "verify /empty").contains("contains no checkpoint"));
    assert!(output(&run, "ls /empty", 0).contains("no checkpoints"));
    fs::create_dir(run.path("nothing")).unwrap();
    assert!(refused(&run, "verify /nothing").contains("neither manifest.json"));
}
