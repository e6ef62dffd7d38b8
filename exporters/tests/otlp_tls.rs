//! TLS: custom certificate authorities, client certificates, and everything that is wrong with them.

#![allow(clippy::disallowed_methods, reason = "tests play whoever else writes there")]

mod otlp_common;
mod otlp_server;

use std::fs;
use std::path::Path;
use std::time::Duration;

use otlp_common::{plain_span, resource};
use otlp_server::{GrpcServer, eventually};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use ringsight_exporters::model::{Batch, Exporter, Signal};
use ringsight_exporters::otlp::{Config, ConfigError, OtlpExporter, Protocol};

/// An authority of the test's own and what it signed, as PEM text.
struct Pki {
    ca: CertifiedIssuer<'static, KeyPair>,
}

impl Pki {
    fn new() -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self {
            ca: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap(),
        }
    }

    fn issue(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new([name.to_owned()])
            .unwrap()
            .signed_by(&key, &self.ca)
            .unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    fn server(&self, name: &str, clients: Option<&Self>) -> GrpcServer {
        let (certificate, key) = self.issue(name);
        let client_ca = clients.map(|clients| clients.ca.pem());
        GrpcServer::start_with(
            vec![],
            Some(otlp_server::tls(&certificate, &key, client_ca.as_deref())),
        )
    }
}

fn file(directory: &Path, name: &str, text: &str) -> String {
    let path = directory.join(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn exporter(server: &GrpcServer, variables: &[(&str, String)]) -> Result<OtlpExporter, ConfigError> {
    let get = |name: &str| {
        let suffix = name.strip_prefix("OTEL_EXPORTER_OTLP_")?;
        variables
            .iter()
            .find(|(key, _)| *key == suffix)
            .map(|(_, value)| value.clone())
    };
    OtlpExporter::new(&Config::from_variables(
        Some(&server.url),
        Some(Protocol::Grpc),
        &get,
    )?)
}

fn span() -> Batch {
    Batch {
        spans: vec![plain_span(&resource("rank 0"), 1)],
        ..Batch::default()
    }
}

fn delivered(mut exporter: OtlpExporter) {
    exporter.export(&span());
    exporter.shutdown(Duration::from_secs(20)).unwrap();
    assert_eq!(exporter.stats()[Signal::Traces].delivered, 1);
}

/// The error that delivering meets.
fn failure(mut exporter: OtlpExporter) -> String {
    exporter.export(&span());
    eventually("an error", || exporter.stats().last_error.is_some());
    assert!(exporter.shutdown(Duration::from_millis(1)).is_err());
    assert_eq!(exporter.stats()[Signal::Traces].delivered, 0);
    exporter.stats().last_error.unwrap()
}

#[test]
fn a_server_of_a_custom_authority_is_trusted_when_that_is_named_and_only_then() {
    let (pki, other) = (Pki::new(), Pki::new());
    let directory = tempfile::tempdir().unwrap();
    let right = file(directory.path(), "ca.pem", &pki.ca.pem());
    let wrong = file(directory.path(), "other.pem", &other.ca.pem());
    let server = pki.server("localhost", None);
    delivered(exporter(&server, &[("CERTIFICATE", right.clone())]).unwrap());
    let error = failure(exporter(&server, &[("CERTIFICATE", wrong)]).unwrap());
    assert!(
        error.contains("TLS handshake failed") && error.contains("certificate"),
        "{error}"
    );

    let server = pki.server("elsewhere.example", None);
    let error = failure(exporter(&server, &[("CERTIFICATE", right)]).unwrap());
    assert!(error.contains("not valid for name"), "{error}");
}

/// A certificate that signs itself, as PEM text with its key. `openssl req -x509` makes it an authority's.
fn self_signed(names: &[&str], is_ca: bool, change: fn(&mut CertificateParams)) -> (String, String) {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    if is_ca {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    }
    change(&mut params);
    let key = KeyPair::generate().unwrap();
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

#[test]
fn a_servers_own_certificate_is_trusted_when_it_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let expired: fn(&mut CertificateParams) = |params| params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    let issued = Pki::new().issue("localhost");
    for (what, (certificate, key), problem) in [
        ("an authority's", self_signed(&["localhost"], true, |_| ()), None),
        ("nobody's", self_signed(&["localhost"], false, |_| ()), None),
        ("an unknown authority's", issued, None),
        (
            "another name's",
            self_signed(&["elsewhere.example"], true, |_| ()),
            Some("not valid for name"),
        ),
        (
            "no name's",
            self_signed(&[], true, |_| ()),
            Some("-addext subjectAltName=DNS:"),
        ),
        (
            "too old an authority's",
            self_signed(&["localhost"], true, expired),
            Some("expired"),
        ),
    ] {
        let server = GrpcServer::start_with(vec![], Some(otlp_server::tls(&certificate, &key, None)));
        let own = file(directory.path(), "own.pem", &certificate);
        let named = exporter(&server, &[("CERTIFICATE", own)]).unwrap();
        match problem {
            None => delivered(named),
            Some(problem) => {
                let error = failure(named);
                assert!(error.contains(problem), "{what}: {error}");
            }
        }
        // One like it, with another key, is another one.
        let (other, _) = self_signed(&["localhost"], true, |_| ());
        let other = file(directory.path(), "other.pem", &other);
        let error = failure(exporter(&server, &[("CERTIFICATE", other)]).unwrap());
        assert!(error.contains("TLS handshake failed"), "{what}: {error}");
    }
}

#[test]
fn a_client_certificate_is_shown() {
    let (pki, clients) = (Pki::new(), Pki::new());
    let directory = tempfile::tempdir().unwrap();
    let (certificate, key) = clients.issue("collector");
    let ca = ("CERTIFICATE", file(directory.path(), "ca.pem", &pki.ca.pem()));
    let identity = [
        (
            "CLIENT_CERTIFICATE",
            file(directory.path(), "client.pem", &certificate),
        ),
        ("CLIENT_KEY", file(directory.path(), "client.key", &key)),
    ];
    let server = pki.server("localhost", Some(&clients));
    let with_identity = [&[ca.clone()][..], &identity].concat();
    delivered(exporter(&server, &with_identity).unwrap());
    failure(exporter(&server, &[ca]).unwrap());
}

#[test]
fn plain_text_to_a_tls_server_is_an_error() {
    let server = Pki::new().server("localhost", None);
    let plain = server.url.replace("https://", "http://");
    let config = Config::from_variables(Some(&plain), Some(Protocol::Grpc), &|_| None).unwrap();
    failure(OtlpExporter::new(&config).unwrap());
}

#[test]
fn unusable_files_are_named_with_their_variable() {
    let pki = Pki::new();
    let server = pki.server("localhost", None);
    let directory = tempfile::tempdir().unwrap();
    let (certificate, key) = pki.issue("collector");
    let certificate = file(directory.path(), "client.pem", &certificate);
    let stranger = file(
        directory.path(),
        "other.key",
        &KeyPair::generate().unwrap().serialize_pem(),
    );
    let key = file(directory.path(), "client.key", &key);
    let empty = file(directory.path(), "empty.pem", "");
    let rubbish = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let rubbish = file(directory.path(), "rubbish.pem", rubbish);
    let absent = "/nonexistent/ca.pem".to_owned();
    for (variables, variable, problem) in [
        (
            vec![("CERTIFICATE", absent.clone())],
            "CERTIFICATE",
            "/nonexistent/ca.pem",
        ),
        // The variable that was set, not the general one; the other signal's goes on with its own.
        (
            vec![("METRICS_CERTIFICATE", absent)],
            "METRICS_CERTIFICATE",
            "/nonexistent/ca.pem",
        ),
        (
            vec![("TRACES_CERTIFICATE", empty.clone())],
            "TRACES_CERTIFICATE",
            "holds no PEM certificate",
        ),
        (
            vec![
                ("TRACES_CLIENT_CERTIFICATE", certificate.clone()),
                ("TRACES_CLIENT_KEY", stranger.clone()),
            ],
            "TRACES_CLIENT_CERTIFICATE",
            "does not go with the client key",
        ),
        (
            vec![
                ("CLIENT_CERTIFICATE", certificate.clone()),
                ("CLIENT_KEY", key.clone()),
                ("TRACES_CLIENT_KEY", empty.clone()),
            ],
            "TRACES_CLIENT_KEY",
            "cannot read a private key",
        ),
        (
            vec![("CERTIFICATE", empty.clone())],
            "CERTIFICATE",
            "holds no PEM certificate",
        ),
        (
            vec![("CERTIFICATE", rubbish)],
            "CERTIFICATE",
            "unusable certificate",
        ),
        (
            vec![("CLIENT_CERTIFICATE", certificate.clone()), ("CLIENT_KEY", empty)],
            "CLIENT_KEY",
            "cannot read a private key",
        ),
        (
            vec![
                ("CLIENT_CERTIFICATE", certificate.clone()),
                ("CLIENT_KEY", stranger),
            ],
            "CLIENT_CERTIFICATE",
            "does not go with the client key",
        ),
        (
            vec![("CLIENT_CERTIFICATE", certificate)],
            "CLIENT_CERTIFICATE",
            "without the CLIENT_KEY",
        ),
        (
            vec![("CLIENT_KEY", key)],
            "CLIENT_KEY",
            "without the CLIENT_CERTIFICATE",
        ),
    ] {
        // The system's roots, where the case has no file of its own, need not be there.
        let mut variables = variables;
        if !variables.iter().any(|(name, _)| *name == "CERTIFICATE") {
            variables.push(("CERTIFICATE", file(directory.path(), "ca.pem", &pki.ca.pem())));
        }
        let error = exporter(&server, &variables).err().unwrap();
        assert_eq!(
            error.variable,
            format!("OTEL_EXPORTER_OTLP_{variable}"),
            "{error}"
        );
        assert!(error.problem.contains(problem), "{error}");
    }
}
