//! The published form of Nemotron.

use serde_json::Value;

use super::*;

/// Nemotron's published files name the rotated fraction of a head in another way.
#[test]
fn the_rotated_fraction_of_nemotron_may_have_its_published_name() {
    let mut json = Family::NEMOTRON.template().to_hf();
    json["head_dim"] = 32.into();
    json["rope_parameters"]
        .as_object_mut()
        .unwrap()
        .remove("partial_rotary_factor");
    let percent = |json: &Value| Ok::<_, String>(read(json)?.positions.rotary().unwrap().percent);
    assert_eq!(percent(&json), Ok(0.5));
    json["rope_percent"] = 0.25.into();
    assert_eq!(percent(&json), Ok(0.25));
    json["partial_rotary_factor"] = 0.5.into();
    let error = percent(&json).unwrap_err();
    assert!(error.contains("`rope_percent` is 0.25, but `partial_rotary_factor` is 0.5"));
}
