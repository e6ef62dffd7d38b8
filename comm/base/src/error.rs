//! A failed call: NCCL's result code and the text that `ncclGetLastError` gives.
//!
//! Layers with errors of their own convert them into [`Error`] where those are defined.

/// `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ResultCode {
    /// The call did what it says.
    Success = 0,
    /// The device refused a call.
    UnhandledCudaError = 1,
    /// The system refused a call.
    SystemError = 2,
    /// A defect of the library.
    InternalError = 3,
    /// An argument has an impossible value.
    InvalidArgument = 4,
    /// The call is not allowed now or in this way.
    InvalidUsage = 5,
    /// A peer is gone or failed.
    RemoteError = 6,
    /// Not finished yet.
    InProgress = 7,
    /// Not finished in time. NCCL 2.30 has it; nothing here gives it.
    Timeout = 8,
}

impl ResultCode {
    /// Every code, in numeric order.
    pub const ALL: [Self; 9] = [
        Self::Success,
        Self::UnhandledCudaError,
        Self::SystemError,
        Self::InternalError,
        Self::InvalidArgument,
        Self::InvalidUsage,
        Self::RemoteError,
        Self::InProgress,
        Self::Timeout,
    ];

    /// What `ncclGetErrorString` says.
    #[must_use]
    pub const fn text(self) -> &'static std::ffi::CStr {
        match self {
            Self::Success => c"no error",
            Self::UnhandledCudaError => c"unhandled device error (ncclGetLastError says more)",
            Self::SystemError => c"unhandled system error (ncclGetLastError says more)",
            Self::InternalError => c"internal error, a defect of the library (ncclGetLastError says more)",
            Self::InvalidArgument => c"invalid argument (ncclGetLastError says which)",
            Self::InvalidUsage => c"invalid usage (ncclGetLastError says why)",
            Self::RemoteError => c"remote process exited or there was a network error",
            Self::InProgress => c"operation in progress",
            Self::Timeout => c"timeout",
        }
    }
}

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Error {
    /// What the caller is told by number.
    pub code: ResultCode,
    /// Which argument, and why.
    pub text: String,
}

/// Result of most calls of the library.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with a code.
    #[must_use]
    pub fn new(code: ResultCode, text: impl Into<String>) -> Self {
        Self {
            code,
            text: text.into(),
        }
    }

    /// [`ResultCode::InvalidArgument`].
    #[must_use]
    pub fn argument(text: impl Into<String>) -> Self {
        Self::new(ResultCode::InvalidArgument, text)
    }

    /// [`ResultCode::InvalidUsage`].
    #[must_use]
    pub fn usage(text: impl Into<String>) -> Self {
        Self::new(ResultCode::InvalidUsage, text)
    }

    /// [`ResultCode::InternalError`].
    #[must_use]
    pub fn internal(text: impl Into<String>) -> Self {
        Self::new(ResultCode::InternalError, text)
    }

    /// [`ResultCode::InProgress`], which is no failure.
    #[must_use]
    pub fn in_progress() -> Self {
        Self::new(ResultCode::InProgress, "in progress")
    }

    /// The same error with `context` before its text.
    #[must_use]
    pub fn within(mut self, context: &str) -> Self {
        self.text = format!("{context}: {}", self.text);
        self
    }
}
