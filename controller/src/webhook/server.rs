//! Serves reviews over TLS.
//!
//! Whoever reaches the port may ask, so nobody may cost much: connections are limited in number, a question in size and in
//! time, and who says nothing is cut off.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};

use super::review::Judge;

/// The path on which reviews are answered.
const PATH: &str = "/validate";

/// The longest review that is read. An object is at most 1.5 MiB in etcd's defaults, a review has it twice, JSON of a
/// program's own making may have more blanks.
const LONGEST: usize = 8 << 20;

/// How many connections there may be. An API server needs one or two.
const CONNECTIONS: usize = 64;

/// How long a handshake or the body of a question may take. The API server itself waits no longer for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a connection may be idle.
const IDLE: Duration = Duration::from_secs(90);

/// How long to wait when no connection can be accepted, as for want of file descriptors.
const PAUSE: Duration = Duration::from_secs(1);

/// Answers until `stop`, and then what was already asked. Each new connection gets the certificate that is in `identity`.
pub(super) async fn serve(
    listener: TcpListener,
    address: SocketAddr,
    identity: watch::Receiver<Arc<ServerConfig>>,
    judge: Judge,
    stop: CancellationToken,
) {
    info!(%address, "serving admission reviews");
    let (connections, free) = (TaskTracker::new(), Arc::new(Semaphore::new(CONNECTIONS)));
    let judge = Arc::new(judge);
    let accepting = async {
        while let Ok(place) = Arc::clone(&free).acquire_owned().await {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let acceptor = TlsAcceptor::from(Arc::clone(&identity.borrow()));
                    let (judge, stop) = (Arc::clone(&judge), stop.clone());
                    connections.spawn(async move {
                        talk(stream, acceptor, judge, stop).await;
                        drop(place);
                    });
                }
                Err(error) => {
                    warn!(error = &error as &dyn std::error::Error, "no connection accepted");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    };
    stop.run_until_cancelled(accepting).await;
    connections.close();
    if timeout(PATIENCE, connections.wait()).await.is_err() {
        debug!("connections were cut off");
    }
}

/// One connection, until the other side or `stop` ends it.
async fn talk(stream: TcpStream, acceptor: TlsAcceptor, judge: Arc<Judge>, stop: CancellationToken) {
    let handshake = timeout(PATIENCE, acceptor.accept(stream));
    let stream = match stop.run_until_cancelled(handshake).await {
        Some(Ok(Ok(stream))) => stream,
        Some(Ok(Err(error))) => {
            // An API server that does not trust the certificate yet, or a port scan.
            return debug!(error = &error as &dyn std::error::Error, "a handshake failed");
        }
        Some(Err(_)) | None => return,
    };
    let service = service_fn(move |request| {
        let judge = Arc::clone(&judge);
        async move { Ok::<_, Infallible>(respond(request, &judge).await) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(IDLE);
    let mut connection = pin!(http.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        debug!(error = &error as &dyn std::error::Error, "a connection failed");
    }
}

async fn respond(request: Request<Incoming>, judge: &Judge) -> Response<Full<Bytes>> {
    if request.uri().path() != PATH {
        return text(StatusCode::NOT_FOUND, format!("there is {PATH}\n"));
    }
    if request.method() != Method::POST {
        let mut refusal = text(StatusCode::METHOD_NOT_ALLOWED, "POST only\n".to_owned());
        refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("POST"));
        return refusal;
    }
    let body = match timeout(PATIENCE, Limited::new(request.into_body(), LONGEST).collect()).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(error)) => return text(StatusCode::BAD_REQUEST, format!("the body cannot be read: {error}\n")),
        Err(_) => return text(StatusCode::REQUEST_TIMEOUT, "the body does not come\n".to_owned()),
    };
    match judge.answer(&body) {
        Ok(answer) => response(StatusCode::OK, "application/json", answer.to_string()),
        Err(error) => text(StatusCode::BAD_REQUEST, format!("{error}\n")),
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    response(status, "text/plain; charset=utf-8", body)
}

fn response(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
