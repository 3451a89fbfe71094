use burn::{
    Tensor,
    module::{Module, ModuleVisitor, Param},
};

/// The names of the modules entered so far, which form the path of the current parameter.
#[derive(Debug, Default)]
pub(crate) struct Path(Vec<String>);

impl Path {
    pub(crate) fn enter(&mut self, name: &str) {
        self.0.push(name.to_string());
    }

    pub(crate) fn exit(&mut self) {
        self.0.pop();
    }

    pub(crate) fn text(&self) -> String {
        self.0.join(".")
    }
}

/// What to do with each float parameter of a module.
pub(crate) trait FloatVisitor {
    fn visit<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>);
}

/// Calls `visitor` for each float parameter, with its path.
pub(crate) fn visit_floats<M: Module>(module: &M, visitor: &mut impl FloatVisitor) {
    module.visit(&mut Paths {
        path: Path::default(),
        visitor,
    });
}

struct Paths<'a, V> {
    path: Path,
    visitor: &'a mut V,
}

impl<V: FloatVisitor> ModuleVisitor for Paths<'_, V> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.visitor.visit(self.path.text(), param);
    }
}
