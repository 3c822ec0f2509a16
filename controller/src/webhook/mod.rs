//! Tells at once who writes what kerf would refuse later: a validating admission webhook.
//!
//! ```text
//! kubectl ──▶ API server ──TLS──▶ server ──▶ review ──▶ check     (pure, the same words as on the node)
//!                 ▲ trusts          ▲ serves
//!             caBundle ◀── keeper ──┴─ identity
//! ```
//!
//! Every replica answers, whether it leads or not. It makes a certificate of its own, keeps the key in memory and nowhere
//! else, and adds the certificate to those that the API server trusts for this webhook.
//!
//! Architecture invariant: no Secret. A key that is stored would have to be read by this program's account, and could be
//! stolen with it.
//!
//! Architecture invariant: nothing is decided here that the node does not decide again. The webhook may be away.

mod args;
mod bundle;
mod check;
mod identity;
mod keeper;
mod review;
mod server;

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use kerf_telemetry::Pending;
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use args::WebhookArgs;
pub use bundle::{KEPT, patch};
pub use check::{Checked, check};
pub use identity::{Identity, IdentityError};
pub use keeper::Keeper;
pub use review::{Judge, NoReview};

use crate::metrics::Metrics;
use crate::watch::TURN;

/// What this process is not ready without. Slices are written without it.
pub const PENDING: &str = "webhook certificate";

/// How long a certificate is good for. One that leaks with a process's memory is not good for long.
const LIFETIME: Duration = Duration::from_secs(7 * 24 * 3600);

/// The webhook cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum WebhookError {
    /// The address cannot be had.
    #[error("cannot serve the webhook on {address}, given by --webhook-address: {error}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// What the system says.
        error: io::Error,
    },
    /// No certificate can be made.
    #[error("cannot make the webhook's certificate")]
    Identity(#[from] IdentityError),
}

/// An address on which nothing is answered yet.
#[derive(Debug)]
pub struct Webhook {
    listener: TcpListener,
    address: SocketAddr,
    name: String,
}

impl Webhook {
    /// Takes the address that is wanted; `None` where none is.
    ///
    /// # Errors
    ///
    /// When the address is in use, or not one of this machine's.
    pub async fn bind(args: WebhookArgs) -> Result<Option<Webhook>, WebhookError> {
        let Some(address) = args.webhook_address else { return Ok(None) };
        let failed = |error| WebhookError::Bind { address, error };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Some(Webhook { listener, address, name: args.webhook_name }))
    }

    /// Where it will be served.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers the API server until `stop`. `pending` is dropped when the API server can trust the answers.
    ///
    /// # Errors
    ///
    /// When no certificate can be made.
    pub async fn run(
        self,
        client: Client,
        namespace: String,
        driver: String,
        metrics: Metrics,
        pending: Pending,
        stop: CancellationToken,
    ) -> Result<(), WebhookError> {
        let Webhook { listener, address, name } = self;
        // What the API server calls a Service.
        let host = format!("{name}.{namespace}.svc");
        let identity = Identity::make(&host, LIFETIME)?;
        let (serving, served) = watch::channel(identity.server.clone());
        let api = Api::<ValidatingWebhookConfiguration>::all(client);
        let own = watcher::Config::default().timeout(TURN).fields(&format!("metadata.name={name}"));
        let events = watcher(api.clone(), own);
        let keeper = Keeper { api, name, identity, renew: Box::new(move || Identity::make(&host, LIFETIME)), serving };
        let keeping = keeper.run(events, metrics.clone(), pending, stop.clone());
        let judge = Judge { driver, metrics };
        tokio::join!(keeping, server::serve(listener, address, served, judge, stop));
        Ok(())
    }
}
