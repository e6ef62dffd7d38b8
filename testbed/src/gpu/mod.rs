//! What runs on GPUs: the content of a bundle ([`bundle`]), and its runner ([`mod@run`]), which goes into it as a program of its own.

pub mod bundle;
pub mod nccl_tests;
pub mod run;
