//! Integration tests; see the files beside this one.
