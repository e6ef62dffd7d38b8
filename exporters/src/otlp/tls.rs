//! TLS by rustls.

use std::sync::Arc;

use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

use super::config::{ConfigError, Endpoint, PemFile, Protocol};

/// What names trusted certificates where no variable does.
const GENERAL: &str = "OTEL_EXPORTER_OTLP_CERTIFICATE";

fn error(variable: &str, problem: String) -> ConfigError {
    ConfigError {
        variable: variable.to_owned(),
        problem,
    }
}

fn certificates(file: &PemFile) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
    let wrong = |cause| {
        let path = file.path.display();
        error(
            &file.variable,
            format!("cannot read certificates from {path}: {cause}"),
        )
    };
    let read = CertificateDer::pem_file_iter(&file.path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
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
    if let Some(file) = &endpoint.tls.ca {
        for certificate in certificates(file)? {
            roots.add(certificate).map_err(|cause| {
                let path = file.path.display();
                error(
                    &file.variable,
                    format!("{path} holds an unusable certificate: {cause}"),
                )
            })?;
        }
    } else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            let problem = "the system has no trusted certificates; install its ca-certificates package or name a PEM \
                           file here";
            return Err(error(GENERAL, problem.to_owned()));
        }
    }
    // Named here, so that another provider installed in the process changes nothing.
    let builder = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|cause| error(GENERAL, cause.to_string()))?
        .with_root_certificates(roots);
    let mut config = match &endpoint.tls.identity {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = certificates(certificate)?;
            let private = PrivateKeyDer::from_pem_file(&key.path).map_err(|cause| {
                let path = key.path.display();
                error(
                    &key.variable,
                    format!("cannot read a private key from {path}: {cause}"),
                )
            })?;
            builder.with_client_auth_cert(chain, private).map_err(|cause| {
                error(
                    &certificate.variable,
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
