//! Soft-RoCE: has some packets lost and others not: a program that looks at what an interface receives drops them.

use std::{
    collections::BTreeMap,
    ffi::CString,
    io,
    os::fd::{FromRawFd as _, OwnedFd},
    sync::{Mutex, OnceLock, PoisonError},
};

/// Programs in use, by interface: one is gone with its descriptor.
static LOSSES: Mutex<BTreeMap<String, OwnedFd>> = Mutex::new(BTreeMap::new());

/// With the first such program Linux changes the code that receives packets, and with the last one changes it back; some emulators run what was there
/// before, now and then, and break the kernel. So one stays, where nothing is received, from before there is traffic; `None` where another process has one.
static STAYS: OnceLock<Option<OwnedFd>> = OnceLock::new();
/// An interface that is not up (vm/rdma-setup).
const IDLE: &str = "idle0";

/// What is lost.
#[derive(Clone, Copy, Debug)]
pub(super) enum Lost {
    /// What tells of a step, and not its bytes: RDMA WRITEs with an immediate.
    Notices,
    /// What is sent to a queue pair.
    OfQueuePair(u32),
}

/// Has what comes to an interface lost, or nothing any longer.
pub(super) fn lose(interface: &str, lost: Option<Lost>) {
    STAYS.get_or_init(|| {
        let passes = [
            instruction(MOVE_VALUE, 0, 0, 0, XDP_PASS),
            instruction(EXIT, 0, 0, 0, 0),
        ];
        match attach(IDLE, &passes) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => None,
            link => Some(link.unwrap_or_else(|error| panic!("{IDLE}: {error}"))),
        }
    });
    let mut losses = LOSSES.lock().unwrap_or_else(PoisonError::into_inner);
    losses.remove(interface);
    if let Some(lost) = lost {
        let link = attach(interface, &program(lost)).unwrap_or_else(|error| panic!("{interface}: {error}"));
        losses.insert(interface.to_owned(), link);
    }
}

/// One instruction of a BPF program.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    value: i32,
}

const fn instruction(code: u8, to: u8, from: u8, offset: i16, value: i32) -> Instruction {
    let registers = from << 4 | to;
    Instruction {
        code,
        registers,
        offset,
        value,
    }
}

/// `to = *(uN *)(from + offset)`.
const LOAD_32: u8 = 0x61;
const LOAD_16: u8 = 0x69;
const LOAD_8: u8 = 0x71;
const MOVE: u8 = 0xbf;
const MOVE_VALUE: u8 = 0xb7;
const ADD_VALUE: u8 = 0x07;
const JUMP_IF_GREATER: u8 = 0x2d;
const JUMP_IF_VALUE: u8 = 0x15;
const JUMP_UNLESS_VALUE: u8 = 0x55;
const EXIT: u8 = 0x95;

const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;

/// Ethernet, IPv4 without options, UDP to RoCE's port; of those, what is lost.
fn program(lost: Lost) -> Vec<Instruction> {
    let chosen = match lost {
        // A reliable connection's: a write's last packet, or its only one.
        Lost::Notices => vec![
            instruction(LOAD_8, 5, 2, 42, 0),
            instruction(JUMP_IF_VALUE, 5, 0, 3, 0x09),
            instruction(JUMP_IF_VALUE, 5, 0, 2, 0x0b),
        ],
        Lost::OfQueuePair(number) => {
            let byte = |shift: u32| (number >> shift & 0xff) as i32;
            vec![
                instruction(LOAD_8, 5, 2, 47, 0),
                instruction(JUMP_UNLESS_VALUE, 5, 0, 4, byte(16)),
                instruction(LOAD_8, 5, 2, 48, 0),
                instruction(JUMP_UNLESS_VALUE, 5, 0, 2, byte(8)),
                instruction(LOAD_8, 5, 2, 49, 0),
                instruction(JUMP_IF_VALUE, 5, 0, 2, byte(0)),
            ]
        }
    };
    let to_pass = |after: usize| (after + chosen.len()) as i16;
    let mut program = vec![
        instruction(LOAD_32, 2, 1, 0, 0),
        instruction(LOAD_32, 3, 1, 4, 0),
        instruction(MOVE, 4, 2, 0, 0),
        instruction(ADD_VALUE, 4, 0, 0, 14 + 20 + 8 + 12),
        instruction(JUMP_IF_GREATER, 4, 3, to_pass(6), 0),
        instruction(LOAD_16, 5, 2, 12, 0),
        instruction(JUMP_UNLESS_VALUE, 5, 0, to_pass(4), 0x0008),
        instruction(LOAD_8, 5, 2, 14, 0),
        instruction(JUMP_UNLESS_VALUE, 5, 0, to_pass(2), 0x45),
        instruction(LOAD_16, 5, 2, 36, 0),
        // 4791, as the network has it.
        instruction(JUMP_UNLESS_VALUE, 5, 0, to_pass(0), 0xb712),
    ];
    program.extend(chosen);
    program.extend([
        instruction(MOVE_VALUE, 0, 0, 0, XDP_PASS),
        instruction(EXIT, 0, 0, 0, 0),
        instruction(MOVE_VALUE, 0, 0, 0, XDP_DROP),
        instruction(EXIT, 0, 0, 0, 0),
    ]);
    program
}

const PROGRAM_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;
const KIND_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
/// Where the packet is a socket buffer already: any interface can.
const IN_SOCKET_BUFFERS: u32 = 1 << 1;

/// `union bpf_attr` as the two commands use it.
#[repr(C, align(8))]
struct Attributes([u32; 32]);

fn bpf(command: libc::c_int, attributes: &mut Attributes) -> io::Result<OwnedFd> {
    let size = size_of::<Attributes>();
    // SAFETY: attributes of the size that is named; what they point to outlives the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) })
}

fn attach(interface: &str, instructions: &[Instruction]) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd as _;
    let name = CString::new(interface).unwrap();
    // SAFETY: a string.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    assert_ne!(index, 0, "there is no {interface}");
    let halves = |address: u64| [address as u32, (address >> 32) as u32];
    let mut load = Attributes([0; 32]);
    (load.0[0], load.0[1]) = (KIND_XDP, instructions.len() as u32);
    load.0[2..4].copy_from_slice(&halves(instructions.as_ptr() as u64));
    load.0[4..6].copy_from_slice(&halves(c"".as_ptr() as u64));
    let program = bpf(PROGRAM_LOAD, &mut load)?;
    let mut link = Attributes([0; 32]);
    link.0[..4].copy_from_slice(&[program.as_raw_fd() as u32, index, ATTACH_XDP, IN_SOCKET_BUFFERS]);
    bpf(LINK_CREATE, &mut link)
}
