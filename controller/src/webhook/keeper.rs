//! Keeps the certificate fresh, and the API server trusting it.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use kerf_telemetry::Pending;
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher::{self, Event};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_rustls::rustls::ServerConfig;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::bundle;
use super::identity::{Identity, IdentityError};
use crate::metrics::{Class, Metrics};

/// Field manager of the bundle.
const MANAGER: &str = "kerf-controller-webhook";

/// How long every API server may take to see that a new certificate is trusted, before it is served.
const SPREAD: Duration = Duration::from_secs(60);

/// Pause after a failure, doubled with each in a row.
const PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Keeps the API server trusting this replica.
pub struct Keeper {
    /// The configurations of webhooks.
    pub api: Api<ValidatingWebhookConfiguration>,
    /// The name of ours.
    pub name: String,
    /// What is served now.
    pub identity: Identity,
    /// Makes the next one.
    pub renew: Box<dyn Fn() -> Result<Identity, IdentityError> + Send + Sync>,
    /// Takes what is to be served.
    pub serving: watch::Sender<Arc<ServerConfig>>,
}

/// What is known of our configuration.
#[derive(Default)]
struct Seen {
    /// Whether it was looked for.
    listed: bool,
    /// `None`: there is none, and nobody asks.
    configuration: Option<ValidatingWebhookConfiguration>,
}

/// A new identity on its way.
struct Next {
    identity: Identity,
    /// When it may be served. `None`: it is not trusted yet.
    serve_at: Option<Instant>,
}

impl Keeper {
    /// Works until `stop`. `events` is a watch on our configuration; `pending` is dropped when what is served is trusted, or
    /// nobody would ask.
    pub async fn run(
        mut self,
        events: impl Stream<Item = watcher::Result<Event<ValidatingWebhookConfiguration>>>,
        metrics: Metrics,
        pending: Pending,
        stop: CancellationToken,
    ) {
        let mut events = pin!(events);
        let mut pending = Some(pending);
        let mut seen = Seen::default();
        let mut next: Option<Next> = None;
        let (mut pause, mut watch_pause) = (PAUSE, PAUSE);
        let mut retry: Option<Instant> = None;
        while !stop.is_cancelled() {
            if seen.listed && retry.is_none() {
                let stored = self.store(&mut seen, next.as_ref());
                match stop.run_until_cancelled(stored).await {
                    None => return,
                    Some(Ok(())) => {
                        pause = PAUSE;
                        drop(pending.take());
                        if let Some(next) = &mut next {
                            next.serve_at.get_or_insert_with(|| Instant::now() + SPREAD);
                        }
                    }
                    Some(Err(error)) => {
                        self.tell(&error, &metrics);
                        retry = Some(Instant::now() + pause);
                        pause = (pause * 2).min(LONGEST_PAUSE);
                    }
                }
            }
            let turn = next.as_ref().map_or(Some(self.identity.renew_at), |next| next.serve_at);
            tokio::select! {
                () = stop.cancelled() => return,
                event = events.next() => match event {
                    None => return,
                    Some(Ok(event)) => {
                        watch_pause = PAUSE;
                        seen.see(event, &self.name);
                    }
                    Some(Err(error)) => {
                        metrics.interrupted(&error);
                        warn!(error = &error as &dyn std::error::Error, "a watch was interrupted");
                        stop.run_until_cancelled(tokio::time::sleep(watch_pause)).await;
                        watch_pause = (watch_pause * 2).min(LONGEST_PAUSE);
                    }
                },
                () = at(retry) => retry = None,
                () = at(turn) => next = self.turn(next),
            }
        }
    }

    /// It is time to serve what is next, or, where nothing is, to make it.
    fn turn(&mut self, next: Option<Next>) -> Option<Next> {
        if let Some(Next { identity, .. }) = next {
            info!("the next certificate is served");
            self.serving.send_replace(identity.server.clone());
            self.identity = identity;
            return None;
        }
        match (self.renew)() {
            Ok(identity) => Some(Next { identity, serve_at: None }),
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "no new certificate can be made; the old one is kept");
                self.identity.renew_at = Instant::now() + LONGEST_PAUSE;
                None
            }
        }
    }

    /// Sees to it that the API server trusts our certificates, if it would ask us at all.
    async fn store(&self, seen: &mut Seen, next: Option<&Next>) -> kube::Result<()> {
        let own = [Some(&self.identity), next.map(|next| &next.identity)];
        let own: Vec<&str> = own.into_iter().flatten().map(|identity| identity.certificate.as_str()).collect();
        let Some(patch) = seen.configuration.as_ref().and_then(|configuration| bundle::patch(configuration, &own))
        else {
            return Ok(());
        };
        let patch = serde_json::from_value(patch).map_err(kube::Error::SerdeError)?;
        let manager = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        seen.configuration = Some(self.api.patch(&self.name, &manager, &Patch::<()>::Json(patch)).await?);
        info!(webhook = %self.name, "the API server trusts the certificate of this replica");
        Ok(())
    }

    /// That another replica was faster is no failure.
    fn tell(&self, error: &kube::Error, metrics: &Metrics) {
        if !matches!(error, kube::Error::Api(status) if status.code == 409) {
            metrics.failed(Class::of(error));
            let error = error as &dyn std::error::Error;
            warn!(error, webhook = %self.name, "the API server cannot be told which certificate to trust");
        }
    }
}

impl Seen {
    fn see(&mut self, event: Event<ValidatingWebhookConfiguration>, name: &str) {
        match event {
            Event::Init => *self = Seen::default(),
            Event::InitApply(configuration) | Event::Apply(configuration) => self.configuration = Some(configuration),
            Event::InitDone => self.listed = true,
            Event::Delete(_) => self.configuration = None,
        }
        if self.listed && self.configuration.is_none() {
            warn!(webhook = %name, "there is no ValidatingWebhookConfiguration of this name: nothing is refused at its creation");
        }
    }
}

/// Waits for the moment; for ever where there is none.
async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
