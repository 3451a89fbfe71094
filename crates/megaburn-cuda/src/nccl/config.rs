use std::{
    ffi::{c_char, c_int, c_uint},
    mem::size_of,
    ptr,
};

/// `NCCL_CONFIG_UNDEF_INT`: use the library's default or its environment variable.
const UNDEFINED: c_int = c_int::MIN;

/// Version 2.18.1, whose header has exactly the fields below.
const VERSION: c_uint = 2_18_01;

/// NCCL's `ncclConfig_t` in that version. A newer library reads `size` bytes and uses its defaults
/// for fields that `version` does not have.
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
    /// The configuration for calls that return before they are done, so that a missing peer blocks
    /// no thread. A communicator that is split from this one shares its memory and its abort flag.
    pub(super) fn non_blocking() -> Self {
        Self {
            split_share: 1,
            ..Self::of(0)
        }
    }

    /// The configuration for calls that return once they are enqueued on their stream.
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
        // The size in 2.18's C header, including the padding after the last field.
        assert_eq!(size_of::<Config>(), 48);
        let config = Config::non_blocking();
        assert_eq!(
            (config.size, config.version, config.blocking),
            (48, 21801, 0)
        );
        assert_eq!((Config::blocking().blocking, config.split_share), (1, 1));
    }
}
