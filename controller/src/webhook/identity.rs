//! What a replica proves itself with: a key that never leaves it, and a certificate of that key.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose};
use tokio::time::Instant;
use tokio_rustls::rustls::pki_types::PrivatePkcs8KeyDer;
use tokio_rustls::rustls::{self, ServerConfig, crypto};

/// How far the API server's clock may be behind.
const SKEW: Duration = Duration::from_secs(3600);

/// No certificate can be made.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The key or the certificate cannot be generated.
    #[error("cannot generate a certificate")]
    Generate(#[from] rcgen::Error),
    /// TLS cannot be served with it.
    #[error("cannot serve TLS with a generated certificate")]
    Tls(#[from] rustls::Error),
}

/// A key and its certificate.
///
/// The certificate signs itself and may sign nothing else: who trusts it trusts this server under this name, and nobody that
/// it could vouch for.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The certificate, in PEM.
    pub certificate: String,
    /// Serves TLS with it.
    pub server: Arc<ServerConfig>,
    /// When there should be the next one: at half of its life.
    pub renew_at: Instant,
}

impl Identity {
    /// A new key with a certificate for the host name, good for `lifetime` from now on.
    ///
    /// # Errors
    ///
    /// When the name is none for a certificate, or the system gives no randomness.
    pub fn make(host: &str, lifetime: Duration) -> Result<Identity, IdentityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new([host.to_owned()])?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "kerf webhook");
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let now = SystemTime::now();
        params.not_before = (now - SKEW).into();
        params.not_after = (now + lifetime).into();
        let certificate = params.self_signed(&key)?;
        let pem = pem::encode(&pem::Pem::new("CERTIFICATE", certificate.der().to_vec()));
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        let server = ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key.into())?;
        Ok(Identity { certificate: pem, server: Arc::new(server), renew_at: Instant::now() + lifetime / 2 })
    }
}
