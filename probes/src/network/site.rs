//! Sites in the kernel's RDMA stack: functions, and which of their arguments' fields are recorded.
//!
//! Arguments and fields are named, and looked up in the running kernel's type information: kernels move them without a word. What is
//! listed here is what names them. Linux 6.1 and 6.12 are tested; where a newer kernel has renamed a function, its new name joins the
//! site's list.

use ringsight_records::network::{COMMAND_SITE, SITES, SitePlan, VALUES, flags};

use super::{
    btf::Btf,
    path::{Path, argument, chain, returned},
};

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

#[cfg(test)]
mod tests {
    use super::{super::path::tests::module, *};

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
