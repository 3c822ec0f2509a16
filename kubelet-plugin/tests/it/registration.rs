//! Registration, with exactly the bytes that a kubelet sends.
//!
//! A client made of the same libraries as the server would prove nothing: they agree on what an authority may be, and the
//! kubelet does not ask them.

use std::path::Path;
use std::time::Duration;

use kerf_kubelet_plugin::paths::Paths;
use kerf_kubelet_plugin::registration::{self, KubeletVerdict};
use kerf_kubelet_plugin::socket;
use kerf_proto::registration::registration_client::RegistrationClient;
use kerf_proto::registration::{InfoRequest, RegistrationStatus};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::watch;

use crate::rpc;

const PATIENCE: Duration = Duration::from_secs(20);

// HTTP/2 frame types (RFC 9113 section 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;

#[derive(Debug, PartialEq)]
enum Answer {
    /// The gRPC message, without its prefix.
    Message(Vec<u8>),
    /// The stream or the connection was refused with this code.
    Refused(u32),
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A header in HPACK's plainest form, literal without indexing (RFC 7541 section 6.2.2).
fn header(name: &str, value: &str) -> Vec<u8> {
    assert!(name.len() < 127 && value.len() < 127, "longer ones need another form");
    [&[0, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
}

/// The authority that grpc-go makes of a socket's path: it escapes the slashes, and leaves `@` as it is.
fn kubelet_authority(path: &Path) -> String {
    path.display().to_string().replace('/', "%2F")
}

/// Calls GetInfo as the kubelet does, with the given authority.
async fn get_info(path: &Path, authority: &str) -> Answer {
    let headers = [
        header(":method", "POST"),
        header(":scheme", "http"),
        header(":path", "/pluginregistration.Registration/GetInfo"),
        header(":authority", authority),
        header("content-type", "application/grpc"),
        header("user-agent", "grpc-go/1.72.2"),
        header("te", "trailers"),
    ];
    let mut stream = UnixStream::connect(path).await.unwrap();
    let request = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(SETTINGS, 0, 0, &[]),
        frame(HEADERS, 0x4, 1, &headers.concat()),
        // An empty message, uncompressed; the end of the stream.
        frame(DATA, 0x1, 1, &[0; 5]),
    ];
    stream.write_all(&request.concat()).await.unwrap();
    tokio::time::timeout(PATIENCE, answer(&mut stream)).await.unwrap()
}

async fn answer(stream: &mut UnixStream) -> Answer {
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.unwrap();
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; length as usize];
        stream.read_exact(&mut payload).await.unwrap();
        let code = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().unwrap());
        match head[3] {
            DATA => return Answer::Message(payload[5..].to_vec()),
            RST_STREAM => return Answer::Refused(code(0)),
            GOAWAY => return Answer::Refused(code(4)),
            _ => {}
        }
    }
}

fn serve_at(path: &Path, paths: &Paths) -> (socket::SocketFile, watch::Receiver<KubeletVerdict>) {
    let (listener, file) = socket::listen(path).unwrap();
    let (sender, verdict) = watch::channel(KubeletVerdict::Unknown);
    let info = registration::plugin_info("gpu.nvidia.com", paths);
    tokio::spawn(registration::serve(listener, info, sender, std::future::pending()));
    (file, verdict)
}

#[tokio::test]
async fn the_kubelet_gets_its_answer() {
    let directory = tempfile::tempdir().unwrap();
    let paths = Paths::new(directory.path(), Path::new("/var/run/cdi"), "gpu.nvidia.com");
    let path = &paths.registration_socket;
    assert_eq!(path, &directory.path().join("plugins_registry/gpu.nvidia.com@reg.sock"));
    let _serving = serve_at(path, &paths);

    let Answer::Message(info) = get_info(path, &kubelet_authority(path)).await else { panic!("refused") };
    let info = String::from_utf8_lossy(&info).into_owned();
    assert!(info.contains("DRAPlugin") && info.contains("gpu.nvidia.com"), "{info:?}");
}

/// Shows that the test above can fail: the usual name of such a socket does not work.
#[tokio::test]
async fn without_the_at_sign_the_kubelet_is_refused() {
    const PROTOCOL_ERROR: u32 = 1;
    let directory = tempfile::tempdir().unwrap();
    let paths = Paths::new(directory.path(), Path::new("/var/run/cdi"), "gpu.nvidia.com");
    let path = directory.path().join("plugins_registry/gpu.nvidia.com-reg.sock");
    let _serving = serve_at(&path, &paths);

    assert_eq!(get_info(&path, &kubelet_authority(&path)).await, Answer::Refused(PROTOCOL_ERROR));
    assert!(matches!(get_info(&path, "localhost").await, Answer::Message(_)), "it is the authority that is refused");
}

#[tokio::test]
async fn what_the_plugin_says_and_hears() {
    let directory = tempfile::tempdir().unwrap();
    let paths = Paths::new(directory.path(), Path::new("/var/run/cdi"), "gpu.nvidia.com");
    let (_file, mut verdict) = serve_at(&paths.registration_socket, &paths);
    let mut kubelet = RegistrationClient::new(rpc::connect(&paths.registration_socket).await);

    let info = kubelet.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DRAPlugin", "gpu.nvidia.com"));
    assert_eq!(info.endpoint, directory.path().join("plugins/gpu.nvidia.com/dra.sock").display().to_string());
    assert_eq!(
        info.supported_versions,
        ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"],
        "the kubelet takes the first that it knows"
    );

    let refusal = RegistrationStatus { plugin_registered: false, error: "duplicate endpoint".into() };
    kubelet.notify_registration_status(refusal).await.unwrap();
    assert_eq!(*verdict.borrow_and_update(), KubeletVerdict::Refused("duplicate endpoint".into()));

    let registered = RegistrationStatus { plugin_registered: true, error: String::new() };
    kubelet.notify_registration_status(registered.clone()).await.unwrap();
    assert_eq!(*verdict.borrow_and_update(), KubeletVerdict::Registered);
    kubelet.notify_registration_status(registered).await.unwrap();
    assert!(!verdict.has_changed().unwrap(), "the same again is no news");
}
