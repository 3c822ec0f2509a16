package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
)

// A node's own folder holds what a real node has in /var/lib, /run and /etc. Inside the node's mount namespace those
// places are the node's own too, so that manifests with the usual hostPaths work.

// kubeletRoot is the kubelet's root folder as the machine sees it; the kubelet itself knows it as kubeletRootInside.
func (c *cluster) kubeletRoot(node string) string { return c.path(node, "kubelet") }

// cdiRoot is the folder that the node's containerd reads CDI specs from.
func (c *cluster) cdiRoot(node string) string { return c.path(node, "cdi") }

// hookRoot is the folder for programs that the node's container runtime runs.
func (c *cluster) hookRoot(node string) string { return c.path(node, "hooks") }

// containerdSocket is the address of the node's containerd. The shims of its containers carry it in their arguments, and it
// names the cluster: that is how leftover ones are found.
func (c *cluster) containerdSocket(node string) string { return c.path(node, "containerd.sock") }

const (
	kubeletRootInside = "/var/lib/kubelet"
	cdiRootInside     = "/var/run/cdi"
	hookRootInside    = "/var/lib/kerf"
)

// nodeMounts are the places inside a node's namespace that show its own folders instead of the machine's.
func (c *cluster) nodeMounts(node string) map[string]string {
	return map[string]string{
		kubeletRootInside:     c.kubeletRoot(node),
		cdiRootInside:         c.cdiRoot(node),
		hookRootInside:        c.hookRoot(node),
		"/run/containerd":     c.path(node, "run-containerd"), // sockets of the shims
		"/run/mount":          c.path(node, "run-mount"),      // what mount(8) notes
		"/var/lib/cni":        c.path(node, "cni", "results"),
		"/var/log/containers": c.path(node, "log", "containers"),
		"/var/log/pods":       c.path(node, "log", "pods"),
	}
}

// mountNode arranges the mounts in a node's namespace.
func (c *cluster) mountNode(node string, inside namespaces) error {
	for target, source := range c.nodeMounts(node) {
		if err := os.MkdirAll(source, 0o755); err != nil {
			return err
		}
		if err := inside.bind(source, target); err != nil {
			return err
		}
	}
	return c.mountNames(inside)
}

// mountNames gives a namespace its own host names, and no name server: a look-up of anything else fails at once instead
// of waiting for a server that can't be reached.
func (c *cluster) mountNames(inside namespaces) error {
	hosts := "127.0.0.1 localhost\n" + controlPlaneIP + " kubernetes.default.svc\n"
	for i, node := range c.Nodes {
		hosts += nodeIP(i) + " " + node + "\n"
	}
	for target, content := range map[string]string{"/etc/hosts": hosts, "/etc/resolv.conf": ""} {
		source := c.path(filepath.Base(target))
		if err := writeFile(source, []byte(content), 0o644); err != nil {
			return err
		}
		if _, err := os.Stat(target); err != nil {
			continue // this machine has none to hide
		}
		if err := inside.bind(source, target); err != nil {
			return err
		}
	}
	return nil
}

// planNode tells how the programs of a node are started.
func (c *cluster) planNode(p component, built programs, inside namespaces) (plan, error) {
	number := c.nodeNumber(p.node)
	with := c.effective(p)
	var how plan
	switch p.name {
	case "containerd":
		runc, err := exec.LookPath("runc")
		if err != nil {
			return plan{}, err
		}
		config, network := c.path(p.node, "containerd.toml"), c.path(p.node, "cni", "net.d", "10-pods.conflist")
		how.files = map[string]string{config: c.containerdConfig(p.node, built, runc), network: c.podNetwork(p.node, number)}
		how.command = []string{filepath.Join(built.containerd, "containerd"), "--config=" + config}
		how.ready = func(ctx context.Context) error {
			conn, err := (&net.Dialer{}).DialContext(ctx, "unix", c.containerdSocket(p.node))
			if err != nil {
				return err
			}
			return conn.Close()
		}
	case "kubelet":
		config := c.path(p.node, "kubelet.yaml")
		how.files = map[string]string{config: c.kubeletConfig(p.node, number, with.Gates)}
		how.command = []string{
			filepath.Join(built.kubernetes, "bin", p.name),
			"--config=" + config,
			"--kubeconfig=" + c.kubeconfig(kubeletIdentity(p.node)),
			"--root-dir=" + kubeletRootInside,
			"--hostname-override=" + p.node,
			"--node-ip=" + nodeIP(number),
			"--v=2",
		}
		how.ready = func(ctx context.Context) error { return inside.healthy(ctx, "http://127.0.0.1:10248/healthz") }
	case "kube-proxy":
		config := c.path(p.node, "kube-proxy.yaml")
		how.files = map[string]string{config: c.proxyConfig(p.node, with.Gates)}
		how.command = []string{filepath.Join(built.kubernetes, "bin", p.name), "--config=" + config}
		how.ready = func(ctx context.Context) error { return inside.answers(ctx, "127.0.0.1:10256") }
	default:
		return plan{}, fmt.Errorf("%s is no program of a node", p.name)
	}
	how.command = append(how.command, with.Flags...)
	return how, nil
}

// containerdConfig: CDI on, with the node's own spec folder only; cgroups as files, no AppArmor, no NRI (its socket would be
// the machine's); and no negative oom_score_adj, which a root without CAP_SYS_RESOURCE may not set (runc would fail with
// nothing but "EOF").
func (c *cluster) containerdConfig(node string, built programs, runc string) string {
	return fmt.Sprintf(`version = 3
root = "%[1]s/containerd/root"
state = "%[1]s/containerd/state"

[grpc]
  address = "%[2]s"

[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "%[3]s"

[plugins.'io.containerd.cri.v1.runtime']
  enable_cdi = true
  cdi_spec_dirs = ["%[4]s"]
  disable_apparmor = true
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["%[5]s"]
    conf_dir = "%[1]s/cni/net.d"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = "%[6]s"
      SystemdCgroup = false

[plugins.'io.containerd.grpc.v1.cri']
  disable_tcp_service = true
  stream_server_address = "127.0.0.1"

[plugins.'io.containerd.nri.v1.nri']
  disable = true

[plugins.'io.containerd.internal.v1.opt']
  path = "%[1]s/containerd/opt"
`, c.path(node), c.containerdSocket(node), pauseImage, c.cdiRoot(node), built.cni, runc)
}

// podNetwork is a bridge of the node's own, whose pods keep their addresses towards everyone.
func (c *cluster) podNetwork(node string, number int) string {
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": "pods",
  "plugins": [
    {
      "type": "bridge",
      "bridge": "pods0",
      "isGateway": true,
      "hairpinMode": true,
      "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": "%s"}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": "%s"
      }
    }
  ]
}
`, podSubnet(number), c.path(node, "cni", "addresses"))
}

// kubeletConfig: no limit that a full test machine could trip over, cgroups of version 1 allowed, and no DNS.
func (c *cluster) kubeletConfig(node string, number int, gates switches) string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: %[1]s
healthzBindAddress: 127.0.0.1
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: %[2]s/ca.crt}
authorization: {mode: Webhook}
tlsCertFile: %[2]s/%[3]s.crt
tlsPrivateKeyFile: %[2]s/%[3]s.key
containerRuntimeEndpoint: unix://%[4]s
cgroupDriver: cgroupfs
cgroupRoot: %[5]s
failCgroupV1: false
failSwapOn: false
makeIPTablesUtilChains: false
localStorageCapacityIsolation: false
evictionHard: {memory.available: 100Mi, nodefs.available: 1%%, imagefs.available: 1%%}
imageGCHighThresholdPercent: 100
registryPullQPS: 0
resolvConf: ""
featureGates: %[6]s
`, nodeIP(number), c.path("pki"), kubeletIdentity(node), c.containerdSocket(node), c.cgroup(node), gates.yaml())
}

// proxyConfig: the conntrack settings are the machine's, and stay as they are.
func (c *cluster) proxyConfig(node string, gates switches) string {
	return fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clientConnection: {kubeconfig: %s}
clusterCIDR: %s
hostnameOverride: %s
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
featureGates: %s
`, c.kubeconfig("kube-proxy"), podRange, node, gates.yaml())
}
