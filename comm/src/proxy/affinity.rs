//! The CPUs that a proxy's threads run on.

use std::{fmt, io};

use ringsight_comm_base::{
    env,
    error::{Error, Result},
    sys,
};

/// Maximum number of CPUs in Linux.
const MAX_CPUS: usize = 8192;

/// A set of the machine's CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus([u64; MAX_CPUS / 64]);

impl Cpus {
    /// The CPUs for [`ProxyConfig::cpus`](super::ProxyConfig::cpus): `NCCL_PROXY_CPUSET`, or all CPUs with `NCCL_IGNORE_CPU_AFFINITY=1`.
    /// `None`: those of the thread that makes the proxy.
    ///
    /// # Errors
    /// A variable is no list of CPUs, or neither 0 nor 1.
    pub(crate) fn from_environment() -> Result<Option<Self>> {
        Self::read(&env::text)
    }

    fn read(environment: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        const SET: &str = "NCCL_PROXY_CPUSET";
        const IGNORE: &str = "NCCL_IGNORE_CPU_AFFINITY";
        if let Some(list) = environment(SET) {
            return Self::parse(&list).map(Some).map_err(|why| {
                Error::argument(format!(
                    "environment variable {SET}={list}: {why}; a list of CPUs such as 0-3,8 is wanted"
                ))
            });
        }
        let ignore = environment(IGNORE);
        match ignore.as_deref().map(|text| (env::parse(IGNORE, text), text)) {
            None | Some((Some(0_u8), _)) => Ok(None),
            Some((Some(1), _)) => Ok(Some(Self([u64::MAX; MAX_CPUS / 64]))),
            Some((_, other)) => Err(Error::argument(format!(
                "environment variable {IGNORE}={other}: must be 0 or 1"
            ))),
        }
    }

    /// Parses a list as the kernel writes it: numbers and ranges between commas, at least one CPU.
    fn parse(list: &str) -> std::result::Result<Self, String> {
        let mut cpus = Self([0; MAX_CPUS / 64]);
        for part in list.split(',') {
            let number = |text: &str| match text.trim().parse::<usize>() {
                Ok(cpu) if cpu < MAX_CPUS => Ok(cpu),
                Ok(cpu) => Err(format!("no machine has a CPU {cpu}")),
                Err(_) => Err(format!("{:?} is neither a CPU nor a range", part.trim())),
            };
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(part)?, number(part)?),
            };
            if first > last {
                return Err(format!("{:?} is no range", part.trim()));
            }
            for cpu in first..=last {
                cpus.0[cpu / 64] |= 1 << (cpu % 64);
            }
        }
        Ok(cpus)
    }

    /// Has the calling thread, and the threads that it starts from now on, run on those of these CPUs that it may use.
    ///
    /// # Errors
    /// It may use none of them.
    pub(super) fn apply(&self) -> io::Result<()> {
        let (thread, bytes) = (0, size_of_val(&self.0));
        // SAFETY: readable for its size; the kernel takes masks of any length.
        let result = unsafe { libc::sched_setaffinity(thread, bytes, self.0.as_ptr().cast()) };
        sys::check(result).map(drop)
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has = |cpu: usize| cpu < MAX_CPUS && self.0[cpu / 64] >> (cpu % 64) & 1 == 1;
        let mut comma = "";
        let mut cpu = 0;
        while cpu < MAX_CPUS {
            if !has(cpu) {
                cpu += 1;
                continue;
            }
            let first = cpu;
            while has(cpu) {
                cpu += 1;
            }
            match cpu - 1 {
                last if last == first => write!(f, "{comma}{first}")?,
                last => write!(f, "{comma}{first}-{last}")?,
            }
            comma = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn by(name: &'static str, value: &'static str) -> Result<Option<Cpus>> {
        Cpus::read(&|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn lists_are_parsed_as_the_kernel_writes_them() {
        for (list, same) in [
            ("0", "0"),
            ("0-3,8", "0-3,8"),
            (" 2 , 1, 0 ", "0-2"),
            ("5-5,63,64", "5,63-64"),
            ("8191", "8191"),
        ] {
            let cpus = by("NCCL_PROXY_CPUSET", list).unwrap().unwrap();
            assert_eq!(cpus.to_string(), same);
        }
    }

    #[test]
    fn invalid_lists_are_refused_and_named() {
        for (list, why) in [
            ("x", "\"x\" is neither a CPU nor a range"),
            ("0,,1", "\"\" is neither a CPU nor a range"),
            ("0-", "\"0-\" is neither a CPU nor a range"),
            ("-1", "\"-1\" is neither"),
            ("1-2-3", "\"1-2-3\" is neither"),
            ("3-1", "\"3-1\" is no range"),
            ("8192", "no machine has a CPU 8192"),
            ("99999999999999999999", "is neither a CPU"),
        ] {
            let error = by("NCCL_PROXY_CPUSET", list).unwrap_err();
            assert_eq!(
                error.code,
                ringsight_comm_base::error::ResultCode::InvalidArgument
            );
            assert!(
                error.text.contains("NCCL_PROXY_CPUSET=") && error.text.contains(why),
                "{error}"
            );
        }
        assert_eq!(by("NCCL_IGNORE_CPU_AFFINITY", "0"), Ok(None));
        let error = by("NCCL_IGNORE_CPU_AFFINITY", "yes").unwrap_err();
        assert!(error.text.contains("NCCL_IGNORE_CPU_AFFINITY=yes"), "{error}");
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(cpus in proptest::collection::btree_set(0..MAX_CPUS, 1..40)) {
            let list: Vec<String> = cpus.iter().map(ToString::to_string).collect();
            let read = Cpus::parse(&list.join(",")).unwrap();
            prop_assert_eq!(Cpus::parse(&read.to_string()), Ok(read));
        }
    }
}
