use burn::module::{Content, DisplaySettings, ModuleDisplay};

use super::{ParallelLinear, Split};
use crate::display::one_line;

impl ModuleDisplay for ParallelLinear {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        one_line()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let plan = &self.plan;
        let split = match (&plan.copied_on, plan.config.split) {
            (Some(_), _) => "none",
            (None, Split::Column) => "column",
            (None, Split::Row) => "row",
        };
        content
            .add("d_input", &plan.config.d_input)
            .add("d_output", &plan.config.d_output)
            .add("bias", &self.bias.is_some())
            .add("split", &split.to_owned())
            .add("ranks", &self.holders().size())
            .optional()
    }
}
