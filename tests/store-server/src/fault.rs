/// What a server does wrong in one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It answers with this status, and does nothing.
    Status(u16),
    /// It sends half of the body and then nothing, with the connection open.
    Stall,
    /// It reads the request and answers nothing.
    Silence,
    /// It closes the connection in the middle of the body.
    Reset,
    /// It sends half of the body as if that were all.
    Short,
    /// It sends more than was asked for.
    Long,
    /// It sends the whole object.
    NoRange,
    /// It does what it is asked for, and closes the connection without an answer.
    Lost,
    /// It does nothing, and answers that all is well with an error inside, as S3 may do when an
    /// upload is completed.
    Inside,
}
