/// The name of this host, for messages; `this host` if the system does not provide it.
pub fn host_name() -> String {
    #[cfg(unix)]
    if let Ok(name) = nix::unistd::gethostname()
        && !name.is_empty()
    {
        return name.to_string_lossy().into_owned();
    }
    "this host".to_string()
}
