//! The files of the page, which are part of the program.

use crate::http::Response;

macro_rules! files {
    ($($path:literal => $content_type:expr, $file:literal;)*) => {
        &[$(($path, $content_type, include_str!(concat!("../page/", $file)))),*]
    };
}

const JS: &str = "text/javascript; charset=utf-8";

/// Path, content type and text of each file.
const FILES: &[(&str, &str, &str)] = files! {
    "/" => "text/html; charset=utf-8", "index.html";
    "/style.css" => "text/css; charset=utf-8", "style.css";
    "/icon.svg" => "image/svg+xml", "icon.svg";
    "/js/main.js" => JS, "js/main.js";
    "/js/runs.js" => JS, "js/runs.js";
    "/js/points.js" => JS, "js/points.js";
    "/js/axes.js" => JS, "js/axes.js";
    "/js/chart.js" => JS, "js/chart.js";
    "/js/pointer.js" => JS, "js/pointer.js";
    "/js/charts.js" => JS, "js/charts.js";
    "/js/side.js" => JS, "js/side.js";
    "/js/events.js" => JS, "js/events.js";
    "/js/config.js" => JS, "js/config.js";
    "/js/layers.js" => JS, "js/layers.js";
    "/js/numbers.js" => JS, "js/numbers.js";
    "/js/text.js" => JS, "js/text.js";
};

/// The file of the page at a path.
pub(crate) fn file(path: &str) -> Option<Response> {
    let (_, content_type, text) = FILES.iter().find(|file| file.0 == path)?;
    Some(Response::found(content_type, *text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_page_loads_is_there_and_nothing_comes_from_elsewhere() {
        let mut loaded = 0;
        for (path, _, text) in FILES {
            for mark in ["from \"./", "src=\"/", "href=\"/"] {
                for rest in text.split(mark).skip(1) {
                    let name = rest.split('"').next().unwrap_or_default();
                    let folder = if mark.contains('.') { "/js/" } else { "/" };
                    assert!(file(&format!("{folder}{name}")).is_some(), "{path}: {name}");
                    loaded += 1;
                }
            }
            let outside = text.replace("http://www.w3.org/2000/svg", "");
            assert!(
                !outside.contains("http://") && !outside.contains("https://"),
                "{path}"
            );
        }
        assert!(loaded > 10, "only {loaded} were looked at");
    }

    #[test]
    fn a_file_holds_one_idea() {
        for (path, _, text) in FILES {
            assert!(text.lines().count() <= 400, "{path}");
        }
    }
}
