//! TLS for etcd. Supports a private certificate authority and client certificates.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use elasticrs_runtime::blocking::BlockingCalls;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{AlertDescription, CertificateError, ClientConfig, Error, OtherError, RootCertStore};

/// Paths of certificate files in PEM format.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Files {
    /// Certificate of the authority that signs the servers' certificates. `None` to use the authorities that the system
    /// trusts.
    pub ca_cert: Option<PathBuf>,
    /// This client's certificate and its private key.
    pub client: Option<(PathBuf, PathBuf)>,
}

impl fmt::Display for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ca_cert, client } = self;
        let named = ca_cert.iter().chain(client.iter().flat_map(|(cert, key)| [cert, key]));
        match named.map(|path| path.display().to_string()).collect::<Vec<_>>() {
            none if none.is_empty() => f.write_str("the system's list of trusted authorities"),
            some => f.write_str(&some.join(", ")),
        }
    }
}

/// Paths of the list of trusted authorities on Debian, Fedora, SUSE and Alpine.
const SYSTEM: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Contents of [`Files`]: the configuration for connections, and the certificates. They are kept to find out why
/// a server rejected the connection.
#[derive(Debug)]
pub(super) struct Identity {
    pub(super) config: Arc<ClientConfig>,
    roots: Arc<RootCertStore>,
    /// This client's certificate chain, and the path of its file. `None` if this client has no certificate.
    client: Option<(PathBuf, Vec<CertificateDer<'static>>)>,
}

thread_local! {
    /// Reads of certificate files in progress, keyed by the paths of the files.
    static READS: Rc<BlockingCalls<Files, Result<Arc<Identity>, String>>> = Rc::default();
}

/// Reads the files on a separate thread, because their file system may hang. The error is a message for the user.
pub(super) async fn load(files: &Files) -> Result<Arc<Identity>, String> {
    let owned = files.clone();
    let read = READS.with(Rc::clone).run("elasticrs-tls", files.clone(), move || identity(&owned).map(Arc::new)).await;
    read.unwrap_or_else(|error| Err(format!("could not read {files}: {error}")))
}

fn identity(files: &Files) -> Result<Identity, String> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let roots = Arc::new(roots(files.ca_cert.as_deref())?);
    let builder = builder.map_err(|error| error.to_string())?.with_root_certificates(Arc::clone(&roots));
    let mut shown = None;
    let mut config = match &files.client {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => {
            let unfit = |error: Error| format!("{} and {} do not fit: {error}", cert.display(), key.display());
            let key = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|error| {
                format!("{} holds no private key, or one with a passphrase: {error}", key.display())
            })?;
            let (_, chain) = shown.insert((cert.clone(), certificates(cert)?));
            builder.with_client_auth_cert(chain.clone(), key).map_err(unfit)?
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Identity { config: Arc::new(config), roots, client: shown })
}

fn roots(ca_cert: Option<&Path>) -> Result<RootCertStore, String> {
    let named = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    let system = || named.or_else(|| SYSTEM.iter().map(PathBuf::from).find(|path| exists(path)));
    let Some(path) = ca_cert.map(PathBuf::from).or_else(system) else {
        return Err("this system has no list of trusted authorities: name a CA certificate".into());
    };
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(certificates(&path)?);
    if added == 0 { Err(format!("{} holds no certificate of an authority", path.display())) } else { Ok(roots) }
}

#[allow(clippy::disallowed_methods, reason = "runs on the thread that `load` starts")]
fn exists(path: &Path) -> bool {
    path.exists()
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    match read {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(format!("{} holds no certificate", path.display())),
        Err(error) => Err(format!("{} holds no certificate: {error}", path.display())),
    }
}

#[allow(clippy::disallowed_methods, reason = "runs on the thread that `load` starts")]
fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("could not read {}: {error}", path.display()))
}

/// Returns a message for the user if this client's certificate has expired or is not valid yet.
///
/// The client checks this itself, because many servers send the same alert for every problem with a certificate.
fn out_of_time(identity: &Identity) -> Option<String> {
    let (cert, chain) = identity.client.as_ref()?;
    let roots = Arc::clone(&identity.roots);
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build().ok()?;
    let (own, others) = chain.split_first()?;
    let what = time_problem(&verifier.verify_client_cert(own, others, UnixTime::now()).err()?)?;
    Some(format!("it refused this client, whose certificate {} {what}, or this host's clock is wrong", cert.display()))
}

/// Returns `has expired` or `is not valid yet` if the error is that a certificate is not valid at present.
fn time_problem(error: &Error) -> Option<&'static str> {
    match error {
        Error::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
            Some("has expired")
        }
        Error::InvalidCertificate(CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. }) => {
            Some("is not valid yet")
        }
        _ => None,
    }
}

/// Returns a message that explains a TLS error to the user.
pub(super) fn explain(error: &Error, identity: &Identity) -> String {
    if let (Error::AlertReceived(_), Some(hint)) = (error, out_of_time(identity)) {
        return format!("{hint} ({error})");
    }
    if let Some(what) = time_problem(error) {
        return format!("its certificate {what}, or this host's clock is wrong ({error})");
    }
    let hint = match error {
        Error::InvalidMessage(_) => "it does not speak TLS",
        Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            "its certificate was not signed by an authority that is trusted here: ca_cert names one"
        }
        Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "its certificate is for another name",
        Error::InvalidCertificate(CertificateError::Other(OtherError(other)))
            if matches!(other.downcast_ref(), Some(webpki::Error::CaUsedAsEndEntity)) =>
        {
            "its certificate is that of an authority (CA:TRUE), which a server cannot use"
        }
        Error::AlertReceived(AlertDescription::HandshakeFailure) => {
            "it refused this client: does it ask for a certificate, or is its key neither RSA, P-256, P-384 nor Ed25519?"
        }
        Error::AlertReceived(_) => "it refused this client: does it ask for a certificate?",
        _ => return error.to_string(),
    };
    format!("{hint} ({error})")
}
