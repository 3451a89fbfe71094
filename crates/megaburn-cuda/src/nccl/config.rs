use std::{
    ffi::{c_char, c_int, c_uint},
    mem::size_of,
    ptr,
};

/// `NCCL_CONFIG_UNDEF_INT`: the library's default, or what an environment variable says.
const UNDEFINED: c_int = c_int::MIN;

/// 2.18.1, whose header has the fields below and no more.
const VERSION: c_uint = 2_18_01;

/// NCCL's `ncclConfig_t` as of that version. A newer library reads as many bytes as `size` says and takes
/// its own defaults for the fields that `version` did not have.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Calls that return before they are done, so that a peer that never comes holds up nobody. A
    /// communicator that is split from it shares its memory, and the flag by which it is aborted.
    pub(super) fn non_blocking() -> Self {
        Self {
            split_share: 1,
            ..Self::of(0)
        }
    }

    /// Calls that return when they are on their stream.
    pub(super) fn blocking() -> Self {
        Self::of(1)
    }

    fn of(blocking: c_int) -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: VERSION,
            blocking,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use cudarc::nccl::sys::ncclConfig_t;

    use super::*;

    #[test]
    fn the_fields_lie_where_the_library_looks_for_them() {
        macro_rules! same_place {
            ($($ours:ident = $theirs:ident),*) => {
                $(assert_eq!(offset_of!(Config, $ours), offset_of!(ncclConfig_t, $theirs));)*
            };
        }
        same_place!(
            size = size,
            magic = magic,
            version = version,
            blocking = blocking,
            cga_cluster_size = cgaClusterSize,
            min_ctas = minCTAs,
            max_ctas = maxCTAs,
            net_name = netName,
            split_share = splitShare
        );
        // As a C compiler of 2.18's header has it: the last field and its padding.
        assert_eq!(size_of::<Config>(), 48);
        let config = Config::non_blocking();
        assert_eq!(
            (config.size, config.version, config.blocking),
            (48, 21801, 0)
        );
        assert_eq!((Config::blocking().blocking, config.split_share), (1, 1));
    }
}
