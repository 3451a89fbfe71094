//! Creates the communicators of all members, with a deadline.

use std::{
    env,
    ffi::{c_char, c_int},
    ptr, thread,
    time::Duration,
};

use cudarc::nccl::sys::{ncclComm_t, ncclUniqueId};

use super::{
    api::{Api, Code},
    config::Config,
    membership::{Membership, UniqueId},
};
use crate::error::CudaError;

/// A communicator of NCCL.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle(pub(super) ncclComm_t);

// SAFETY: NCCL does not tie communicators to threads; `Handles` in `handles.rs` synchronizes their
// use.
unsafe impl Send for Handle {}

/// Refuses environment variables that would override [`Config`]'s settings, which calls and aborts
/// rely on.
pub(super) fn refuse_overrides() -> Result<(), CudaError> {
    overridden(|name| env::var(name).ok())
}

fn overridden(read: impl Fn(&str) -> Option<String>) -> Result<(), CudaError> {
    for name in ["NCCL_COMM_BLOCKING", "NCCL_COMM_SPLIT_SHARE_RESOURCES"] {
        if let Some(value) = read(name) {
            return Err(CudaError::Refused(format!(
                "{name} is {value:?}: megaburn sets it per communicator, and the variable would \
                override all of them; unset it"
            )));
        }
    }
    Ok(())
}

/// Starts joining. NCCL returns the communicator immediately.
pub(super) fn init(api: &Api, id: UniqueId, members: Membership) -> Result<Handle, CudaError> {
    let id = ncclUniqueId {
        internal: id.0.map(|byte| byte as c_char),
    };
    let size = number(members.size)?;
    let rank = number(members.rank)?;
    let mut comm: ncclComm_t = ptr::null_mut();
    let mut config = Config::non_blocking();
    // SAFETY: NCCL writes the handle through the first pointer and reads `size` bytes of the
    // config; both outlive the call.
    let code = unsafe { (api.comm_init_rank_config)(&mut comm, size, id, rank, &mut config) };
    if code.is_fine() && !comm.is_null() {
        Ok(Handle(comm))
    } else {
        Err(api.error("ncclCommInitRankConfig", code, None))
    }
}

/// Splits a blocking communicator of all members from `parent`.
pub(super) fn split(
    api: &Api,
    parent: Handle,
    members: Membership,
    end: &impl Fn() -> Option<String>,
) -> Result<Handle, CudaError> {
    let rank = number(members.rank)?;
    // NCCL's thread writes the handle and reads the config once all members are there. That may be
    // after this rank has given up; in that case the allocation is leaked.
    let place = Box::into_raw(Box::new((
        ptr::null_mut() as ncclComm_t,
        Config::blocking(),
    )));
    // SAFETY: both parts of the allocation live until NCCL is done with them.
    let code =
        unsafe { (api.comm_split)(parent.0, 0, rank, &raw mut (*place).0, &raw mut (*place).1) };
    if !code.is_fine() {
        return Err(api.error("ncclCommSplit", code, Some(parent.0)));
    }
    settle(api, parent, "ncclCommSplit", end)?;
    // SAFETY: the pointer came from a box, and NCCL is done with it.
    let (comm, _) = *unsafe { Box::from_raw(place) };
    if comm.is_null() {
        Err(CudaError::Refused(
            "ncclCommSplit returned no communicator".into(),
        ))
    } else {
        Ok(Handle(comm))
    }
}

/// Waits until the operation in progress is done.
pub(super) fn settle(
    api: &Api,
    comm: Handle,
    name: &'static str,
    end: &impl Fn() -> Option<String>,
) -> Result<(), CudaError> {
    loop {
        match async_error(api, comm) {
            Code::SUCCESS => return Ok(()),
            Code::IN_PROGRESS => {}
            code => return Err(api.error(name, code, Some(comm.0))),
        }
        if let Some(why) = end() {
            return Err(CudaError::Refused(why));
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// The result of the operation in progress, or `IN_PROGRESS`.
pub(super) fn async_error(api: &Api, comm: Handle) -> Code {
    let mut state = Code::SUCCESS;
    // SAFETY: the caller guarantees that the communicator is live; NCCL writes the state through
    // the pointer.
    let code = unsafe { (api.comm_get_async_error)(comm.0, &mut state) };
    if code == Code::SUCCESS { state } else { code }
}

fn number(number: usize) -> Result<c_int, CudaError> {
    c_int::try_from(number).map_err(|_| {
        CudaError::Refused(format!(
            "{number} does not fit in a C \
        int"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_nccl_takes_for_every_communicator_are_refused() {
        assert_eq!(overridden(|_| None), Ok(()));
        for name in ["NCCL_COMM_BLOCKING", "NCCL_COMM_SPLIT_SHARE_RESOURCES"] {
            let found = overridden(|asked| (asked == name).then(|| "0".into()));
            let error = found.unwrap_err().to_string();
            assert!(
                error.contains(&format!("{name} is \"0\"")) && error.contains("unset"),
                "{error}"
            );
        }
    }
}
