//! The output of nccl-tests.

use crate::stats::median;

/// One line of a run: a size, with the results out of place and in place.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    /// Bytes, by nccl-tests' definition for the operation.
    pub(super) bytes: u64,
    /// Type and reduction, as they are printed.
    pub(super) kind: String,
    pub(super) out_of_place: Timing,
    pub(super) in_place: Timing,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Timing {
    /// Of one operation, microseconds.
    pub(super) micros: f64,
    /// Bus bandwidth, GB/s.
    pub(super) bus: f64,
    /// Elements that were wrong; `None` without checks, or where the operation has no such form.
    pub(super) wrong: Option<f64>,
}

/// A whole run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Run {
    pub(super) rows: Vec<Row>,
    /// What it says at its end of results that were wrong; `None` if it did not come to that.
    pub(super) out_of_bounds: Option<u64>,
}

/// Columns of a size: bytes, elements, type, reduction, root.
const HEAD: usize = 5;
/// Columns of a measurement: time, algorithm's bandwidth, bus bandwidth, wrong.
const TIMING: usize = 4;

/// Reads what one run has printed. Lines that are neither results nor the sum of errors are passed over: libraries print
/// between them.
pub(super) fn parse(text: &str) -> Run {
    let mut run = Run::default();
    for line in text.lines() {
        if let Some(count) = line.strip_prefix("# Out of bounds values") {
            let number = count.trim_start_matches([' ', ':']).split_whitespace().next();
            run.out_of_bounds = number.and_then(|number| number.parse().ok());
        } else if let Some(row) = row(line) {
            run.rows.push(row);
        }
    }
    run
}

fn row(line: &str) -> Option<Row> {
    let words: Vec<&str> = line.split_whitespace().collect();
    // Some versions add columns (a time stamp) at the end.
    if words.len() < HEAD + 2 * TIMING {
        return None;
    }
    let bytes = words[0].parse().ok()?;
    let _elements: u64 = words[1].parse().ok()?;
    let _root: i64 = words[4].parse().ok()?;
    Some(Row {
        bytes,
        kind: format!("{} {}", words[2], words[3]),
        out_of_place: timing(&words[HEAD..])?,
        in_place: timing(&words[HEAD + TIMING..])?,
    })
}

fn timing(words: &[&str]) -> Option<Timing> {
    let number = |word: &str| word.parse::<f64>().ok().filter(|number| number.is_finite());
    Some(Timing {
        micros: number(words[0])?,
        bus: number(words[2])?,
        wrong: match words[3] {
            "N/A" => None,
            wrong => Some(number(wrong)?),
        },
    })
}

impl Run {
    /// Whether the run has come to its end, has checked every size, and found nothing wrong.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) fn check(&self) -> Result<String, String> {
        if self.rows.is_empty() {
            return Err("it has printed no result".to_owned());
        }
        for row in &self.rows {
            for (place, timing) in [("out of place", row.out_of_place), ("in place", row.in_place)] {
                if let Some(wrong) = timing.wrong.filter(|wrong| *wrong != 0.0) {
                    return Err(format!(
                        "{wrong} elements are wrong: {} bytes, {}, {place}",
                        row.bytes, row.kind
                    ));
                }
            }
            if row.out_of_place.wrong.is_none() && row.in_place.wrong.is_none() {
                return Err(format!("nothing was checked at {} bytes", row.bytes));
            }
        }
        match self.out_of_bounds {
            Some(0) => {}
            Some(count) => return Err(format!("{count} results were wrong")),
            None => return Err("it has not come to its end".to_owned()),
        }
        let last = &self.rows[self.rows.len() - 1];
        Ok(format!(
            "0 wrong of {} sizes; {} bytes: {} us, {} GB/s",
            self.rows.len(),
            last.bytes,
            last.out_of_place.micros,
            last.out_of_place.bus
        ))
    }

    /// Time of one operation of so many bytes out of place, microseconds: of a run that goes through its sizes several times (`-N`) the median.
    pub(super) fn micros(&self, bytes: u64) -> Option<f64> {
        let rows = self.rows.iter().filter(|row| row.bytes == bytes);
        median(rows.map(|row| row.out_of_place.micros).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "\
# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22809
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
host:12:12 [0] NCCL INFO Connected all rings
           8             2     float     sum      -1    11.32    0.00    0.00       0     8.41    0.00    0.00       0
    67108864      16777216     float     sum      -1  1.2e+04  245.10  245.10       0    271.3  247.37  247.37     N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 123.4
#
";

    #[test]
    fn what_is_printed_is_read() {
        let run = parse(PRINTED);
        assert_eq!(run.rows.len(), 2);
        assert_eq!(run.out_of_bounds, Some(0));
        assert_eq!(run.rows[0].kind, "float sum");
        assert_eq!(run.micros(8), Some(11.32));
        assert_eq!(run.micros(64 << 20), Some(12000.0));
        assert_eq!(run.micros(16), None);
        let cycle = |micros| format!("8 2 float sum -1 {micros} 0 0 0 8 0 0 0\n");
        assert_eq!(parse(&[9, 7, 300].map(cycle).concat()).micros(8), Some(9.0));
        assert_eq!(parse(&[9, 7].map(cycle).concat()).micros(8), Some(8.0));
        assert_eq!(run.rows[1].in_place.wrong, None);
        assert_eq!(run.rows[1].in_place.bus, 247.37);
        assert!(run.check().unwrap().contains("0 wrong of 2 sizes"));
    }

    #[test]
    fn nothing_that_is_wrong_passes() {
        let wrong = PRINTED.replace("0.00       0     8.41", "0.00       3     8.41");
        let error = parse(&wrong).check().unwrap_err();
        assert!(
            error.contains("3 elements are wrong: 8 bytes, float sum, out of place"),
            "{error}"
        );
        let cut = PRINTED.split("# Out").next().unwrap();
        assert!(parse(cut).check().unwrap_err().contains("end"));
        let failed = PRINTED.replace(": 0 OK", ": 2 FAILED");
        assert!(parse(&failed).check().unwrap_err().contains("2 results"));
        assert!(parse("").check().is_err());
        let unchecked = PRINTED
            .replace("       0\n", "     N/A\n")
            .replace("0.00       0 ", "0.00     N/A ");
        assert!(
            parse(&unchecked)
                .check()
                .unwrap_err()
                .contains("nothing was checked")
        );
    }

    #[test]
    fn rubbish_is_no_row() {
        for line in [
            "",
            "8 2 float sum -1",
            "x 2 float sum -1 1 2 3 0 1 2 3 0",
            "8 2 float sum root 1 2 3 0 1 2 3 0",
            "8 2 float sum -1 nan 2 3 0 1 2 3 0",
            "8 2 float sum -1 1 2 3 zero 1 2 3 0",
            "-8 2 float sum -1 1 2 3 0 1 2 3 0",
        ] {
            assert_eq!(row(line), None, "{line}");
        }
        // A column more is none less.
        assert!(row("8 2 float sum -1 1 2 3 0 1 2 3 0 2026-11-21 20:00:00").is_some());
    }
}
