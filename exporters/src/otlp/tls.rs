//! TLS by rustls.

use std::path::Path;
use std::sync::Arc;

use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

use super::config::{ConfigError, Endpoint, Protocol};

fn error(variable: &str, problem: String) -> ConfigError {
    ConfigError {
        variable: format!("OTEL_EXPORTER_OTLP_{variable}"),
        problem,
    }
}

fn certificates(variable: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
    let wrong = |cause| {
        error(
            variable,
            format!("cannot read certificates from {}: {cause}", path.display()),
        )
    };
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let certificates = read.map_err(|cause| wrong(cause.to_string()))?;
    if certificates.is_empty() {
        return Err(wrong("it holds no PEM certificate".to_owned()));
    }
    Ok(certificates)
}

/// A connector for `endpoint`, `None` if it does not use TLS. The files are read now.
pub(super) fn connector(endpoint: &Endpoint) -> Result<Option<TlsConnector>, ConfigError> {
    if !endpoint.is_tls() {
        return Ok(None);
    }
    let mut roots = RootCertStore::empty();
    if let Some(path) = &endpoint.tls.ca {
        for certificate in certificates("CERTIFICATE", path)? {
            roots.add(certificate).map_err(|cause| {
                error(
                    "CERTIFICATE",
                    format!("{} holds an unusable certificate: {cause}", path.display()),
                )
            })?;
        }
    } else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            let problem = "the system has no trusted certificates; install its ca-certificates package or name a PEM \
                           file here";
            return Err(error("CERTIFICATE", problem.to_owned()));
        }
    }
    // Named here, so that another provider installed in the process changes nothing.
    let builder = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|cause| error("CERTIFICATE", cause.to_string()))?
        .with_root_certificates(roots);
    let mut config = match &endpoint.tls.identity {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = certificates("CLIENT_CERTIFICATE", certificate)?;
            let key = PrivateKeyDer::from_pem_file(key).map_err(|cause| {
                error(
                    "CLIENT_KEY",
                    format!("cannot read a private key from {}: {cause}", key.display()),
                )
            })?;
            builder.with_client_auth_cert(chain, key).map_err(|cause| {
                error(
                    "CLIENT_CERTIFICATE",
                    format!("does not go with the client key: {cause}"),
                )
            })?
        }
    };
    config.alpn_protocols = match endpoint.protocol {
        Protocol::Grpc => vec![b"h2".to_vec()],
        Protocol::HttpProtobuf => vec![b"http/1.1".to_vec()],
    };
    Ok(Some(TlsConnector::from(Arc::new(config))))
}
