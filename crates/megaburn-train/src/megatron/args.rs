//! The arguments of a run of Megatron-LM, read with their types.

use std::path::{Path, PathBuf};

use megaburn_torch::{megatron::MegatronDir, pickle::Value};

use super::error::MegatronError;

/// The largest size or count. Products of two are compared to what a number holds.
const MOST: usize = 1 << 40;

/// The arguments that a checkpoint records, the attributes of `args` in `common.pt`.
///
/// Megatron-LM records all arguments that its version has, and `None` for those that are not set.
/// So an absent argument is one of another version, and means the same as `None`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Args<'a> {
    dir: &'a MegatronDir,
}

impl<'a> Args<'a> {
    /// The arguments of a checkpoint.
    ///
    /// # Errors
    /// It records none.
    pub(super) fn of(dir: &'a MegatronDir) -> Result<Self, MegatronError> {
        let args = Self { dir };
        match dir.common().root().get("args") {
            Some(found) if found.as_object().is_some() => Ok(args),
            _ => Err(args.missing("args", "save it from Megatron-LM's training script")),
        }
    }

    /// The folder of the checkpoint.
    pub(super) fn path(&self) -> &'a Path {
        self.dir.dcp().path()
    }

    /// The argument, if it is set.
    pub(super) fn get(&self, name: &str) -> Option<Value<'a>> {
        self.dir.arg(name).filter(|value| !value.is_none())
    }

    /// Refuses the value of an argument.
    pub(super) fn refused(&self, name: &str, why: impl Into<String>) -> MegatronError {
        MegatronError::Argument {
            path: self.path().into(),
            name: name.into(),
            value: self
                .dir
                .arg(name)
                .map_or("absent".into(), |value| value.to_string()),
            why: why.into(),
        }
    }

    pub(super) fn missing(&self, what: &str, why: &str) -> MegatronError {
        MegatronError::Missing {
            path: PathBuf::from(self.path()).join("common.pt"),
            what: what.into(),
            why: why.into(),
        }
    }

    /// The value of an argument as one type; `None` if it is not set.
    fn typed<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, MegatronError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(self.refused(name, format!("it must be {expected}"))),
        }
    }

    fn required<T>(&self, name: &str, found: Option<T>) -> Result<T, MegatronError> {
        let why = "the run cannot be continued without it";
        found.ok_or_else(|| self.missing(&format!("argument `{name}`"), why))
    }

    /// A size or count, if it is set.
    pub(super) fn optional_size(&self, name: &str) -> Result<Option<usize>, MegatronError> {
        let read = |value: Value| value.as_usize().filter(|size| *size <= MOST);
        self.typed(name, "a size of at most 2^40", read)
    }

    /// A size or count.
    pub(super) fn size(&self, name: &str) -> Result<usize, MegatronError> {
        self.required(name, self.optional_size(name)?)
    }

    /// The seed of random numbers.
    pub(super) fn seed(&self) -> Result<u64, MegatronError> {
        let read = |value: Value| u64::try_from(value.as_i64()?).ok();
        let name = "seed";
        self.required(name, self.typed(name, "a number from 0 to 2^63 - 1", read)?)
    }

    /// The product of several sizes, of which one that is not set is 1.
    pub(super) fn product(&self, names: &[&str]) -> Result<usize, MegatronError> {
        let mut product = 1usize;
        for name in names {
            let size = self.optional_size(name)?.unwrap_or(1);
            product = product.checked_mul(size).ok_or_else(|| {
                let why = format!("the product of {} is too large", names.join(", "));
                self.refused(name, why)
            })?;
        }
        Ok(product)
    }

    /// A number, if it is set.
    pub(super) fn optional_number(&self, name: &str) -> Result<Option<f64>, MegatronError> {
        self.typed(name, "a number", |value| value.as_f64())
    }

    /// A number.
    pub(super) fn number(&self, name: &str) -> Result<f64, MegatronError> {
        self.required(name, self.optional_number(name)?)
    }

    /// A switch, which is off if it is not set.
    pub(super) fn flag(&self, name: &str) -> Result<bool, MegatronError> {
        let found = self.typed(name, "True or False", |value| value.as_bool())?;
        Ok(found.unwrap_or(false))
    }

    /// A string, if it is set.
    pub(super) fn optional_text(&self, name: &str) -> Result<Option<&'a str>, MegatronError> {
        self.typed(name, "a string", |value| value.as_str())
    }

    /// A string.
    pub(super) fn text(&self, name: &str) -> Result<&'a str, MegatronError> {
        self.required(name, self.optional_text(name)?)
    }

    /// Refuses a switch that is on.
    pub(super) fn off(&self, names: &[&str], why: &str) -> Result<(), MegatronError> {
        let mut names = names.iter();
        names.try_for_each(|name| match self.flag(name)? {
            true => Err(self.refused(name, why)),
            false => Ok(()),
        })
    }

    /// Refuses an argument that is set.
    pub(super) fn unset(&self, names: &[&str], why: &str) -> Result<(), MegatronError> {
        let set = names.iter().find(|name| self.get(name).is_some());
        set.map_or(Ok(()), |name| Err(self.refused(name, why)))
    }

    /// Refuses another number than the given one, if the argument is set.
    pub(super) fn only_number(
        &self,
        name: &str,
        only: f64,
        why: &str,
    ) -> Result<(), MegatronError> {
        match self.optional_number(name)? {
            Some(found) if found != only => Err(self.refused(name, why)),
            _ => Ok(()),
        }
    }

    /// Refuses another string than the given ones, if the argument is set.
    pub(super) fn only_text(
        &self,
        name: &str,
        only: &[&str],
        why: &str,
    ) -> Result<(), MegatronError> {
        match self.optional_text(name)? {
            Some(found) if !only.contains(&found) => Err(self.refused(name, why)),
            _ => Ok(()),
        }
    }
}
