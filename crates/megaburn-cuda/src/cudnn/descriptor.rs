use std::{ffi::c_void, ptr};

use super::{
    api::{Api, Status},
    names::{Attribute, Kind, Raw, Value},
};
use crate::error::CudaError;

/// A cuDNN descriptor. Its attributes are set, then it is finalized, then other descriptors refer
/// to it.
#[derive(Debug)]
pub(super) struct Descriptor {
    api: &'static Api,
    kind: Kind,
    raw: Raw,
}

impl Descriptor {
    pub(super) fn new(api: &'static Api, kind: Kind) -> Result<Self, CudaError> {
        let mut raw = Raw(ptr::null_mut());
        // SAFETY: the library writes the new descriptor through the pointer.
        let status = unsafe { (api.create_descriptor)(kind as i32, &mut raw) };
        api.check("cudnnBackendCreateDescriptor", status)?;
        Ok(Self { api, kind, raw })
    }

    pub(super) fn raw(&self) -> Raw {
        self.raw
    }

    /// Sets an attribute to the given values.
    pub(super) fn with<T: Value>(
        self,
        attribute: Attribute,
        values: &[T],
    ) -> Result<Self, CudaError> {
        let count = values.len() as i64;
        // SAFETY: there are `count` values of the type that `T::TYPE` names.
        let status = unsafe {
            (self.api.set_attribute)(
                self.raw,
                attribute as i32,
                T::TYPE,
                count,
                values.as_ptr().cast(),
            )
        };
        self.check("cudnnBackendSetAttribute", Some(attribute), status)?;
        Ok(self)
    }

    /// Finalizes the descriptor: from now on it is immutable and others may refer to it.
    pub(super) fn finished(self) -> Result<Self, CudaError> {
        // SAFETY: the descriptor is live.
        let status = unsafe { (self.api.finalize)(self.raw) };
        self.check("cudnnBackendFinalize", None, status)?;
        Ok(self)
    }

    /// Reads a number from a finalized descriptor.
    pub(super) fn number(&self, attribute: Attribute) -> Result<i64, CudaError> {
        let mut value = 0i64;
        // SAFETY: the value has space for one number.
        unsafe { self.read::<i64>(attribute, 1, ptr::from_mut(&mut value).cast())? };
        Ok(value)
    }

    /// Reads the descriptors that a finalized one refers to, as new descriptors of type `kind`.
    pub(super) fn parts(&self, attribute: Attribute, kind: Kind) -> Result<Vec<Self>, CudaError> {
        // SAFETY: the requested count is 0, so nothing is written.
        let count = unsafe { self.read::<Raw>(attribute, 0, ptr::null_mut())? };
        let parts = (0..count).map(|_| Self::new(self.api, kind));
        let mut parts = parts.collect::<Result<Vec<_>, _>>()?;
        let mut raw: Vec<_> = parts.iter().map(Self::raw).collect();
        // The library fills the descriptors that it is given.
        // SAFETY: `raw` has space for `count` descriptors.
        let count = unsafe { self.read::<Raw>(attribute, count, raw.as_mut_ptr().cast())? };
        parts.truncate(usize::try_from(count).unwrap_or(0));
        Ok(parts)
    }

    /// Reads up to `room` values into memory and returns how many there are.
    ///
    /// # Safety
    /// `into` must have space for `room` values of the type.
    unsafe fn read<T: Value>(
        &self,
        attribute: Attribute,
        room: i64,
        into: *mut c_void,
    ) -> Result<i64, CudaError> {
        let mut count = 0;
        // SAFETY: the caller guarantees the space at `into`.
        let status = unsafe {
            (self.api.get_attribute)(self.raw, attribute as i32, T::TYPE, room, &mut count, into)
        };
        self.check("cudnnBackendGetAttribute", Some(attribute), status)?;
        Ok(count)
    }

    fn check(
        &self,
        call: &'static str,
        attribute: Option<Attribute>,
        status: Status,
    ) -> Result<(), CudaError> {
        self.api.check(call, status).map_err(|error| match error {
            CudaError::Call { call, why } => {
                let of = attribute.map_or(String::new(), |attribute| format!("{attribute:?} of "));
                CudaError::Call {
                    call,
                    why: format!("{of}{:?}: {why}", self.kind),
                }
            }
            other => other,
        })
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: this value owns the descriptor; the library counts references to it.
        let _ = unsafe { (self.api.destroy_descriptor)(self.raw) };
    }
}
