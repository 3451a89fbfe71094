use crate::{answer::Head, failure::Failure};

/// A tag that changes with the contents of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Its size.
    pub num_bytes: u64,
    /// A text that the server changes with the contents.
    pub e_tag: Option<String>,
    /// When it was written, as the server says it.
    pub modified: Option<String>,
}

impl Version {
    pub(crate) fn of(head: &Head, num_bytes: u64) -> Self {
        Self {
            num_bytes,
            e_tag: head.header("etag"),
            modified: head.header("last-modified"),
        }
    }

    /// Checks that an answer is of this version.
    pub(crate) fn check(&self, head: &Head) -> Result<(), Failure> {
        let changed = |what: &str, before: &str, now: &str| {
            let why = format!("its {what} was {before} when it was opened, and is {now}");
            Err(Failure::Changed(why))
        };
        let (before, now) = (self, Self::of(head, self.num_bytes));
        if let (Some(before), Some(now)) = (&before.e_tag, &now.e_tag) {
            if before != now {
                return changed("ETag", before, now);
            }
        } else if let (Some(before), Some(now)) = (&before.modified, &now.modified)
            && before != now
        {
            return changed("time", before, now);
        }
        match head.content_range() {
            Some((_, size)) if size != self.num_bytes => {
                changed("size", &self.num_bytes.to_string(), &size.to_string())
            }
            _ => Ok(()),
        }
    }
}
