//! Sites in the kernel's RDMA stack: functions, and which of their arguments' fields are recorded.
//!
//! Arguments and fields are named, and looked up in the running kernel's type information: kernels move them without a word. What is
//! listed here is what names them. Linux 6.1 and 6.12 are tested; where a newer kernel has renamed a function, its new name joins the
//! site's list.

use ringsight_records::network::{
    ARGUMENTS, COMMAND_SITE, Chain, RESULT, SITES, STEPS, SitePlan, UPPER, VALUES, flags,
};

use super::btf::{Btf, Shape, TypeId};

/// What a site tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tells {
    /// A queue pair was created.
    QpCreated,
    /// A queue pair's attributes were changed.
    QpModified,
    /// A queue pair is being destroyed.
    QpDestroyed,
    /// Memory was registered.
    MrRegistered,
    /// Memory is being deregistered.
    MrDeregistered,
    /// An event of a device or port.
    DeviceEvent,
    /// An event of a queue pair, on its way to the process.
    QpEvent,
    /// An event of a completion queue, on its way to the process.
    CqEvent,
    /// Soft-RoCE gave a queue pair up.
    SoftQpError,
    /// An mlx5 device's event of a queue pair.
    Mlx5QpEvent,
    /// An mlx5 device's event for its verbs driver: of a port, or of the device.
    Mlx5Event,
    /// An mlx5 device's error of a completion queue.
    Mlx5CqError,
    /// An mlx5 device's firmware is not well.
    Mlx5Health,
    /// The driver begins to get an mlx5 device back.
    Mlx5Recovery,
    /// An mlx5 device's firmware refused a command.
    Mlx5CommandRefused,
}

/// Where a number, or a name, is: an argument, or what a function returns, and fields from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Path {
    /// Name of the argument; empty for nothing.
    argument: &'static str,
    /// The structure that an untyped argument points to.
    cast: &'static str,
    /// The structure that holds what the argument points to, and as which of its members.
    within: Option<(&'static str, &'static str)>,
    /// Fields, with dots between them; pointers are followed.
    fields: &'static str,
    upper: bool,
}

/// Stands for what the function returns.
const RETURNED: &str = "return";

impl Path {
    const NONE: Self = argument("");

    const fn cast(mut self, structure: &'static str) -> Self {
        self.cast = structure;
        self
    }

    const fn within(mut self, structure: &'static str, member: &'static str) -> Self {
        self.within = Some((structure, member));
        self
    }

    const fn at(mut self, fields: &'static str) -> Self {
        self.fields = fields;
        self
    }

    const fn upper(mut self) -> Self {
        self.upper = true;
        self
    }
}

const fn argument(name: &'static str) -> Path {
    Path {
        argument: name,
        cast: "",
        within: None,
        fields: "",
        upper: false,
    }
}

const fn returned() -> Path {
    argument(RETURNED)
}

/// A function of a kernel module that is probed.
#[derive(Clone, Copy, Debug)]
pub struct Site {
    /// What it tells.
    pub tells: Tells,
    /// Module that has it.
    pub module: &'static str,
    /// Names of the function: the first one that the module has is probed.
    pub functions: &'static [&'static str],
    /// Whether its return is probed too.
    pub returns: bool,
    /// Whether it is passed in the context of the process that it concerns.
    pub of_process: bool,
    /// Where the device's name is: that of the verbs device, or of the PCI device.
    device: Path,
    /// Where the numbers are.
    values: [Path; VALUES],
}

const fn values<const N: usize>(paths: [Path; N]) -> [Path; VALUES] {
    let mut all = [Path::NONE; VALUES];
    let mut index = 0;
    while index < N {
        all[index] = paths[index];
        index += 1;
    }
    all
}

/// A driver's function that registers memory of a process, in the protection domain that it calls `domain`.
const fn registration(
    module: &'static str,
    functions: &'static [&'static str],
    domain: &'static str,
) -> Site {
    Site {
        tells: Tells::MrRegistered,
        module,
        functions,
        returns: true,
        of_process: true,
        device: argument(domain).at("device.name"),
        values: values([
            returned().at("lkey"),
            returned().at("rkey"),
            argument("length"),
            argument("length").upper(),
        ]),
    }
}

/// Every function that is probed. Beside them stands the tracepoint `mlx5:mlx5_cmd`.
pub const TABLE: &[Site] = &[
    Site {
        tells: Tells::QpCreated,
        module: "ib_core",
        functions: &["ib_create_qp_user"],
        returns: true,
        of_process: true,
        device: argument("dev").at("name"),
        values: values([returned().at("qp_num"), returned().at("qp_type")]),
    },
    Site {
        tells: Tells::QpModified,
        module: "ib_core",
        functions: &["_ib_modify_qp"],
        returns: true,
        of_process: true,
        device: argument("qp").at("device.name"),
        values: values([
            argument("qp").at("qp_num"),
            argument("attr_mask"),
            argument("attr").at("qp_state"),
            argument("attr").at("port_num"),
            argument("attr").at("dest_qp_num"),
        ]),
    },
    Site {
        tells: Tells::QpDestroyed,
        module: "ib_core",
        functions: &["ib_destroy_qp_user"],
        // At its return the queue pair is gone.
        returns: false,
        of_process: true,
        device: argument("qp").at("device.name"),
        values: values([argument("qp").at("qp_num")]),
    },
    registration("rdma_rxe", &["rxe_reg_user_mr"], "ibpd"),
    registration("mlx5_ib", &["mlx5_ib_reg_user_mr"], "pd"),
    registration("mlx5_ib", &["mlx5_ib_reg_user_mr_dmabuf"], "pd"),
    Site {
        tells: Tells::MrDeregistered,
        module: "ib_core",
        functions: &["ib_dereg_mr_user"],
        returns: false,
        of_process: true,
        device: argument("mr").at("device.name"),
        values: values([argument("mr").at("lkey"), argument("mr").at("rkey")]),
    },
    Site {
        tells: Tells::DeviceEvent,
        module: "ib_core",
        functions: &["ib_dispatch_event"],
        returns: false,
        of_process: false,
        device: argument("event").at("device.name"),
        values: values([
            argument("event").at("event"),
            argument("event").at("element.port_num"),
        ]),
    },
    Site {
        tells: Tells::QpEvent,
        module: "ib_uverbs",
        functions: &["ib_uverbs_qp_event_handler"],
        returns: false,
        of_process: false,
        device: argument("event").at("device.name"),
        values: values([
            argument("event").at("event"),
            argument("event").at("element.qp.qp_num"),
        ]),
    },
    Site {
        tells: Tells::CqEvent,
        module: "ib_uverbs",
        functions: &["ib_uverbs_cq_event_handler"],
        returns: false,
        of_process: false,
        device: argument("event").at("device.name"),
        values: values([argument("event").at("event")]),
    },
    Site {
        tells: Tells::SoftQpError,
        module: "rdma_rxe",
        functions: &["rxe_qp_error"],
        returns: false,
        of_process: false,
        device: argument("qp").at("ibqp.device.name"),
        values: values([argument("qp").at("ibqp.qp_num")]),
    },
    Site {
        tells: Tells::Mlx5QpEvent,
        module: "mlx5_ib",
        functions: &["mlx5_ib_qp_event"],
        returns: false,
        of_process: false,
        device: argument("qp")
            .within("mlx5_ib_qp_base", "mqp")
            .at("container_mibqp.ibqp.device.name"),
        values: values([argument("type"), argument("qp").at("qpn")]),
    },
    Site {
        tells: Tells::Mlx5Event,
        module: "mlx5_ib",
        functions: &["mlx5_ib_event"],
        returns: false,
        of_process: false,
        device: argument("nb")
            .within("mlx5_ib_dev", "mdev_events")
            .at("ib_dev.name"),
        values: values([
            argument("event"),
            argument("param").cast("mlx5_eqe").at("sub_type"),
            argument("param").cast("mlx5_eqe").at("data.port.port"),
        ]),
    },
    Site {
        tells: Tells::Mlx5CqError,
        module: "mlx5_core",
        functions: &["cq_err_event_notifier"],
        returns: false,
        of_process: false,
        device: argument("nb")
            .within("mlx5_eq_table", "cq_err_nb")
            .at("async_eq.core.dev.device.kobj.name"),
        values: values([
            argument("data").cast("mlx5_eqe").at("data.cq_err.cqn"),
            argument("data").cast("mlx5_eqe").at("data.cq_err.syndrome"),
        ]),
    },
    Site {
        tells: Tells::Mlx5Health,
        module: "mlx5_core",
        functions: &["print_health_info"],
        returns: false,
        of_process: false,
        device: argument("dev").at("device.kobj.name"),
        values: values([
            argument("dev").at("priv.health.synd"),
            argument("dev").at("priv.health.fatal_error"),
        ]),
    },
    Site {
        tells: Tells::Mlx5Recovery,
        module: "mlx5_core",
        functions: &["mlx5_health_try_recover"],
        // It takes minutes where the device stays away.
        returns: false,
        of_process: false,
        device: argument("dev").at("device.kobj.name"),
        values: values([]),
    },
];

const _: () = assert!(TABLE.len() < COMMAND_SITE as usize && TABLE.len() < SITES);

/// What the tracepoint's program hands on: (opcode, modifier, status, syndrome, error).
pub(super) const fn command_plan() -> SitePlan {
    let mut plan = SitePlan::NONE;
    let mut index = 0;
    while index < VALUES {
        plan.values[index].source = index as u8;
        index += 1;
    }
    plan
}

/// Looks up where a site's numbers are in this kernel: the function's name, and what the programs are told.
///
/// # Errors
/// Says what the module does not have.
pub(super) fn plan(site: &Site, types: &Btf) -> Result<(&'static str, SitePlan), String> {
    let (function, (parameters, returned)) = site
        .functions
        .iter()
        .find_map(|name| Some((*name, types.function(name)?)))
        .ok_or_else(|| format!("{} has no {}", site.module, site.functions.join(" or ")))?;
    let chain = |path: &Path, text: bool| {
        chain(path, types, &parameters, returned, text).ok_or_else(|| {
            let field = if path.fields.is_empty() { "" } else { "." };
            format!(
                "{function} of {} has no {}{field}{}",
                site.module, path.argument, path.fields
            )
        })
    };
    let mut plan = SitePlan::NONE;
    if site.of_process {
        plan.flags |= flags::PROCESS;
    }
    plan.device = chain(&site.device, true)?;
    for (value, path) in plan.values.iter_mut().zip(&site.values) {
        *value = chain(path, false)?;
    }
    Ok((function, plan))
}

/// The chain that leads along a path; `text` says that it is to end at the text's first byte.
fn chain(
    path: &Path,
    types: &Btf,
    parameters: &[(String, TypeId)],
    returned: TypeId,
    text: bool,
) -> Option<Chain> {
    if path.argument.is_empty() {
        return Some(Chain::NONE);
    }
    let (source, mut current) = if path.argument == RETURNED {
        (RESULT, returned)
    } else {
        let place = parameters.iter().position(|(name, _)| name == path.argument)?;
        if place >= ARGUMENTS {
            return None;
        }
        (u8::try_from(place).ok()?, parameters[place].1)
    };
    let mut chain = Chain {
        source,
        size: if path.upper { UPPER } else { 4 },
        ..Chain::NONE
    };
    if path.fields.is_empty() {
        return match types.shape(current)? {
            Shape::Number(bytes @ (1 | 2)) => {
                chain.size = bytes as u8;
                Some(chain)
            }
            Shape::Number(4 | 8) => Some(chain),
            _ => None,
        };
    }
    // The argument is a pointer: its fields are one offset away, those behind a further pointer one more.
    let Shape::Pointer(target) = types.shape(current)? else {
        return None;
    };
    current = target;
    if !path.cast.is_empty() {
        current = types.structure(path.cast)?;
    }
    let mut offset = 0_i32;
    if let Some((structure, member)) = path.within {
        current = types.structure(structure)?;
        offset = -i32::try_from(types.member(current, member)?.1).ok()?;
    }
    let mut step = 0;
    let mut end = |chain: &mut Chain, offset: &mut i32| {
        *chain.offsets.get_mut(step)? = std::mem::take(offset);
        step += 1;
        chain.steps = u8::try_from(step).ok()?;
        Some(())
    };
    for field in path.fields.split('.') {
        if let Shape::Pointer(target) = types.shape(current)? {
            end(&mut chain, &mut offset)?;
            current = target;
        }
        let (id, place) = types.member(current, field)?;
        offset = offset.checked_add(i32::try_from(place).ok()?)?;
        current = id;
    }
    match (types.shape(current)?, text) {
        (Shape::Number(bytes), false) => {
            chain.size = u8::try_from(bytes.min(4)).ok()?;
            end(&mut chain, &mut offset)?;
        }
        (Shape::Array(_), true) => end(&mut chain, &mut offset)?,
        (Shape::Pointer(_), true) => {
            end(&mut chain, &mut offset)?;
            end(&mut chain, &mut offset)?;
        }
        _ => return None,
    }
    Some(chain)
}

const _: () = assert!(
    STEPS >= 4,
    "a device behind three pointers, whose name is one more"
);

#[cfg(test)]
mod tests {
    use super::{super::btf::tests::Writer, *};

    /// A module with `work(int mask, struct outer *outer, void *data)` that returns a `struct inner *`.
    fn module() -> Btf {
        let mut types = Writer::new(None);
        let byte = types.int("char", 1);
        let number = types.int("int", 4);
        let long = types.int("long", 8);
        let name = types.array(byte);
        let text = types.pointer(byte);
        let inner = types.structure(
            "inner",
            &[("number", number, 4), ("name", name, 8), ("text", text, 72)],
        );
        let to_inner = types.pointer(inner);
        let outer = types.structure(
            "outer",
            &[("flag", byte, 3), ("inner", to_inner, 16), ("part", inner, 24)],
        );
        let to_outer = types.pointer(outer);
        let untyped = types.pointer(0);
        let parameters = [
            ("mask", number),
            ("outer", to_outer),
            ("data", untyped),
            ("length", long),
        ];
        types.function("work", to_inner, &parameters);
        Btf::parse(types.bytes(), None).unwrap()
    }

    fn look(path: Path, text: bool) -> Option<(u8, u8, Vec<i32>)> {
        let types = module();
        let (parameters, returned) = types.function("work").unwrap();
        let chain = chain(&path, &types, &parameters, returned, text)?;
        Some((
            chain.source,
            chain.size,
            chain.offsets[..chain.steps.into()].to_vec(),
        ))
    }

    #[test]
    fn paths_become_chains_of_offsets() {
        assert_eq!(look(argument("mask"), false), Some((0, 4, vec![])));
        assert_eq!(look(argument("length"), false), Some((3, 4, vec![])));
        assert_eq!(look(argument("length").upper(), false), Some((3, UPPER, vec![])));
        assert_eq!(look(argument("outer").at("flag"), false), Some((1, 1, vec![3])));
        // In a structure that is part of the first, and in one behind a pointer.
        assert_eq!(
            look(argument("outer").at("part.number"), false),
            Some((1, 4, vec![28]))
        );
        assert_eq!(
            look(argument("outer").at("inner.number"), false),
            Some((1, 4, vec![16, 4]))
        );
        assert_eq!(look(returned().at("number"), false), Some((RESULT, 4, vec![4])));
        assert_eq!(
            look(argument("data").cast("inner").at("number"), false),
            Some((2, 4, vec![4]))
        );
        // From a part to the whole: `part` lies 24 into it.
        let whole = argument("data").within("outer", "part");
        assert_eq!(look(whole.at("flag"), false), Some((2, 1, vec![-21])));
        // Texts in place, and behind a pointer.
        assert_eq!(
            look(argument("outer").at("inner.name"), true),
            Some((1, 4, vec![16, 8]))
        );
        assert_eq!(
            look(argument("outer").at("inner.text"), true),
            Some((1, 4, vec![16, 72, 0]))
        );
    }

    #[test]
    fn what_is_not_there_is_no_chain() {
        for path in [
            argument("none"),
            argument("outer"),
            argument("outer").at("none"),
            argument("mask").at("flag"),
            argument("data").at("number"),
            argument("data").cast("none").at("x"),
            argument("data").within("outer", "none").at("flag"),
            // A structure is no number.
            argument("outer").at("part"),
        ] {
            assert_eq!(look(path, false), None, "{path:?}");
        }
        assert_eq!(
            look(argument("outer").at("flag"), true),
            None,
            "a number is no text"
        );
    }

    #[test]
    fn a_site_that_the_module_lacks_is_named() {
        let site = Site {
            tells: Tells::QpCreated,
            module: "m",
            functions: &["old", "new"],
            returns: false,
            of_process: true,
            device: Path::NONE,
            values: values([argument("gone")]),
        };
        assert_eq!(plan(&site, &module()).unwrap_err(), "m has no old or new");
        let site = Site {
            functions: &["old", "work"],
            ..site
        };
        assert_eq!(plan(&site, &module()).unwrap_err(), "work of m has no gone");
        let site = Site {
            values: values([argument("mask")]),
            ..site
        };
        let (function, plan) = plan(&site, &module()).unwrap();
        assert_eq!((function, plan.flags), ("work", flags::PROCESS));
    }
}
