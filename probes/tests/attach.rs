//! Attaching to running processes by eBPF, and what is left after detaching.

mod common;

use common::{Target, lost, poll, records, session};
use ringsight_probes::{Carrier, Sample};
use ringsight_records::Kind;

#[test]
fn a_running_process_gives_its_records() {
    let Some(mut session) = session("a_running_process_gives_its_records") else { return };
    let mut target = Target::instrumented();
    target.call("fixture_operations 7 5 0");
    let attached = session.attach(target.pid()).unwrap();
    eprintln!("{:?} {:?} {:?}", attached.elapsed, attached.sites, session.link_kind());
    assert_eq!(attached.carrier, Carrier::Probe);

    target.call("fixture_operations 7 100 3");
    let samples = poll(&mut session);
    assert!(matches!(&samples[0], Sample::Process(process) if process.pid == target.pid() && process.instrumented));
    assert!(matches!(&samples[1], Sample::Communicator { communicator, .. } if communicator.id == 7));
    assert_eq!(records(&samples, Kind::OpLaunched), 100);
    assert_eq!(records(&samples, Kind::OpCompleted), 100);
    assert_eq!(records(&samples, Kind::ProxyStep), 300);
    assert_eq!(lost(&samples), 0);
}
