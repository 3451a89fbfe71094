//! The plan as a picture: the memory of each stage as stacked bars, the parts of a step, and the
//! passes of the pipeline.

use std::fmt::Write;

use megaburn_pipeline::draw;

use crate::{memory::StageMemory, plan::Plan, text::GIB};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 80.0;
const BAR: f64 = 22.0;
const GAP: f64 = 8.0;
const INK: &str = "#3c4048";
/// Stages that are drawn.
const MOST_STAGES: usize = 32;
/// Passes that are drawn: more of them are too narrow to see.
const MOST_PASSES: usize = 4096;

const COLOURS: [&str; 8] = [
    "#2563af", "#0f8a72", "#c2570c", "#7b5ea7", "#b5a23c", "#8fb5df", "#b4b8c0", "#d98880",
];

/// The parts of a bar: name and length.
type BarParts<'a> = [(&'a str, f64)];

impl Plan {
    /// Draws the plan as an SVG file.
    pub fn svg(&self) -> String {
        let mut body = String::new();
        let mut y = 48.0;
        text(
            &mut body,
            LEFT,
            24.0,
            16.0,
            &format!(
                "{}, {} on {} x {}: {:.0} ms a step, {:.1} GiB",
                self.model.family,
                self.layout,
                self.gpus,
                self.gpu.title,
                self.time.step_ms,
                self.fullest().total_bytes as f64 / GIB
            ),
        );
        self.draw_memory(&mut body, &mut y);
        self.draw_time(&mut body, &mut y);
        let (schedule, timing) = &self.drawn;
        let mut width = WIDTH + LEFT + 40.0;
        if schedule.stages.num_stages() * schedule.num_micro_batches <= MOST_PASSES {
            let passes = draw::svg(schedule, timing);
            let [its_width, its_height] = ["width", "height"].map(|name| size(&passes, name));
            width = width.max(its_width);
            body.push_str(&passes.replacen("<svg ", &format!("<svg y=\"{y:.0}\" "), 1));
            y += its_height;
        }
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{y:.0}\" \
             viewBox=\"0 0 {width:.0} {y:.0}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{body}</svg>\n"
        )
    }

    fn draw_memory(&self, body: &mut String, y: &mut f64) {
        let capacity = self.capacity();
        let most = (self.fullest().total_bytes as f64).max(capacity);
        let scale = WIDTH / most;
        let top = *y;
        let mut names = Vec::new();
        for memory in self.memory.iter().take(MOST_STAGES) {
            text(
                body,
                12.0,
                *y + 15.0,
                12.0,
                &format!("stage {}", memory.stage),
            );
            let parts = memory_parts(memory);
            bar(body, *y, &parts, scale);
            names = parts.iter().map(|(name, _)| *name).collect();
            *y += BAR + GAP;
        }
        let limit = LEFT + capacity * scale;
        let _ = writeln!(
            body,
            "<line x1=\"{limit:.1}\" y1=\"{top:.1}\" x2=\"{limit:.1}\" y2=\"{:.1}\" stroke=\"#b00020\" \
             stroke-width=\"2\" stroke-dasharray=\"5 3\"/>",
            *y - GAP
        );
        let label = format!("{:.1} GiB", capacity / GIB);
        text(body, limit - 30.0, top - 4.0, 12.0, &label);
        legend(body, *y, &names);
        *y += 40.0;
    }

    fn draw_time(&self, body: &mut String, y: &mut f64) {
        let parts: Vec<_> = self.time.parts().into_iter().collect();
        text(body, 12.0, *y + 15.0, 12.0, "step");
        bar(
            body,
            *y,
            &parts,
            WIDTH / self.time.step_ms.max(f64::MIN_POSITIVE),
        );
        *y += BAR + GAP;
        let names: Vec<_> = parts.iter().map(|(name, _)| *name).collect();
        legend(body, *y, &names);
        *y += 40.0;
    }
}

/// The parts of a stage's memory. What is needed once is left out of the smaller of its two parts.
fn memory_parts(memory: &StageMemory) -> [(&'static str, f64); 6] {
    let reused = memory.reused_bytes;
    let once = |bytes: usize, other: usize| {
        if bytes <= other {
            bytes - reused.min(bytes)
        } else {
            bytes
        }
    };
    let (gradients, activations) = (memory.gradients_bytes, memory.activations_bytes);
    let kept = if gradients <= activations {
        [once(gradients, activations), activations]
    } else {
        [gradients, once(activations, gradients)]
    };
    [
        ("parameters", memory.parameters_bytes as f64),
        ("gradients", kept[0] as f64),
        ("optimizer", memory.optimizer_bytes as f64),
        ("activations", kept[1] as f64),
        ("buffers", memory.buffers_bytes as f64),
        ("runtime", memory.runtime_bytes as f64),
    ]
}

/// The number in an attribute of the first element of a picture.
fn size(picture: &str, name: &str) -> f64 {
    let value = picture
        .split_once(&format!(" {name}=\""))
        .map(|(_, rest)| rest);
    let value = value
        .and_then(|rest| rest.split_once('"'))
        .map(|(value, _)| value);
    value.and_then(|value| value.parse().ok()).unwrap_or(0.0)
}

fn bar(body: &mut String, y: f64, parts: &BarParts<'_>, scale: f64) {
    let mut x = LEFT;
    for (number, (name, length)) in parts.iter().enumerate() {
        let width = length * scale;
        if width > 0.0 {
            let _ = writeln!(
                body,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{BAR}\" fill=\"{}\">\
                 <title>{name}</title></rect>",
                COLOURS[number % COLOURS.len()]
            );
        }
        x += width;
    }
}

fn legend(body: &mut String, y: f64, names: &[&str]) {
    let mut x = LEFT;
    for (number, name) in names.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let _ = writeln!(
            body,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"
        );
        text(body, x + 16.0, y + 11.0, 12.0, name);
        x += 32.0 + 6.5 * name.len() as f64;
    }
}

fn text(body: &mut String, x: f64, y: f64, size: f64, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(
        body,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" fill=\"{INK}\">{text}</text>"
    );
}
