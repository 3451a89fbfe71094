//! Turns the failure texts of a device into errors of the run.
//!
//! A GPU fails asynchronously: the outputs of the failed work are marked, work that depends on them
//! is skipped, and the first read reports the failure. The text of that report is long and
//! repetitive.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor},
};

use crate::{error::TrainError, memory};

/// Reads one number from its device.
///
/// # Errors
/// The number was never computed, because the device is out of memory or has failed.
pub fn read(number: Tensor<1>) -> Result<f64, TrainError> {
    read_all(number).map(|numbers| f64::from(numbers[0]))
}

/// Reads several numbers from their device.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_all(numbers: Tensor<1>) -> Result<Vec<f32>, TrainError> {
    let device = numbers.device();
    match numbers.cast(DType::F32).try_into_data() {
        Ok(data) => Ok(data
            .try_to_vec()
            .expect("the numbers were converted to f32")),
        Err(error) => Err(device_error(error.to_string(), &device)),
    }
}

/// The error of a device that cannot be read, from the text of its report.
pub(crate) fn device_error(text: String, device: &Device) -> TrainError {
    diagnose(&text, device).unwrap_or(TrainError::Device { why: text })
}

/// The error that a text (of another error, or of a panic) reports about a device; `None` if it is
/// about something else.
pub(crate) fn diagnose(text: &str, device: &Device) -> Option<TrainError> {
    let memory = || memory::report(device).unwrap_or_else(|| "the free memory is unknown".into());
    if let Some(bytes) = out_of_memory(text) {
        return Some(TrainError::OutOfMemory {
            bytes,
            memory: memory(),
        });
    }
    is_about_device(text).then(|| TrainError::Device { why: root(text) })
}

/// Whether a text reports the failure of a device.
pub(crate) fn is_about_device(text: &str) -> bool {
    const SAID_BY_CUBECL: [&str; 5] = [
        "out of device memory",
        "can't allocate buffer of size",
        "The bytes were never written",
        "The device is poisoned",
        "An error happened during execution",
    ];
    SAID_BY_CUBECL.iter().any(|said| text.contains(said))
}

/// The size of the failed allocation in bytes, if the text reports one.
fn out_of_memory(text: &str) -> Option<u64> {
    const BEFORE_SIZE: [&str; 2] = [
        "out of device memory allocating ",
        "can't allocate buffer of size: ",
    ];
    BEFORE_SIZE.iter().find_map(|before| {
        let (_, rest) = text.split_once(before)?;
        rest.split(|c: char| !c.is_ascii_digit())
            .next()?
            .parse()
            .ok()
    })
}

/// The text after the last "Caused by:", without the stack trace.
fn root(text: &str) -> String {
    let cause = text.rsplit("Caused by:").next().unwrap_or(text);
    let is_trace = |line: &str| {
        let number = line.trim_start().split(':').next().unwrap_or_default();
        line.starts_with("Backtrace")
            || line.starts_with("Asked at")
            || line.starts_with("No backtrace")
            || (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let lines = cause
        .lines()
        .map(str::trim_end)
        .skip_while(|line| line.trim().is_empty());
    let lines = lines.take_while(|line| !is_trace(line)).map(str::trim);
    lines.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::exit::Exit;

    /// Texts as CubeCL prints them, shortened.
    const NO_MEMORY: &str = "An error happened during execution\nCaused by:\n  The bytes were never \
        written (failure #3, still claiming 7 buffer(s))\n  sum skipped\nCaused by:\n  An IO error \
        happened\nCaused by:\n  out of device memory allocating 36507222016 bytes\n   0: core::ops\n\
        Asked at:\n   0: main";
    const TOO_BIG: &str = "An IO error happened\nCaused by:\n  can't allocate buffer of size: 99\n";
    const FOREIGN: &str = "An error happened during execution\nCaused by:\n  The bytes were never \
        written (failure #1, still claiming 1 buffer(s))\nCaused by:\n  An error happened during \
        execution\nCaused by:\n  a product [3, 5] x [5, 4]: on purpose\nBacktrace:\n   0: main\n\
        Asked at:\n   0: main";

    #[rstest]
    #[case(NO_MEMORY, 36507222016)]
    #[case(TOO_BIG, 99)]
    fn an_allocation_that_failed_is_told_with_its_size_and_what_to_change(
        #[case] text: &str,
        #[case] size: u64,
    ) {
        let error = diagnose(text, &Device::flex()).unwrap();
        assert!(matches!(error, TrainError::OutOfMemory { bytes, .. } if bytes == size));
        let device_error = error.to_string();
        assert!(
            device_error.contains("out of GPU memory")
                && device_error.contains("train.micro_batch"),
            "{device_error}"
        );
    }

    #[test]
    fn other_failures_are_told_by_their_root() {
        let error = diagnose(FOREIGN, &Device::flex()).unwrap();
        let device_error = "the GPU failed: a product [3, 5] x [5, 4]: on purpose";
        assert_eq!(error.to_string(), device_error);
        assert_eq!(error.exit(), Exit::Failed);
    }

    #[test]
    fn other_texts_are_left_alone() {
        assert!(diagnose("index 7 out of bounds", &Device::flex()).is_none());
    }

    #[test]
    fn a_number_that_was_computed_is_read() {
        assert_eq!(
            read(Tensor::from_data([1.5f32], &Device::flex())).unwrap(),
            1.5
        );
    }
}
