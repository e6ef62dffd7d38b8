//! What the fuzzers have found worth keeping, on every target, without a fuzzer.
#![allow(clippy::disallowed_methods, reason = "tests make and read files of their own")]

use std::path::Path;

use ringsight_probes::fuzzing::TARGETS;

#[test]
fn every_kept_input_passes() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    for (name, target) in TARGETS {
        let mut inputs = 0;
        for entry in std::fs::read_dir(corpora.join(name)).unwrap_or_else(|error| panic!("{name}: {error}")) {
            let path = entry.unwrap().path();
            println!("{}", path.display());
            target(&std::fs::read(path).unwrap());
            inputs += 1;
        }
        assert!(inputs > 2, "{name}: only {inputs} inputs");
        // And what says nothing, or little.
        for length in 0..80 {
            target(&vec![0; length]);
            target(&vec![0xff; length]);
        }
    }
}
