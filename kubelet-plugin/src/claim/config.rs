//! Which opaque configuration applies to a device, and whether kerf can do what it says.

use k8s_openapi::api::resource::v1::{DeviceAllocationConfiguration, DeviceClaimConfiguration};
use kerf_api::opaque::DeviceConfig;

use super::{ClaimError, ConfigSource, base_request};
use crate::engine::DeviceName;

/// A decoded configuration of an allocation.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AppliedConfig {
    source: ConfigSource,
    /// Empty: for all requests.
    requests: Vec<String>,
    /// Where its parameters are written.
    path: String,
    config: DeviceConfig,
}

/// Decodes this driver's configurations, in order of rising precedence: those of DeviceClasses, then the claim's own.
/// `written` are those in the claim's spec, to tell the place of what is wrong.
pub(super) fn decode(
    configs: &[DeviceAllocationConfiguration],
    written: &[DeviceClaimConfiguration],
    driver: &str,
) -> Result<Vec<AppliedConfig>, ClaimError> {
    let mut decoded = Vec::new();
    for config in configs {
        let opaque = config.opaque.as_ref().ok_or(ClaimError::NotOpaque)?;
        if opaque.driver != driver {
            continue;
        }
        let source = if config.source == "FromClass" { ConfigSource::Class } else { ConfigSource::Claim };
        let path = path(config, source, written);
        let read = DeviceConfig::decode(&opaque.parameters.0, &path);
        decoded.push(AppliedConfig {
            source,
            requests: config.requests.clone().unwrap_or_default(),
            config: read.map_err(|problems| ClaimError::Config { source_of: source, problems })?,
            path,
        });
    }
    // The scheduler writes them in this order already; the API does not promise it.
    decoded.sort_by_key(|config| config.source == ConfigSource::Claim);
    Ok(decoded)
}

/// Where the parameters of a configuration are written. The allocation has its text; its place in the claim is found by
/// that, and its place in the DeviceClass is not known here.
fn path(config: &DeviceAllocationConfiguration, source: ConfigSource, written: &[DeviceClaimConfiguration]) -> String {
    let same = |written: &DeviceClaimConfiguration| {
        let requests = (written.requests.as_deref(), config.requests.as_deref());
        written.opaque == config.opaque && requests.0.unwrap_or_default() == requests.1.unwrap_or_default()
    };
    let place = written.iter().position(same).filter(|_| source == ConfigSource::Claim);
    place.map_or("opaque.parameters".to_owned(), |place| format!("spec.devices.config[{place}].opaque.parameters"))
}

/// The last configuration that applies to a result. One that names the result's request, or the request whose
/// alternative it is, must fit the device; one for all requests applies where it fits.
pub(super) fn applying<'a>(
    configs: &'a [AppliedConfig],
    request: &str,
    device: &DeviceName,
) -> Result<Option<&'a AppliedConfig>, ClaimError> {
    let wanted = if device.as_partition().is_some() { "MigDeviceConfig" } else { "GpuConfig" };
    for config in configs.iter().rev() {
        let fits = config.config.kind() == wanted;
        let for_all = config.requests.is_empty();
        let named = config.requests.iter().any(|named| named == request || named == base_request(request));
        match (named, for_all, fits) {
            (true, _, true) | (_, true, true) => return Ok(Some(config)),
            (true, _, false) => {
                return Err(ClaimError::WrongKind {
                    source_of: config.source,
                    kind: config.config.kind(),
                    request: request.to_owned(),
                    device: device.to_string(),
                    wanted,
                });
            }
            (false, ..) => {}
        }
    }
    Ok(None)
}

impl AppliedConfig {
    /// Refuses what would have to change something on the GPU that kerf does not change.
    pub(super) fn check_supported(&self) -> Result<(), ClaimError> {
        match self.config.unsupported(&self.path) {
            problems if problems.is_empty() => Ok(()),
            problems => Err(ClaimError::Config { source_of: self.source, problems }),
        }
    }
}
