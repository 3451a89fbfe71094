//! Only examples live here: see the files beside this one.
