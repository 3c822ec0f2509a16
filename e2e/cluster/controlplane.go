package main

import (
	"context"
	"fmt"
	"path/filepath"
)

const etcdURL = "http://127.0.0.1:2379"

// planControlPlane tells how the programs of the control plane are started.
func (c *cluster) planControlPlane(p component, built programs, inside namespaces) (plan, error) {
	api, err := c.apiClient(inside)
	if err != nil {
		return plan{}, err
	}
	with := c.effective(p)
	how := plan{command: []string{filepath.Join(built.kubernetes, "bin", p.name)}}
	listens := func(address string) func(context.Context) error {
		return func(ctx context.Context) error { return inside.answers(ctx, address) }
	}
	switch p.name {
	case "etcd":
		how.command = append(how.command, "--data-dir="+c.path("etcd"), "--listen-client-url="+etcdURL)
		how.ready = listens("127.0.0.1:2379")
	case "kube-apiserver":
		how.command = append(how.command, c.apiServerFlags()...)
		if len(with.RuntimeConfig) > 0 {
			how.command = append(how.command, "--runtime-config="+with.RuntimeConfig.String())
		}
		how.ready = func(ctx context.Context) error { _, err := api.get(ctx, "/readyz"); return err }
	case "kube-controller-manager":
		how.command = append(how.command, c.clientFlags(p.name)...)
		how.command = append(how.command,
			"--root-ca-file="+c.path("pki", "ca.crt"),
			"--service-account-private-key-file="+c.path("pki", "service-account.key"),
			"--use-service-account-credentials",
			"--cluster-signing-cert-file="+c.path("pki", "ca.crt"),
			"--cluster-signing-key-file="+c.path("pki", "ca.key"),
			"--allocate-node-cidrs=false",
			"--service-cluster-ip-range="+serviceRange)
		how.ready = listens("127.0.0.1:10257")
	case "kube-scheduler":
		how.command = append(how.command, c.clientFlags(p.name)...)
		how.ready = listens("127.0.0.1:10259")
	default:
		return plan{}, fmt.Errorf("%s is no program of the control plane", p.name)
	}
	if p.takesGates() && len(with.Gates) > 0 {
		how.command = append(how.command, "--feature-gates="+with.Gates.String())
	}
	how.command = append(how.command, with.Flags...)
	return how, nil
}

// clientFlags are common to the controller manager and the scheduler. There is one of each, so that none elects a leader.
func (c *cluster) clientFlags(name string) []string {
	config := c.kubeconfig(name)
	return []string{
		"--kubeconfig=" + config,
		"--authentication-kubeconfig=" + config,
		"--authorization-kubeconfig=" + config,
		"--bind-address=127.0.0.1",
		"--leader-elect=false",
	}
}

func (c *cluster) apiServerFlags() []string {
	pki := func(file string) string { return c.path("pki", file) }
	return []string{
		"--etcd-servers=" + etcdURL,
		"--bind-address=0.0.0.0",
		"--advertise-address=" + controlPlaneIP,
		"--secure-port=6443",
		"--tls-cert-file=" + pki("apiserver.crt"),
		"--tls-private-key-file=" + pki("apiserver.key"),
		"--client-ca-file=" + pki("ca.crt"),
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true",
		"--service-cluster-ip-range=" + serviceRange,
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + pki("service-account.pub"),
		"--service-account-signing-key-file=" + pki("service-account.key"),
		// Logs, exec and port-forward: by the node's address, since nothing resolves the nodes' names.
		"--kubelet-preferred-address-types=InternalIP,Hostname",
		"--kubelet-certificate-authority=" + pki("ca.crt"),
		"--kubelet-client-certificate=" + pki("apiserver-kubelet-client.crt"),
		"--kubelet-client-key=" + pki("apiserver-kubelet-client.key"),
		// Aggregated APIs and webhooks behind Services: straight to the pods' addresses.
		"--enable-aggregator-routing",
		"--requestheader-client-ca-file=" + pki("ca.crt"),
		"--requestheader-allowed-names=front-proxy",
		"--requestheader-username-headers=X-Remote-User",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file=" + pki("front-proxy.crt"),
		"--proxy-client-key-file=" + pki("front-proxy.key"),
	}
}
