//! `diff`.

use serde_json::{Value, json};

use super::{checkpoint, copy, json, output, refused, step, train, trained};

/// The differences by kind.
fn of_kind<'a>(lines: &'a [Value], kind: &str) -> Vec<&'a Value> {
    lines.iter().filter(|line| line["kind"] == kind).collect()
}

#[test]
fn diff_finds_what_differs_and_nothing_else() {
    let run = trained("tp2");
    let line = "diff /run/checkpoints/step-00000004 /run/checkpoints/step-00000006";
    let lines = json(&run, line, 1);
    let keys: Vec<_> = of_kind(&lines, "key")
        .iter()
        .map(|line| line["key"].clone())
        .collect();
    assert_eq!(
        keys,
        [
            "step",
            "trainer.progress.consumed_samples",
            "trainer.progress.consumed_tokens",
            "trainer.progress.step"
        ]
    );
    assert_eq!((&lines[0]["a"], &lines[0]["b"]), (&json!(4), &json!(6)));
    let summary = lines.last().unwrap();
    let tensors = of_kind(&lines, "tensor");
    assert_eq!(summary["different_tensors"], json!(tensors.len()));
    assert_eq!(
        (&summary["equal"], &summary["different_keys"]),
        (&json!(false), &json!(4))
    );
    for tensor in &tensors {
        let norm = tensor["relative_norm"].as_f64().unwrap();
        assert!(
            norm > 0.0 && tensor["different"] == tensor["beyond"],
            "{tensor}"
        );
        assert!(
            tensor["first"].is_array() && tensor["at"].is_array(),
            "{tensor}"
        );
    }
    let text = output(&run, line, 1);
    assert!(text.contains("trainer.progress.step: 4 and 6"), "{text}");
    assert!(
        text.contains("4 keys of configuration and state differ"),
        "{text}"
    );

    // With a tolerance only the tensors count that are asked for.
    let wide = format!("{line} --tensors model.* --atol 100");
    assert_eq!(of_kind(&json(&run, &wide, 0), "tensor").len(), 0);
    let narrow = format!("{line} --tensors model.* --rtol 1e-12");
    let narrow = json(&run, &narrow, 1);
    let is_model = |line: &&Value| line["name"].as_str().unwrap().starts_with("model.");
    assert!(of_kind(&narrow, "tensor").iter().all(is_model) && narrow.len() > 2);
    assert!(of_kind(&narrow, "key").is_empty());
    assert!(refused(&run, &format!("{line} --atol -1")).contains("must be 0 or more"));
    assert!(refused(&run, &format!("{line} --tensors optim.*")).contains("is `optim.*`"));
    let both = checkpoint(&run, &format!("{line} --exact --rtol 0.1"));
    assert_eq!(both.code, Some(2), "{both:#?}");
}

#[test]
fn a_step_that_two_layouts_wrote_is_equal_except_for_the_layout() {
    let run = trained("tp2");
    // The same values, from one rank.
    copy(&step(&run, 6), &run.path("of-tp2"));
    assert!(output(&run, "diff /run /of-tp2 --exact", 0).contains("state are equal"));
    std::fs::remove_dir_all(step(&run, 6)).unwrap();
    train(&run, "tp2-dp2", 6);
    let lines = json(&run, "diff /run /of-tp2", 1);
    let is_layout = |line: &&Value| {
        line["key"]
            .as_str()
            .unwrap()
            .starts_with("trainer.config.parallel.")
    };
    let keys = of_kind(&lines, "key");
    assert!(!keys.is_empty() && keys.iter().all(is_layout), "{lines:#?}");
    // Losses of other layouts are equal up to rounding.
    output(
        &run,
        "diff /run /of-tp2 --tensors model.* --rtol 1e-3 --atol 1e-4",
        0,
    );
}
