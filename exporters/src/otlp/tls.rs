//! TLS by rustls.

use std::sync::Arc;

use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{WebPkiServerVerifier, verify_server_name};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme, crypto,
};

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
    let mut given = Vec::new();
    if let Some(file) = &endpoint.tls.ca {
        given = certificates(file)?;
        for certificate in &given {
            roots.add(certificate.clone()).map_err(|cause| {
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
    let provider = Arc::new(crypto::ring::default_provider());
    let chain = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
        .build()
        .map_err(|cause| error(GENERAL, cause.to_string()))?;
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|cause| error(GENERAL, cause.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Verifier { chain, given }));
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

/// Trusts what rustls trusts, and a server whose own certificate was given, whoever signed it. `openssl req -x509` makes such a one: it is
/// an authority's, which rustls takes from no server. Its name is checked here; rustls checks its time before what is forgiven here. The
/// handshake proves that the server has its key.
#[derive(Debug)]
struct Verifier {
    chain: Arc<WebPkiServerVerifier>,
    /// Certificates that a variable names.
    given: Vec<CertificateDer<'static>>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        use CertificateError::{BadSignature, Other, UnknownIssuer};
        match self
            .chain
            .verify_server_cert(certificate, intermediates, name, ocsp, now)
        {
            Err(Error::InvalidCertificate(Other(_) | UnknownIssuer | BadSignature))
                if self.given.contains(certificate) =>
            {
                verify_server_name(&ParsedCertificate::try_from(certificate)?, name)?;
                Ok(ServerCertVerified::assertion())
            }
            result => result,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}

/// What helps against a failed handshake, as the end of its message.
pub(super) fn advice(failed: &std::io::Error) -> &'static str {
    let cause = failed.get_ref().and_then(|cause| cause.downcast_ref::<Error>());
    match cause {
        Some(Error::InvalidCertificate(CertificateError::NotValidForNameContext { presented, .. }))
            if presented.is_empty() =>
        {
            "; make it anew with names, e.g. openssl req -x509 … -addext subjectAltName=DNS:HOST"
        }
        _ => "",
    }
}
