//! Where Python wheels put NVIDIA's libraries: each in a folder `nvidia/NAME/lib` of its environment.

use std::{
    env,
    path::{Path, PathBuf},
};

/// The folders `lib` of the wheels of these names, beside other wheels of NVIDIA that the variables
/// `LD_LIBRARY_PATH` and `CUDA_PATH` name.
pub(crate) fn folders(names: &[&str]) -> Vec<PathBuf> {
    beside(env::var("LD_LIBRARY_PATH").ok(), env::var("CUDA_PATH").ok(), names)
}

fn beside(library_path: Option<String>, cuda_path: Option<String>, names: &[&str]) -> Vec<PathBuf> {
    let libraries = library_path.iter().flat_map(|path| env::split_paths(path));
    let wheels = libraries.filter_map(|folder| Some(folder.parent()?.parent()?.to_path_buf()));
    let toolkit =
        cuda_path.iter().filter_map(|path| Path::new(path).parent().map(Path::to_path_buf));
    let mut roots: Vec<_> = wheels
        .chain(toolkit)
        .filter(|folder| folder.file_name().is_some_and(|name| name == "nvidia"))
        .collect();
    roots.dedup();
    let of_root = |root: PathBuf| names.iter().map(move |name| root.join(name).join("lib"));
    roots.into_iter().flat_map(of_root).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_are_looked_for_beside_other_wheels() {
        let path = "/opt/lib:/venv/nvidia/cublas/lib:/venv/nvidia/cuda_nvrtc/lib";
        let cuda = Some("/other/nvidia/cu13".to_string());
        let folders = beside(Some(path.into()), cuda, &["nccl"]);
        let expected = ["/venv/nvidia/nccl/lib", "/other/nvidia/nccl/lib"].map(PathBuf::from);
        assert_eq!(folders, expected);
        assert!(beside(None, Some("/usr/local/cuda".into()), &["nccl"]).is_empty());
    }
}
