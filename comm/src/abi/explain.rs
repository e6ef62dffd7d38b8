//! `ringsightExplain`: how an operation would be done, and why not otherwise. The table that it tells of is the one that
//! operations are planned by.

use std::ffi::{CStr, c_int};

use ringsight_comm_base::error::{Error, Result, ResultCode};
use ringsight_kernels::Scalar;
pub use ringsight_records::explain::{Explain, ExplainRow};
use ringsight_records::{Function, ReduceOp};

use super::{
    arguments::{count as check_count, data_type, out},
    call,
};
use crate::{
    op::{Request, Stream},
    plan::{
        environment,
        table::{Query, WindowSupport, explain},
    },
};

/// A text in a field that ends with a zero byte.
fn field<const BYTES: usize>(text: &str) -> [u8; BYTES] {
    let mut field = [0; BYTES];
    ringsight_records::pages::put_text(&mut field[..BYTES - 1], text);
    field
}

/// A number that is at least 1.
fn positive(name: &str, value: c_int) -> Result<u32> {
    u32::try_from(value)
        .ok()
        .filter(|value| *value > 0)
        .ok_or_else(|| Error::argument(format!("{name} ({value}) is not positive")))
}

/// What is asked, and the channels there are.
///
/// # Safety
/// `asked.function` is null or a text that ends with a zero byte.
unsafe fn read(asked: &Explain) -> Result<(Query, usize)> {
    if asked.size != size_of::<Explain>() {
        return Err(Error::argument(format!(
            "size ({}) is not that of this library's ringsightExplain_t, {}",
            asked.size,
            size_of::<Explain>()
        )));
    }
    if asked.function.is_null() {
        return Err(Error::argument("function is NULL"));
    }
    // SAFETY: not null, so a text by the caller's promise.
    let name = unsafe { CStr::from_ptr(asked.function) }.to_string_lossy();
    let function = Function::ALL
        .iter()
        .find(|function| function.name() == name)
        .ok_or_else(|| {
            let names: Vec<_> = Function::ALL.iter().map(|function| function.name()).collect();
            Error::argument(format!("function ({name}) is none of {}", names.join(", ")))
        })?;
    let reduces = function.reduces();
    let reduce_op = match u8::try_from(asked.op).ok().map(ReduceOp::from_code) {
        _ if !reduces => ReduceOp::None,
        Some(Some(op)) if op != ReduceOp::None => op,
        // As in NCCL, the others are numbers of reductions that callers have made.
        _ if asked.op >= 0 => ReduceOp::PreMulSum,
        _ => return Err(Error::argument(format!("op ({}) is negative", asked.op))),
    };
    let ranks = positive("ranks", asked.ranks)?;
    let data_type = data_type(asked.data_type)?;
    let request = Request {
        function: *function,
        send: 0,
        recv: 0,
        count: check_count(asked.count, data_type, ranks)?,
        data_type,
        reduce_op,
        scalar: Scalar::None,
        peer: None,
        stream: Stream(0),
        window: None,
    };
    let channels = positive("channels", asked.channels)? as usize;
    Ok((
        Query {
            function: *function,
            reduce_op,
            data_type,
            bytes: request.bytes_of_choice(ranks),
            ranks,
            slot_bytes: asked.slot_bytes,
            one_shot: asked.one_shot != 0,
            peer_access: asked.peers != 0,
            window: match asked.window {
                0 => WindowSupport::NoWindow,
                ..0 => WindowSupport::Unknown,
                _ => WindowSupport::Reach,
            },
            limits: environment::limits(asked.zero_cta != 0)?,
        },
        channels,
    ))
}

/// How an operation would be done, and why not otherwise. Calls no device.
///
/// # Safety
/// Pointers are null or valid; `rows` for as many rows as `count` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringsightExplain(
    asked: *const Explain,
    rows: *mut ExplainRow,
    count: *mut c_int,
) -> ResultCode {
    call("ringsightExplain", || {
        // SAFETY: null or valid, says the contract.
        let asked = unsafe { asked.as_ref() }.ok_or_else(|| Error::argument("asked is NULL"))?;
        // SAFETY: as above.
        let count = unsafe { out("count", count) }?;
        // SAFETY: as above.
        let (query, channels) = unsafe { read(asked) }?;
        let room = usize::try_from(*count).unwrap_or(0);
        if rows.is_null() && room > 0 {
            return Err(Error::argument(format!("rows is NULL, but count is {room}")));
        }
        let mut number = 0;
        for (row, reason) in explain(&query) {
            if number < room {
                let entry = ExplainRow {
                    algorithm: field(row.algorithm.name()),
                    protocol: field(row.path.protocol().name()),
                    chosen: reason.is_none().into(),
                    channels: match reason {
                        // One kernel does it all, and records tell of one channel.
                        None if row.path.is_peer_access() => 1,
                        None => row.path.channels(query.bytes, channels, query.peer_access) as c_int,
                        Some(_) => 0,
                    },
                    reason: field(&reason.map(|reason| reason.to_string()).unwrap_or_default()),
                };
                // SAFETY: there is room for it, says the contract.
                unsafe { rows.add(number).write(entry) };
            }
            number += 1;
        }
        *count = number as c_int;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::table::TABLE;

    const SHORT: Explain = Explain {
        size: size_of::<Explain>(),
        function: c"all_reduce".as_ptr(),
        count: 2,
        data_type: 7,
        op: 0,
        ranks: 4,
        channels: 8,
        slot_bytes: 128 << 10,
        one_shot: 1,
        peers: 1,
        zero_cta: 0,
        window: 0,
    };

    const NONE: ExplainRow = ExplainRow {
        algorithm: [0; 16],
        protocol: [0; 16],
        chosen: 0,
        channels: 0,
        reason: [0; 128],
    };

    fn text(bytes: &[u8]) -> &str {
        ringsight_records::pages::text(bytes)
    }

    /// The rows, or what was refused.
    fn asked(asked: Explain) -> std::result::Result<Vec<ExplainRow>, ResultCode> {
        let mut rows = [NONE; 64];
        let mut count = 64;
        // SAFETY: pointers to locals, and room for 64.
        let code = unsafe { ringsightExplain(&raw const asked, rows.as_mut_ptr(), &raw mut count) };
        match code {
            ResultCode::Success => Ok(rows[..count as usize].to_vec()),
            code => Err(code),
        }
    }

    #[test]
    fn one_row_is_chosen_and_the_others_say_why_not() {
        let rows = asked(SHORT).unwrap();
        assert_eq!(rows.len(), TABLE.len());
        let chosen: Vec<_> = rows.iter().filter(|row| row.chosen == 1).collect();
        assert_eq!(chosen.len(), 1);
        assert_eq!(
            (
                text(&chosen[0].algorithm),
                text(&chosen[0].protocol),
                chosen[0].channels
            ),
            ("one_shot", "ll", 1)
        );
        for row in &rows {
            assert_eq!(row.chosen == 1, text(&row.reason).is_empty(), "{row:?}");
        }
        let apart = asked(Explain { peers: 0, ..SHORT }).unwrap();
        assert!(text(&apart[0].reason).contains("reach each other's memory"));
        // 1 GiB over all of the channels.
        let long = asked(Explain {
            count: 1 << 28,
            peers: 0,
            ..SHORT
        })
        .unwrap();
        assert!(long.iter().any(|row| row.chosen == 1 && row.channels == 8));
        // By copy engines.
        let gather = |window| Explain {
            function: c"all_gather".as_ptr(),
            zero_cta: 1,
            window,
            ..SHORT
        };
        let may_be_kernels = |count| Explain {
            zero_cta: 0,
            count,
            ..gather(1)
        };
        let is_taken = |row: &ExplainRow| row.chosen == 1 && text(&row.protocol) == "ce";
        assert!(asked(gather(1)).unwrap().iter().any(is_taken));
        assert!(asked(may_be_kernels(1 << 30)).unwrap().iter().any(is_taken));
        let short = asked(may_be_kernels(8)).unwrap();
        let ends = "rank's buffers, unless all ranks' CTAPolicy is zero";
        assert!(!short.iter().any(is_taken) && short.iter().any(|row| text(&row.reason).ends_with(ends)));
        for (window, why) in [
            (0, "in no window that all ranks"),
            (-1, "tells whether copy engines serve them"),
        ] {
            let without = asked(gather(window)).unwrap();
            assert!(!without.iter().any(is_taken));
            assert!(
                without.iter().any(|row| text(&row.reason).contains(why)),
                "{window}"
            );
        }
        // Made by the caller.
        let scaled = asked(Explain { op: 77, ..SHORT }).unwrap();
        assert!(text(&scaled[0].reason).contains("PreMulSum"), "{:?}", scaled[0]);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for wrong in [
            Explain { size: 8, ..SHORT },
            Explain {
                function: std::ptr::null(),
                ..SHORT
            },
            Explain {
                function: c"allreduce".as_ptr(),
                ..SHORT
            },
            Explain {
                data_type: 12,
                ..SHORT
            },
            Explain { op: -1, ..SHORT },
            Explain { ranks: 0, ..SHORT },
            Explain { channels: 0, ..SHORT },
            Explain {
                count: usize::MAX,
                ..SHORT
            },
        ] {
            assert_eq!(
                asked(wrong).unwrap_err(),
                ResultCode::InvalidArgument,
                "{wrong:?}"
            );
        }
        let (short, mut count) = (SHORT, 1);
        // SAFETY: null pointers are refused.
        let code = unsafe { ringsightExplain(&raw const short, std::ptr::null_mut(), &raw mut count) };
        assert_eq!(code, ResultCode::InvalidArgument);
    }

    #[test]
    fn no_more_rows_are_written_than_there_is_room_for() {
        let mut rows = [NONE; 2];
        let (short, mut count) = (SHORT, 1);
        // SAFETY: room for one, which is what is said.
        let code = unsafe { ringsightExplain(&raw const short, rows.as_mut_ptr(), &raw mut count) };
        assert_eq!((code, count as usize), (ResultCode::Success, TABLE.len()));
        assert!(!text(&rows[0].algorithm).is_empty() && text(&rows[1].algorithm).is_empty());
    }
}
