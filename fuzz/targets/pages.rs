#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringsight_probes::fuzzing::pages(data));
