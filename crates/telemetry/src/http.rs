//! Serves what there is to see of a process over HTTP: `/healthz`, `/readyz`, `/metrics`.
//!
//! Whoever reaches the port may ask, so nobody may cost much: a connection is for one request, and is cut off after
//! ten seconds whatever it does. What is answered lies in memory; nothing here waits for a GPU, a disk or the API server.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::Readiness;

/// How long one connection may last. The kubelet gives a probe one second unless told otherwise, Prometheus a scrape ten.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long to wait when no connection can be accepted, as for want of file descriptors.
const PAUSE: Duration = Duration::from_secs(1);

const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const OPEN_METRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// The address cannot be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot serve on {address}, given by --http-address: {error}")]
pub struct BindError {
    /// The address.
    pub address: SocketAddr,
    /// What the system says.
    pub error: io::Error,
}

/// An address on which nothing is answered yet.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
}

/// What is shown.
struct Shown {
    readiness: Readiness,
    registry: Registry,
}

impl Server {
    /// Takes an address. Port 0 is any that is free; the log tells which.
    ///
    /// # Errors
    /// When the address is in use, or not one of this machine's.
    pub async fn bind(address: SocketAddr) -> Result<Server, BindError> {
        let failed = |error| BindError { address, error };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Server { listener, address })
    }

    /// Answers until `stop`:
    ///
    /// * `/healthz`: this process answers.
    /// * `/readyz`: 200 when `readiness` waits for nothing, else 503 and what is waited for.
    /// * `/metrics`: what is in `registry`, as OpenMetrics text.
    pub async fn serve(self, readiness: Readiness, registry: Registry, stop: CancellationToken) {
        let Server { listener, address } = self;
        info!(%address, "serving /healthz, /readyz and /metrics");
        let shown = Arc::new(Shown { readiness, registry });
        let work = async {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => drop(tokio::spawn(talk(stream, Arc::clone(&shown)))),
                    Err(error) => {
                        warn!(error = &error as &dyn std::error::Error, "no connection accepted");
                        tokio::time::sleep(PAUSE).await;
                    }
                }
            }
        };
        stop.run_until_cancelled(work).await;
    }
}

/// One connection with one request.
async fn talk(stream: TcpStream, shown: Arc<Shown>) {
    let service = service_fn(move |request: Request<_>| {
        let answer = shown.answer(request.method(), request.uri().path());
        async { Ok::<_, Infallible>(answer) }
    });
    let connection = http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(PATIENCE, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(error = &error as &dyn std::error::Error, "a connection failed"),
        Err(_) => debug!("a connection was cut off after {PATIENCE:?}"),
    }
}

impl Shown {
    fn answer(&self, method: &Method, path: &str) -> Response<Full<Bytes>> {
        if !matches!(*method, Method::GET | Method::HEAD) {
            let mut refusal = text(StatusCode::METHOD_NOT_ALLOWED, "GET and HEAD only\n".to_owned());
            refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return refusal;
        }
        match path {
            "/healthz" => text(StatusCode::OK, "ok\n".to_owned()),
            "/readyz" => match self.readiness.pending() {
                pending if pending.is_empty() => text(StatusCode::OK, "ok\n".to_owned()),
                pending => text(StatusCode::SERVICE_UNAVAILABLE, format!("waiting for: {}\n", pending.join(", "))),
            },
            "/metrics" => {
                let mut metrics = String::new();
                match encode(&mut metrics, &self.registry) {
                    Ok(()) => response(StatusCode::OK, OPEN_METRICS, metrics),
                    Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
                }
            }
            _ => text(StatusCode::NOT_FOUND, "there is /healthz, /readyz and /metrics\n".to_owned()),
        }
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    response(status, TEXT, body)
}

fn response(status: StatusCode, content_type: HeaderValue, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::task::JoinHandle;
    use tokio::time::Instant;

    use super::*;
    use crate::metrics;

    struct Served {
        address: SocketAddr,
        readiness: Readiness,
        stop: CancellationToken,
        serving: JoinHandle<()>,
    }

    async fn serve() -> Served {
        let server = Server::bind(([127, 0, 0, 1], 0).into()).await.unwrap();
        let (address, readiness, stop) = (server.address, Readiness::default(), CancellationToken::new());
        let serving = server.serve(readiness.clone(), metrics::registry("1.2.3"), stop.clone());
        Served { address, readiness, stop, serving: tokio::spawn(serving) }
    }

    impl Served {
        async fn ask(&self, what: &str) -> String {
            let mut stream = TcpStream::connect(self.address).await.unwrap();
            stream.write_all(format!("{what} HTTP/1.1\r\nHost: here\r\n\r\n").as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        }
    }

    fn is(answer: &str, status: &str, body: &str) {
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.ends_with(body), "{answer}");
    }

    #[tokio::test]
    async fn tells_what_is_pending_by_name() {
        let served = serve().await;
        is(&served.ask("GET /readyz").await, "200", "\r\n\r\nok\n");
        let pending = (served.readiness.wait_for("the kubelet"), served.readiness.wait_for("Leases"));
        is(&served.ask("GET /readyz").await, "503", "\r\n\r\nwaiting for: Leases, the kubelet\n");
        is(&served.ask("GET /healthz").await, "200", "\r\n\r\nok\n");
        drop(pending);
        is(&served.ask("GET /readyz?verbose").await, "200", "\r\n\r\nok\n");
    }

    #[tokio::test]
    async fn metrics_are_open_metrics() {
        let served = serve().await;
        let answer = served.ask("GET /metrics").await;
        is(&answer, "200", "kerf_build_info{version=\"1.2.3\"} 1\n# EOF\n");
        assert!(
            answer.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"),
            "{answer}"
        );
    }

    #[tokio::test]
    async fn what_is_not_there_and_not_allowed() {
        let served = serve().await;
        is(&served.ask("GET /").await, "404", "there is /healthz, /readyz and /metrics\n");
        is(&served.ask("POST /metrics").await, "405", "GET and HEAD only\n");
        is(&served.ask("HEAD /healthz").await, "200", "\r\n\r\n");
    }

    /// Neither the others nor the end wait for it, and it does not stay.
    #[tokio::test]
    async fn who_says_nothing_holds_up_nobody() {
        let served = serve().await;
        let mut silent = TcpStream::connect(served.address).await.unwrap();
        silent.write_all(b"GET /met").await.unwrap();
        is(&served.ask("GET /healthz").await, "200", "ok\n");
        let begun = Instant::now();
        tokio::time::pause();
        assert_eq!(silent.read(&mut [0; 64]).await.unwrap(), 0, "cut off");
        assert!(begun.elapsed() >= PATIENCE && begun.elapsed() < 2 * PATIENCE, "{:?}", begun.elapsed());
        tokio::time::resume();

        let _silent = TcpStream::connect(served.address).await.unwrap();
        served.stop.cancel();
        tokio::time::timeout(PATIENCE, served.serving).await.unwrap().unwrap();
        let error = TcpStream::connect(served.address).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[tokio::test]
    async fn an_address_that_is_taken_is_told_with_its_flag() {
        let served = serve().await;
        let error = Server::bind(served.address).await.unwrap_err().to_string();
        let wanted = format!("cannot serve on {}, given by --http-address: Address already in use", served.address);
        assert!(error.starts_with(&wanted), "{error}");
    }
}
