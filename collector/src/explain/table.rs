//! The library's table, asked through its interface by a process that holds nothing ([`super::sandbox`]).

use std::{
    ffi::{CStr, CString, c_char, c_int},
    path::Path,
};

use ringsight_records::{
    ReduceOp,
    explain::{Explain, ExplainRow},
};
use serde::{Deserialize, Serialize};

use super::{Operation, Terms};

/// More than any table has rows.
pub(super) const MOST_ROWS: usize = 256;

/// What a library is asked: an operation, and what the choice depends on of its communicator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    function: String,
    /// Elements, as the function takes them.
    count: u64,
    /// `ncclDataType_t`.
    data_type: c_int,
    /// `ncclRedOp_t`.
    op: c_int,
    ranks: c_int,
    channels: c_int,
    slot_bytes: u32,
    one_shot: bool,
    peers: bool,
    zero_cta: bool,
    in_window: Option<bool>,
}

impl Question {
    /// `in_window`: the receive buffer, of a reduce_scatter the send buffer, is in a window that all ranks reach, if that is known.
    ///
    /// # Errors
    /// A number that is too large for the library's interface.
    pub fn new(operation: &Operation, terms: &Terms, in_window: Option<bool>) -> Result<Self, String> {
        let number = |what: &str, value: u32| {
            c_int::try_from(value).map_err(|_| format!("{value} {what} are too many"))
        };
        Ok(Self {
            function: operation.function.name().to_owned(),
            count: operation.count(),
            data_type: operation.data_type.code().into(),
            op: match operation.reduce_op {
                ReduceOp::None => ReduceOp::Sum.code().into(),
                op => op.code().into(),
            },
            ranks: number("ranks", operation.ranks)?,
            channels: number("channels", terms.channels)?,
            slot_bytes: terms.slot_bytes,
            one_shot: terms.one_shot,
            peers: terms.peers,
            zero_cta: terms.zero_cta,
            in_window,
        })
    }
}

/// A row of the library's table, as it tells of it. Its texts may be of a library that nobody trusts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Algorithm's name.
    pub algorithm: String,
    /// Protocol's name.
    pub protocol: String,
    /// Channels, if it is the one that is taken.
    pub chosen: Option<u32>,
    /// Why it is not taken.
    pub reason: String,
}

/// The rows of the table in the order in which they are tried, or what the library refuses.
pub(super) type Answer = Result<Vec<Row>, String>;

type ExplainFunction = unsafe extern "C" fn(*const Explain, *mut ExplainRow, *mut c_int) -> c_int;
type LastError = unsafe extern "C" fn(*const std::ffi::c_void) -> *const c_char;

/// A library that tells of its table.
pub(super) struct Table {
    library: libloading::Library,
}

impl Table {
    /// Loads a library.
    ///
    /// # Errors
    /// It cannot be loaded, or is another than ringsight's.
    ///
    /// # Safety
    /// Loading a library runs what its maker put into it: this process has nothing to lose.
    pub(super) unsafe fn load(file: &Path) -> Result<Self, String> {
        // SAFETY: the caller's promise.
        let library = unsafe { libloading::Library::new(file) }.map_err(|error| error.to_string())?;
        // SAFETY: only whether it is there.
        unsafe { library.get::<ExplainFunction>(b"ringsightExplain\0") }.map_err(|_| {
            "it tells of no table: it is no libnccl.so.2 of ringsight, or an older one".to_owned()
        })?;
        Ok(Self { library })
    }

    /// Asks.
    ///
    /// # Errors
    /// What the library refuses.
    pub(super) fn ask(&self, question: &Question) -> Answer {
        let name = CString::new(&*question.function).map_err(|error| error.to_string())?;
        let asked = Explain {
            size: size_of::<Explain>(),
            function: name.as_ptr(),
            count: usize::try_from(question.count).map_err(|error| error.to_string())?,
            data_type: question.data_type,
            op: question.op,
            ranks: question.ranks,
            channels: question.channels,
            slot_bytes: question.slot_bytes as usize,
            one_shot: question.one_shot.into(),
            peers: question.peers.into(),
            zero_cta: question.zero_cta.into(),
            window: question.in_window.map_or(-1, c_int::from),
        };
        let empty = ExplainRow {
            algorithm: [0; 16],
            protocol: [0; 16],
            chosen: 0,
            channels: 0,
            reason: [0; 128],
        };
        let mut rows = vec![empty; MOST_ROWS];
        let mut count = MOST_ROWS as c_int;
        // SAFETY: the function of ringsight.h, which has checked that the struct is of its size; room for as many rows as is
        // said; the texts live until it returns, and its own until the next call of this thread.
        unsafe {
            let explain = self
                .library
                .get::<ExplainFunction>(b"ringsightExplain\0")
                .map_err(|error| error.to_string())?;
            if explain(&raw const asked, rows.as_mut_ptr(), &raw mut count) != 0 {
                let reason = self.library.get::<LastError>(b"ncclGetLastError\0");
                let reason = reason.map_err(|error| error.to_string())?(std::ptr::null());
                if reason.is_null() {
                    return Err("the library refuses to explain it".to_owned());
                }
                return Err(CStr::from_ptr(reason).to_string_lossy().into_owned());
            }
        }
        let text = |bytes: &[u8]| ringsight_records::pages::text(bytes).to_owned();
        rows.truncate(usize::try_from(count).unwrap_or(0).min(MOST_ROWS));
        Ok(rows
            .iter()
            .map(|row| Row {
                algorithm: text(&row.algorithm),
                protocol: text(&row.protocol),
                chosen: (row.chosen != 0).then(|| u32::try_from(row.channels).unwrap_or(0)),
                reason: text(&row.reason),
            })
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_without_a_table_is_told() {
        // SAFETY: the C library, which is loaded already.
        let error = unsafe { Table::load(Path::new("libc.so.6")) }.err().unwrap();
        assert!(error.contains("tells of no table"), "{error}");
    }
}
