//! Names and bytes on the wire, written down by hand: the generated code must agree with what a kubelet sends.

use prost::Message;
use tonic::server::NamedService;

use crate::{dra, health, registration};

/// Field `number` of wire type 2 (length-delimited) with `content`.
fn bytes(number: u8, content: impl AsRef<[u8]>) -> Vec<u8> {
    let content = content.as_ref();
    [&[number << 3 | 2, u8::try_from(content.len()).unwrap()], content].concat()
}

/// Field `number` of wire type 0 (varint) with a `value` below 128.
fn varint(number: u8, value: u8) -> Vec<u8> {
    assert!(value < 128);
    vec![number << 3, value]
}

/// `message` encodes to `wire`, and `wire` decodes to `message`.
#[track_caller]
fn assert_wire<M: Message + PartialEq + Default + std::fmt::Debug>(message: &M, wire: &[Vec<u8>]) {
    let wire = wire.concat();
    assert_eq!(message.encode_to_vec(), wire);
    assert_eq!(&M::decode(wire.as_slice()).unwrap(), message);
}

#[test]
fn services_have_the_kubelets_names() {
    fn name<S: NamedService>() -> &'static str {
        S::NAME
    }
    use dra::{v1::dra_plugin_server as v1, v1beta1::dra_plugin_server as v1beta1};
    use health::v1::dra_resource_health_server as health_v1;
    use health::v1alpha1::dra_resource_health_server as health_v1alpha1;
    use registration::registration_server as registration;

    assert_eq!(name::<registration::RegistrationServer<()>>(), "pluginregistration.Registration");
    assert_eq!(name::<v1::DraPluginServer<()>>(), "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin");
    assert_eq!(name::<v1beta1::DraPluginServer<()>>(), "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin");
    assert_eq!(name::<health_v1::DraResourceHealthServer<()>>(), "v1.DRAResourceHealth");
    assert_eq!(name::<health_v1alpha1::DraResourceHealthServer<()>>(), "v1alpha1.DRAResourceHealth");
}

/// A supported version is the tail of the service's full name, after `k8s.io.kubelet.pkg.apis.dra.` for the DRA ones.
#[test]
fn supported_versions_fit_the_services() {
    use dra::{v1, v1beta1};
    use health::{v1 as health_v1, v1alpha1 as health_v1alpha1};

    let tail = |name: &'static str| name.trim_start_matches("k8s.io.kubelet.pkg.apis.dra.");
    assert_eq!(v1::SUPPORTED_VERSION, tail(v1::dra_plugin_server::SERVICE_NAME));
    assert_eq!(v1beta1::SUPPORTED_VERSION, tail(v1beta1::dra_plugin_server::SERVICE_NAME));
    assert_eq!(health_v1::SUPPORTED_VERSION, tail(health_v1::dra_resource_health_server::SERVICE_NAME));
    assert_eq!(health_v1alpha1::SUPPORTED_VERSION, tail(health_v1alpha1::dra_resource_health_server::SERVICE_NAME));
}

#[test]
fn registration_fields() {
    assert_wire(
        &registration::PluginInfo {
            r#type: "t".into(),
            name: "n".into(),
            endpoint: "e".into(),
            supported_versions: vec!["a".into(), "b".into()],
        },
        &[bytes(1, "t"), bytes(2, "n"), bytes(3, "e"), bytes(4, "a"), bytes(4, "b")],
    );
    assert_wire(
        &registration::RegistrationStatus { plugin_registered: true, error: "e".into() },
        &[varint(1, 1), bytes(2, "e")],
    );
    assert_wire(&registration::InfoRequest {}, &[]);
    assert_wire(&registration::RegistrationStatusResponse {}, &[]);
}

#[test]
fn dra_fields() {
    use dra::v1::*;

    let claim = Claim { namespace: "n".into(), uid: "u".into(), name: "c".into() };
    let claim_wire = [bytes(1, "n"), bytes(2, "u"), bytes(3, "c")];
    assert_wire(&claim, &claim_wire);
    let claim_wire = claim_wire.concat();
    assert_wire(&NodePrepareResourcesRequest { claims: vec![claim.clone()] }, &[bytes(1, &claim_wire)]);
    assert_wire(&NodeUnprepareResourcesRequest { claims: vec![claim] }, &[bytes(1, &claim_wire)]);

    let device = Device {
        request_names: vec!["r".into(), "s".into()],
        pool_name: "p".into(),
        device_name: "d".into(),
        cdi_device_ids: vec!["c".into()],
        share_id: Some("h".into()),
    };
    let device_wire = [bytes(1, "r"), bytes(1, "s"), bytes(2, "p"), bytes(3, "d"), bytes(4, "c"), bytes(5, "h")];
    assert_wire(&device, &device_wire);
    let prepared = NodePrepareResourceResponse { devices: vec![device], error: "e".into() };
    let prepared_wire = [bytes(1, device_wire.concat()), bytes(2, "e")];
    assert_wire(&prepared, &prepared_wire);
    let unprepared = NodeUnprepareResourceResponse { error: "e".into() };
    assert_wire(&unprepared, &[bytes(1, "e")]);

    // A map is a repeated message with the key in field 1 and the value in field 2.
    assert_wire(
        &NodePrepareResourcesResponse { claims: [("u".to_owned(), prepared)].into() },
        &[bytes(1, [bytes(1, "u"), bytes(2, prepared_wire.concat())].concat())],
    );
    assert_wire(
        &NodeUnprepareResourcesResponse { claims: [("u".to_owned(), unprepared)].into() },
        &[bytes(1, [bytes(1, "u"), bytes(2, bytes(1, "e"))].concat())],
    );
}

#[test]
fn absent_share_id_is_not_sent() {
    let device = dra::v1::Device { device_name: "d".into(), ..Default::default() };
    assert_wire(&device, &[bytes(3, "d")]);
}

#[test]
fn health_fields() {
    use health::v1::*;

    let device = DeviceIdentifier { pool_name: "p".into(), device_name: "d".into() };
    let device_wire = [bytes(1, "p"), bytes(2, "d")];
    assert_wire(&device, &device_wire);
    let health = DeviceHealth {
        device: Some(device),
        health: HealthStatus::Unhealthy.into(),
        last_updated_time: 3,
        health_check_timeout_seconds: 60,
        message: "m".into(),
    };
    let health_wire = [bytes(1, device_wire.concat()), varint(2, 2), varint(3, 3), varint(4, 60), bytes(5, "m")];
    assert_wire(&health, &health_wire);
    assert_wire(&NodeWatchResourcesResponse { devices: vec![health] }, &[bytes(1, health_wire.concat())]);
    assert_wire(&NodeWatchResourcesRequest {}, &[]);
    assert_eq!([HealthStatus::Unknown as i32, HealthStatus::Healthy as i32, HealthStatus::Unhealthy as i32], [0, 1, 2]);
}
