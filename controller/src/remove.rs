//! Takes away what would stay when kerf goes: the labels on Nodes, which nobody else removes, and the generated DeviceClasses.
//!
//! The controllers still run then, and would put everything back. So this takes their lease without waiting for its end: they
//! stop writing as soon as they see it, and none of them leads before [`HELD`] has passed. If kerf stays after all, one of them
//! leads again then and restores everything. A controller that is installed later does not wait.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::DeviceClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kerf_api::{GpuNode, names};
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::classes::{self, is_ours};
use crate::index::serves;
use crate::labels::{self, Found, Labels};
use crate::leader::Store;

/// How long no controller leads afterwards.
pub const HELD: Duration = Duration::from_secs(60);

/// Pause between two looks. A controller that was in the middle of a request has finished it by then.
const PAUSE: Duration = Duration::from_millis(500);

/// How often in a row nothing must be found. The first look after a clean one shows that nobody puts anything back.
const CLEAN: u32 = 2;

/// How long to try.
const PATIENCE: Duration = Duration::from_secs(90);

/// Why something is still there.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// The API server refused, or could not be reached.
    #[error("cannot {action}")]
    Request {
        /// What was tried.
        action: &'static str,
        /// What came back.
        source: kube::Error,
    },
    /// A class could not be deleted.
    #[error(transparent)]
    Class(#[from] classes::WriteError),
    /// Somebody puts back what is removed.
    #[error(
        "labels of Nodes or DeviceClasses that were removed are there again: {what}. Does another kerf run under this driver name?"
    )]
    ComesBack {
        /// One of them.
        what: String,
    },
}

/// Removes the labels that the controller has put on Nodes, and the DeviceClasses that it has made for `driver`.
///
/// # Errors
///
/// When something cannot be removed within a minute and a half.
pub async fn remove(client: &Client, driver: &str, store: &impl Store) -> Result<(), RemoveError> {
    let deadline = Instant::now() + PATIENCE;
    let mut clean = 0;
    loop {
        let round = async {
            hold(store).await?;
            sweep(client, driver).await
        };
        match round.await {
            Ok(None) => clean += 1,
            Ok(Some(what)) if Instant::now() >= deadline => return Err(RemoveError::ComesBack { what }),
            Ok(Some(_)) => clean = 0,
            Err(error) if Instant::now() >= deadline => return Err(error),
            Err(error) => {
                clean = 0;
                warn!(error = &error as &dyn std::error::Error, "will be tried again");
            }
        }
        if clean >= CLEAN {
            info!("nothing of kerf is left on Nodes and among DeviceClasses");
            return Ok(());
        }
        sleep(PAUSE).await;
    }
}

/// Takes the lease of the controllers, or keeps it.
async fn hold(store: &impl Store) -> Result<(), RemoveError> {
    let failed = |source| RemoveError::Request { action: "take the lease of the controllers", source };
    loop {
        let mut lease = store.get().await.map_err(failed)?.unwrap_or_default();
        lease.metadata.managed_fields = None;
        let now = MicroTime(Timestamp::now());
        let seconds = i32::try_from(HELD.as_secs()).ok();
        let before = lease.spec.take().unwrap_or_default();
        lease.spec = Some(LeaseSpec {
            holder_identity: Some(names::REMOVED.to_owned()),
            lease_duration_seconds: seconds,
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            ..before
        });
        if store.put(lease).await.map_err(failed)?.is_some() {
            return Ok(());
        }
    }
}

/// Removes what is there; something that was, if any.
async fn sweep(client: &Client, driver: &str) -> Result<Option<String>, RemoveError> {
    let mut found = None;
    let nodes: Api<Node> = Api::all(client.clone());
    let listed = nodes.list_metadata(&ListParams::default()).await;
    let listed = listed.map_err(|source| RemoveError::Request { action: "list the Nodes", source })?;
    let others = nodes_of_others(client, driver).await?;
    for node in listed {
        let owned = Found::of(&node.metadata).owned;
        let (name, Some(uid)) = (node.name_any(), node.metadata.uid) else { continue };
        if owned.is_empty() || others.contains(&name) {
            continue;
        }
        let wrote = labels::write(client, &name, &uid, Labels::new()).await;
        wrote.map_err(|source| RemoveError::Request { action: "remove the labels of a Node", source })?;
        info!(node = %name, labels = owned.len(), "removed the labels");
        found = Some(format!("labels of Node {name}"));
    }
    let api: Api<DeviceClass> = Api::all(client.clone());
    let generated = ListParams::default().labels(&format!("{}=true", names::LABEL_GENERATED));
    let listed = api.list(&generated).await;
    let listed = listed.map_err(|source| RemoveError::Request { action: "list the DeviceClasses", source })?;
    for class in listed.into_iter().filter(|class| is_ours(class, driver)) {
        classes::delete(&api, &class).await?;
        found = Some(format!("DeviceClass {}", class.name_any()));
    }
    Ok(found)
}

/// The nodes that another kerf in the cluster serves, and labels.
async fn nodes_of_others(client: &Client, driver: &str) -> Result<BTreeSet<String>, RemoveError> {
    match Api::<GpuNode>::all(client.clone()).list(&ListParams::default()).await {
        Ok(listed) => Ok(listed.iter().filter(|node| !serves(driver, node)).map(GpuNode::name_any).collect()),
        // The CustomResourceDefinition went first.
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(BTreeSet::new()),
        Err(source) => Err(RemoveError::Request { action: "list the GpuNodes", source }),
    }
}

/// Whether somebody else than `identity` holds the lease of the controllers: who leads has to look at it at once.
pub fn is_taken(lease: &Lease, identity: &str) -> bool {
    let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default();
    lease.metadata.name.as_deref() == Some(names::CONTROLLER) && holder != identity
}
