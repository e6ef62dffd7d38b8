//! Entry points that tell a program what the library's parameters are: the variables of NCCL that it reads.
//!
//! A value is what the environment or a configuration file sets, else the default; it is read at each call. A handle is
//! the address of the parameter's row in [`PARAMETERS`]. Types of values are NCCL's where a variable is a number
//! (`int64_t`) or a text; a typed call for another type is refused, as in NCCL.

#![expect(non_snake_case, reason = "NCCL's names")]

use std::{
    cell::RefCell,
    ffi::{CStr, CString, c_char, c_int, c_void},
    io::Write as _,
};

use ringsight_comm_base::{
    env,
    error::{Error, Result, ResultCode},
};

use super::{arguments::out, call, entry};

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A number, read as NCCL reads it; its default.
    Number(i64),
    /// A text; its default.
    Text(&'static str),
}
use Kind::{Number, Text};

/// A variable that the library reads.
#[derive(Debug)]
struct Parameter {
    name: &'static str,
    kind: Kind,
}

/// `NCCL_CONFIG_UNDEF_INT`: the config says.
const OF_CONFIG: Kind = Number(super::types::CONFIG_UNDEF_INT as i64);

/// The variables of docs/src/environment.md that have NCCL's names and an effect, in alphabetical order.
static PARAMETERS: &[Parameter] = &parameters([
    ("NCCL_BUFFSIZE", Number(1 << 20)),
    ("NCCL_CGA_CLUSTER_SIZE", OF_CONFIG),
    ("NCCL_CHECK_POINTERS", Number(0)),
    ("NCCL_COLLNET_ENABLE", OF_CONFIG),
    ("NCCL_COMM_BLOCKING", OF_CONFIG),
    ("NCCL_COMM_ID", Text("")),
    ("NCCL_COMM_SHRINK_SHARE_RESOURCES", OF_CONFIG),
    ("NCCL_COMM_SPLIT_SHARE_RESOURCES", OF_CONFIG),
    ("NCCL_CONF_FILE", Text("")),
    ("NCCL_CROSS_NIC", Number(2)),
    ("NCCL_CTA_POLICY", OF_CONFIG),
    ("NCCL_DEBUG", Text("")),
    ("NCCL_DEBUG_FILE", Text("")),
    ("NCCL_DEBUG_SUBSYS", Text("INIT,BOOTSTRAP,ENV")),
    ("NCCL_DEBUG_TIMESTAMP_FORMAT", Text("[%F %T] ")),
    ("NCCL_DEBUG_TIMESTAMP_LEVELS", Text("WARN")),
    ("NCCL_DMABUF_ENABLE", Number(1)),
    ("NCCL_GRAPH_REGISTER", Number(1)),
    ("NCCL_HOSTID", Text("")),
    ("NCCL_IB_ADDR_FAMILY", Text("AF_INET")),
    ("NCCL_IB_ADDR_RANGE", Text("")),
    ("NCCL_IB_DISABLE", Number(0)),
    ("NCCL_IB_GID_INDEX", Number(-1)),
    ("NCCL_IB_HCA", Text("")),
    ("NCCL_IB_PCI_RELAXED_ORDERING", Number(2)),
    ("NCCL_IB_PKEY", Number(0)),
    ("NCCL_IB_QPS_PER_CONNECTION", Number(1)),
    ("NCCL_IB_RETRY_CNT", Number(7)),
    ("NCCL_IB_RETURN_ASYNC_EVENTS", Number(1)),
    ("NCCL_IB_ROCE_VERSION_NUM", Number(2)),
    ("NCCL_IB_SL", Number(0)),
    ("NCCL_IB_SPLIT_DATA_ON_QPS", Number(0)),
    ("NCCL_IB_TC", Number(0)),
    ("NCCL_IB_TIMEOUT", Number(20)),
    ("NCCL_IGNORE_CPU_AFFINITY", Number(0)),
    ("NCCL_KERNEL_TIMEOUT_MS", Number(2000)),
    ("NCCL_LOCAL_REGISTER", Number(1)),
    ("NCCL_MAX_CTAS", OF_CONFIG),
    ("NCCL_MIN_CTAS", OF_CONFIG),
    ("NCCL_NCHANNELS_PER_NET_PEER", OF_CONFIG),
    ("NCCL_NET", Text("")),
    ("NCCL_NET_GDR_LEVEL", Text("PXB")),
    ("NCCL_NET_GDR_READ", Number(1)),
    ("NCCL_NVLINK_UTIL_CENTRIC_SCHED_ENABLE", OF_CONFIG),
    ("NCCL_NVLS_NCHANNELS", OF_CONFIG),
    ("NCCL_P2P_DIRECT_DISABLE", Number(0)),
    ("NCCL_P2P_DISABLE", Number(0)),
    ("NCCL_PROXY_CPUSET", Text("")),
    ("NCCL_SOCKET_FAMILY", Text("")),
    ("NCCL_SOCKET_IFNAME", Text("")),
]);

const fn parameters<const N: usize>(rows: [(&'static str, Kind); N]) -> [Parameter; N] {
    let mut parameters = [const {
        Parameter {
            name: "",
            kind: Text(""),
        }
    }; N];
    let mut at = 0;
    while at < N {
        parameters[at] = Parameter {
            name: rows[at].0,
            kind: rows[at].1,
        };
        at += 1;
    }
    parameters
}

impl Parameter {
    fn number(&self) -> Option<i64> {
        let Number(default) = self.kind else { return None };
        // What is no number is an error where the variable counts. Here it is as if it were not set.
        Some(
            env::text(self.name)
                .and_then(|text| env::parse(self.name, &text))
                .unwrap_or(default),
        )
    }

    fn text(&self) -> String {
        match (self.number(), self.kind) {
            (Some(number), _) => number.to_string(),
            (None, Text(default)) => env::text(self.name).unwrap_or_else(|| default.to_owned()),
            (None, Number(_)) => String::new(),
        }
    }

    fn type_name(&self) -> &'static str {
        match self.kind {
            Number(_) => "int64_t",
            Text(_) => "a text",
        }
    }
}

/// The parameter of a key.
///
/// # Safety
/// `key` is null or a C string.
unsafe fn find(key: *const c_char) -> Result<&'static Parameter> {
    if key.is_null() {
        return Err(Error::argument("key is NULL"));
    }
    // SAFETY: a C string, says the caller.
    let name = unsafe { CStr::from_ptr(key) }.to_string_lossy();
    PARAMETERS
        .iter()
        .find(|parameter| parameter.name == name)
        .ok_or_else(|| Error::argument(format!("key ({name:?}) is no parameter of this library")))
}

/// `ncclParamHandle_t`: the address of a row of `PARAMETERS`.
pub type ParameterHandle = *const c_void;

/// The parameter of a handle.
fn bound(handle: ParameterHandle) -> Result<&'static Parameter> {
    PARAMETERS
        .iter()
        .find(|parameter| std::ptr::eq(std::ptr::from_ref(*parameter).cast(), handle))
        .ok_or_else(|| Error::argument(format!("h ({handle:p}) is not a handle of ncclParamBind")))
}

/// Texts and tables that a thread was given; each stays until the thread's next call of the function that gave it.
#[derive(Default)]
struct Given {
    text: CString,
    parameter: CString,
    keys: Vec<CString>,
    table: Vec<*const c_char>,
}

thread_local! {
    static GIVEN: RefCell<Given> = RefCell::default();
}

/// Keeps what `give` puts there for the calling thread.
fn give<T>(give: impl FnOnce(&mut Given) -> T) -> Result<T> {
    GIVEN
        .try_with(|given| give(&mut given.borrow_mut()))
        .map_err(|_| Error::usage("the thread is ending, and can keep no text"))
}

/// `text` as a C string; it comes from a C string or has no zero byte.
fn c_string(text: String) -> CString {
    CString::new(text).unwrap_or_default()
}

entry! {
    /// A handle for the parameter `key`, which is never freed.
    ncclParamBind, pncclParamBind(place: *mut ParameterHandle, key: *const c_char) {
        // SAFETY: null or valid, says the entry point's contract.
        let place = unsafe { out("out", place) }?;
        // SAFETY: as above.
        *place = std::ptr::from_ref(unsafe { find(key) }?).cast();
        Ok(())
    }
}

macro_rules! typed {
    ($($name:ident, $twin:ident, $type:ty;)+) => {$(
        entry! {
            /// The value of a parameter of this type. All numbers of this library are `int64_t`.
            $name, $twin(h: ParameterHandle, place: *mut $type) {
                let parameter = bound(h)?;
                // SAFETY: null or valid, says the entry point's contract.
                let _place = unsafe { out("out", place) }?;
                Err(Error::argument(format!("{} is {}", parameter.name, parameter.type_name())))
            }
        }
    )+};
}

typed! {
    ncclParamGetI8, pncclParamGetI8, i8;
    ncclParamGetI16, pncclParamGetI16, i16;
    ncclParamGetI32, pncclParamGetI32, i32;
    ncclParamGetU8, pncclParamGetU8, u8;
    ncclParamGetU16, pncclParamGetU16, u16;
    ncclParamGetU32, pncclParamGetU32, u32;
    ncclParamGetU64, pncclParamGetU64, u64;
}

entry! {
    /// The value of a parameter that is a number.
    ncclParamGetI64, pncclParamGetI64(h: ParameterHandle, place: *mut i64) {
        let parameter = bound(h)?;
        // SAFETY: null or valid, says the entry point's contract.
        let place = unsafe { out("out", place) }?;
        *place = parameter.number().ok_or_else(|| Error::argument(format!("{} is a text", parameter.name)))?;
        Ok(())
    }
}

entry! {
    /// The value of a parameter that is a text. The text stays until the thread's next call.
    ncclParamGetStr, pncclParamGetStr(h: ParameterHandle, place: *mut *const c_char) {
        let parameter = bound(h)?;
        // SAFETY: null or valid, says the entry point's contract.
        let place = unsafe { out("out", place) }?;
        if parameter.number().is_some() {
            return Err(Error::argument(format!("{} is int64_t", parameter.name)));
        }
        *place = give(|given| {
            given.text = c_string(parameter.text());
            given.text.as_ptr()
        })?;
        Ok(())
    }
}

entry! {
    /// The value of a parameter as bytes: 8 of a number, those of a text with its end.
    ncclParamGet, pncclParamGet(h: ParameterHandle, place: *mut c_void, maxLen: c_int, len: *mut c_int) {
        let parameter = bound(h)?;
        if place.is_null() {
            return Err(Error::argument("out is NULL"));
        }
        // SAFETY: null or valid, says the entry point's contract.
        let len = unsafe { out("len", len) }?;
        let bytes = match parameter.number() {
            Some(number) => number.to_ne_bytes().to_vec(),
            None => c_string(parameter.text()).into_bytes_with_nul(),
        };
        *len = 0;
        if usize::try_from(maxLen).is_ok_and(|most| bytes.len() <= most) {
            // SAFETY: `maxLen` bytes, says the entry point's contract, and these are no more.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place.cast(), bytes.len()) };
            *len = bytes.len() as c_int;
            return Ok(());
        }
        Err(Error::argument(format!("maxLen ({maxLen}) is less than the {} bytes of {}", bytes.len(), parameter.name)))
    }
}

entry! {
    /// The value of the parameter `key` as a text, which stays until the thread's next call.
    ncclParamGetParameter, pncclParamGetParameter(key: *const c_char, value: *mut *const c_char, valueLen: *mut c_int) {
        // SAFETY: null or valid, says the entry point's contract.
        let (value, length) = unsafe { (out("value", value)?, out("valueLen", valueLen)?) };
        (*value, *length) = (std::ptr::null(), 0);
        // SAFETY: as above.
        let parameter = unsafe { find(key) }?;
        (*value, *length) = give(|given| {
            given.parameter = c_string(parameter.text());
            (given.parameter.as_ptr(), given.parameter.count_bytes() as c_int)
        })?;
        Ok(())
    }
}

entry! {
    /// The keys of all parameters. The table stays until the thread's next call.
    ncclParamGetAllParameterKeys, pncclParamGetAllParameterKeys(table: *mut *const *const c_char, tableLen: *mut c_int) {
        // SAFETY: null or valid, says the entry point's contract.
        let (table, length) = unsafe { (out("table", table)?, out("tableLen", tableLen)?) };
        (*table, *length) = give(|given| {
            given.keys = PARAMETERS.iter().map(|parameter| c_string(parameter.name.to_owned())).collect();
            given.table = given.keys.iter().map(|key| key.as_ptr()).collect();
            (given.table.as_ptr(), given.table.len() as c_int)
        })?;
        Ok(())
    }
}

/// Writes all parameters to standard output, as NCCL does.
fn dump() {
    call("ncclParamDumpAll", || {
        let mut text = String::from("=== ncclParam Registry Dump ===\n");
        for parameter in PARAMETERS {
            text += &format!(
                "{}={} ({})\n",
                parameter.name,
                parameter.text(),
                parameter.type_name()
            );
        }
        // Nobody may read it.
        let _ = std::io::stdout().write_all(text.as_bytes());
        Ok(())
    });
}

/// Writes all parameters to standard output.
#[unsafe(no_mangle)]
pub extern "C" fn ncclParamDumpAll() {
    dump();
}

/// [`ncclParamDumpAll`] under its profiling name.
#[unsafe(no_mangle)]
pub extern "C" fn pncclParamDumpAll() {
    dump();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_those_of_the_documented_table() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/environment.md");
        let page = std::fs::read_to_string(page).unwrap();
        assert!(PARAMETERS.is_sorted_by_key(|parameter| parameter.name));
        let documented = page
            .lines()
            .filter(|line| line.starts_with("| `NCCL_"))
            .filter(|line| {
                !line.split('|').nth(2).unwrap_or_default().trim().starts_with('–')
                    || line.contains("COMM_ID")
                    || line.contains("CONF_FILE")
            });
        let names: std::collections::BTreeSet<&str> = documented
            .flat_map(|line| line.split('|').nth(1).unwrap_or_default().split('`'))
            .filter(|name| name.starts_with("NCCL_"))
            .collect();
        let rows: std::collections::BTreeSet<&str> =
            PARAMETERS.iter().map(|parameter| parameter.name).collect();
        assert_eq!(rows, names);
    }
}
