//! Which opaque configuration applies to a device, and whether kerf can do what it says.

use k8s_openapi::api::resource::v1::DeviceAllocationConfiguration;
use kerf_api::opaque::{DeviceConfig, GpuConfig, MigDeviceConfig, SharingStrategy, TimeSlice};

use super::{ClaimError, ConfigSource, base_request};
use crate::engine::DeviceName;

/// A decoded configuration of an allocation.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AppliedConfig {
    source: ConfigSource,
    /// Empty: for all requests.
    requests: Vec<String>,
    config: DeviceConfig,
}

/// Decodes this driver's configurations, in order of rising precedence: those of DeviceClasses, then the claim's own.
pub(super) fn decode(
    configs: &[DeviceAllocationConfiguration],
    driver: &str,
) -> Result<Vec<AppliedConfig>, ClaimError> {
    let mut decoded = Vec::new();
    for config in configs {
        let opaque = config.opaque.as_ref().ok_or(ClaimError::NotOpaque)?;
        if opaque.driver != driver {
            continue;
        }
        let source = if config.source == "FromClass" { ConfigSource::Class } else { ConfigSource::Claim };
        let malformed = |error| ClaimError::Malformed { source_of: source, driver: driver.to_owned(), error };
        decoded.push(AppliedConfig {
            source,
            requests: config.requests.clone().unwrap_or_default(),
            config: DeviceConfig::decode(&opaque.parameters.0).map_err(malformed)?,
        });
    }
    // The scheduler writes them in this order already; the API does not promise it.
    decoded.sort_by_key(|config| config.source == ConfigSource::Claim);
    Ok(decoded)
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
    /// Refuses what would have to change something on the GPU: kerf sets neither time slices nor MPS.
    pub(super) fn check_supported(&self) -> Result<(), ClaimError> {
        let source_of = self.source;
        let (strategy, interval, mps) = match &self.config {
            DeviceConfig::Gpu(GpuConfig { sharing: Some(sharing) }) => (
                sharing.strategy,
                sharing.time_slicing_config.as_ref().map(|config| config.interval.unwrap_or_default()),
                sharing.mps_config.is_some(),
            ),
            DeviceConfig::Mig(MigDeviceConfig { sharing: Some(sharing) }) => {
                (sharing.strategy, None, sharing.mps_config.is_some())
            }
            DeviceConfig::Gpu(GpuConfig { sharing: None }) | DeviceConfig::Mig(MigDeviceConfig { sharing: None }) => {
                return Ok(());
            }
        };
        match (strategy, interval, mps) {
            (SharingStrategy::TimeSlicing, _, true) | (SharingStrategy::Mps, Some(_), _) => {
                Err(ClaimError::Contradiction { source_of, strategy })
            }
            (SharingStrategy::Mps, None, _) => Err(ClaimError::MpsUnsupported { source_of }),
            (SharingStrategy::TimeSlicing, None | Some(TimeSlice::Default), false) => Ok(()),
            (SharingStrategy::TimeSlicing, Some(interval), false) => {
                Err(ClaimError::TimeSliceUnsupported { source_of, interval })
            }
        }
    }
}
