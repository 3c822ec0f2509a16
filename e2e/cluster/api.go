package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// dial connects from inside the network namespace. A socket belongs for good to the namespace of the thread that makes it, so
// one thread enters the namespace, connects, and is given up afterwards; it never leaves its goroutine.
func (n namespaces) dial(ctx context.Context, network, address string) (net.Conn, error) {
	type result struct {
		conn net.Conn
		err  error
	}
	results := make(chan result, 1)
	go func() {
		runtime.LockOSThread() // without unlocking: the thread ends with the goroutine
		if err := setNetwork(n.holder.PID); err != nil {
			results <- result{nil, err}
			return
		}
		dialer := net.Dialer{Timeout: 5 * time.Second}
		conn, err := dialer.DialContext(ctx, network, address)
		results <- result{conn, err}
	}()
	r := <-results
	return r.conn, r.err
}

// setNetwork moves the calling thread into a process's network namespace.
func setNetwork(pid int) error {
	file, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return err
	}
	defer file.Close()
	if _, _, code := syscall.RawSyscall(sysSetns, file.Fd(), syscall.CLONE_NEWNET, 0); code != 0 {
		return fmt.Errorf("setns: %w", code)
	}
	return nil
}

// answers reports whether something accepts connections at a TCP address inside.
func (n namespaces) answers(ctx context.Context, address string) error {
	conn, err := n.dial(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return conn.Close()
}

// healthy reports whether an HTTP endpoint inside says 200.
func (n namespaces) healthy(ctx context.Context, url string) error {
	transport := &http.Transport{DialContext: n.dial, DisableKeepAlives: true}
	_, err := get(ctx, &http.Client{Transport: transport, Timeout: 5 * time.Second}, url)
	return err
}

// apiClient speaks to the API server as the admin.
type apiClient struct {
	http *http.Client
}

func (c *cluster) apiClient(control namespaces) (apiClient, error) {
	pair, err := tls.LoadX509KeyPair(c.path("pki", "admin.crt"), c.path("pki", "admin.key"))
	if err != nil {
		return apiClient{}, err
	}
	authority, err := os.ReadFile(c.path("pki", "ca.crt"))
	if err != nil {
		return apiClient{}, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority)
	transport := &http.Transport{
		DialContext:       control.dial,
		TLSClientConfig:   &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}},
		DisableKeepAlives: true,
	}
	return apiClient{&http.Client{Transport: transport, Timeout: 5 * time.Second}}, nil
}

// get reads a path of the API server.
func (a apiClient) get(ctx context.Context, path string) ([]byte, error) {
	return get(ctx, a.http, "https://"+controlPlaneIP+":6443"+path)
}

func get(ctx context.Context, client *http.Client, url string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %.300s", url, response.Status, body)
	}
	return body, err
}

// nodeReady reports whether a node's kubelet has said since the given time that it is ready, and pods may be placed there.
func (a apiClient) nodeReady(ctx context.Context, name string, since time.Time) error {
	body, err := a.get(ctx, "/api/v1/nodes/"+name)
	if err != nil {
		return err
	}
	return checkNode(body, since)
}

// checkNode reads a Node object. A condition from before since is an earlier kubelet's word.
func checkNode(body []byte, since time.Time) error {
	var node struct {
		Spec struct {
			Taints []struct{ Key, Effect string }
		}
		Status struct {
			Conditions []struct {
				Type, Status, Message string
				LastHeartbeatTime     time.Time
			}
		}
	}
	if err := json.Unmarshal(body, &node); err != nil {
		return err
	}
	for _, taint := range node.Spec.Taints {
		if strings.HasPrefix(taint.Key, "node.kubernetes.io/") {
			return fmt.Errorf("it has the taint %s:%s", taint.Key, taint.Effect)
		}
	}
	for _, condition := range node.Status.Conditions {
		switch {
		case condition.Type != "Ready":
		case condition.LastHeartbeatTime.Before(since.Truncate(time.Second)): // the API has whole seconds
			return fmt.Errorf("its kubelet has not reported yet")
		case condition.Status != "True":
			return fmt.Errorf("%s", condition.Message)
		default:
			return nil
		}
	}
	return fmt.Errorf("it has no Ready condition yet")
}
