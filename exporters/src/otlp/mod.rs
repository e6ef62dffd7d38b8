//! OTLP over gRPC and HTTP/protobuf.

pub mod encode;
pub(crate) mod group;
mod wire;
