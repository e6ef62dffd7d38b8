//! Lists of names of interfaces or devices, in NCCL's syntax.

/// What `NCCL_SOCKET_IFNAME` and `NCCL_IB_HCA` choose: `[^][=]name[:port],…`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameFilter {
    /// All but these (`^`).
    exclude: bool,
    /// Whole names, not beginnings (`=`).
    exact: bool,
    /// Names, and a port of each, if named. None: all.
    names: Vec<(String, Option<u8>)>,
}

impl NameFilter {
    /// Reads a list; an empty one allows all.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let text = text.trim();
        let (exclude, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
        let names = text
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .map(|name| match name.rsplit_once(':') {
                Some((device, port)) if port.parse::<u8>().is_ok() => (device.to_owned(), port.parse().ok()),
                _ => (name.to_owned(), None),
            })
            .collect();
        Self {
            exclude,
            exact,
            names,
        }
    }

    /// Whether it lists names that are wanted, and not names that are not.
    #[must_use]
    pub fn is_choice(&self) -> bool {
        !self.names.is_empty() && !self.exclude
    }

    /// Whether a name is allowed, for a device's port with that port.
    #[must_use]
    pub fn allows(&self, name: &str, port: Option<u8>) -> bool {
        if self.names.is_empty() {
            return true;
        }
        let listed = self.names.iter().any(|(wanted, number)| {
            self.matches(wanted, name)
                && match (number, port) {
                    (Some(number), Some(port)) => *number == port,
                    _ => true,
                }
        });
        listed != self.exclude
    }

    /// Names that it wants and that do not stand in `known`.
    #[must_use]
    pub fn unknown<'a>(&'a self, known: &[&str]) -> Vec<&'a str> {
        self.names
            .iter()
            .filter(|(wanted, _)| !self.exclude && !known.iter().any(|name| self.matches(wanted, name)))
            .map(|(wanted, _)| wanted.as_str())
            .collect()
    }

    fn matches(&self, wanted: &str, name: &str) -> bool {
        if self.exact {
            name == wanted
        } else {
            name.starts_with(wanted)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_those_of_nccl() {
        let cases = [
            ("", "mlx5_0", 1, true),
            ("mlx5", "mlx5_7", 1, true),
            ("mlx5", "hca0", 1, false),
            ("mlx5_1", "mlx5_10", 1, true),
            ("=mlx5_1", "mlx5_10", 1, false),
            ("=mlx5_1,mlx5_3", "mlx5_3", 2, true),
            ("=mlx5_1:2", "mlx5_1", 1, false),
            ("=mlx5_1:2", "mlx5_1", 2, true),
            ("^mlx5_1", "mlx5_10", 1, false),
            ("^=mlx5_1", "mlx5_10", 1, true),
            ("^=mlx5_1:1", "mlx5_1", 2, true),
            ("^=mlx5_1:1", "mlx5_1", 1, false),
            (" hca0 , peer0 ", "peer0", 1, true),
            ("^", "mlx5_0", 1, true),
        ];
        for (filter, device, port, allowed) in cases {
            assert_eq!(
                NameFilter::parse(filter).allows(device, Some(port)),
                allowed,
                "{filter:?} {device}:{port}"
            );
        }
        let filter = NameFilter::parse("=mlx5_1,mlx5_9");
        assert_eq!(filter.unknown(&["mlx5_1", "mlx5_2"]), ["mlx5_9"]);
        assert!(NameFilter::parse("^mlx5_9").unknown(&["mlx5_1"]).is_empty());
    }

    #[test]
    fn a_port_says_nothing_of_a_name_without_ports() {
        assert!(NameFilter::parse("=eth0:1").allows("eth0", None));
        assert!(!NameFilter::parse("^eth0:1").allows("eth0", None));
        let choices = ["eth0", "^eth0", "", "^"].map(|text| NameFilter::parse(text).is_choice());
        assert_eq!(choices, [true, false, false, false]);
    }
}
