package main

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
)

// cluster in a folder of the test's own.
func testCluster(t *testing.T, nodes ...string) *cluster {
	t.Helper()
	return &cluster{name: "test", dir: t.TempDir(), settings: settings{Kubernetes: "1.36.3", Nodes: nodes, Gates: switches{"A": "true"}}}
}

func TestFlagsMayStandAnywhere(t *testing.T) {
	set, name := flagSet("restart")
	node := set.String("node", "", "")
	words, rest, err := parse(set, []string{"--name", "x", "kubelet", "--node=node-a", "--", "--v=4", "--node=b"})
	if err != nil || *name != "x" || *node != "node-a" || !slices.Equal(words, []string{"kubelet"}) || !slices.Equal(rest, []string{"--v=4", "--node=b"}) {
		t.Errorf("name %q, node %q, words %q, rest %q, error %v", *name, *node, words, rest, err)
	}
	set, _ = flagSet("up")
	if _, _, err := parse(set, []string{"--nope"}); !errors.Is(err, errUsage) {
		t.Errorf("unknown flag: %v, want a usage error", err)
	}
}

func TestSettingsRefuseWhatCannotWork(t *testing.T) {
	if s, _, err := readSettings("v1.35.4", "dra", "", "node-a,node-b"); err != nil || s.Kubernetes != "1.35.4" || len(s.Nodes) != 2 {
		t.Errorf("settings %+v, error %v", s, err)
	}
	for _, c := range [][4]string{
		{"1.20.0", "", "", "a"},
		{"1.36.3", "x", "", "a"},
		{"1.36.3", "", "x", "a"},
		{"1.36.3", "", "", "a,a"},
		{"1.36.3", "", "", "Node"},
		{"1.36.3", "", "", "../x"},
		{"1.36.3", "", "", "pki"},
		{"1.36.3", "", "", "a-name-far-too-long"},
		{"1.36.3", "", "", strings.Repeat("n,", maxNodes+1)},
	} {
		if _, _, err := readSettings(c[0], c[1], c[2], c[3]); !errors.Is(err, errUsage) {
			t.Errorf("settings %q: %v, want a usage error", c, err)
		}
	}
}

func TestStateFolderKeepsSocketsShort(t *testing.T) {
	t.Setenv("KERF_CLUSTER_DIR", "")
	c, err := openCluster("main")
	if err != nil || c.dir != "/var/lib/kerf-e2e/main" {
		t.Fatalf("folder %v, error %v", c, err)
	}
	for _, base := range []string{"/" + strings.Repeat("x", 60), "relative", "/with blank", "/quote\""} {
		t.Setenv("KERF_CLUSTER_DIR", base)
		if c, err := openCluster("main"); !errors.Is(err, errUsage) {
			t.Errorf("folder %q gives %v, %v; want a usage error", base, c, err)
		}
	}
	t.Setenv("KERF_CLUSTER_DIR", "/"+strings.Repeat("x", 27))
	c, err = openCluster("main")
	if err != nil {
		t.Fatal(err)
	}
	if socket := c.kubeletRoot("node-name-of-15") + "/plugins_registry/gpu.nvidia.com@reg.sock"; len(socket) > 107 {
		t.Errorf("%s has %d bytes, a socket address ends at 107", socket, len(socket))
	}
}

func TestSettingsSurviveSaving(t *testing.T) {
	c := testCluster(t, "node-a")
	c.Overrides = map[string]override{"kube-apiserver": {Gates: switches{}}}
	if err := c.save(); err != nil {
		t.Fatal(err)
	}
	again := &cluster{name: c.name, dir: c.dir}
	if exists, err := again.load(); err != nil || !exists {
		t.Fatalf("exists %v, error %v", exists, err)
	}
	// An override by no gates at all is not the same as none.
	if got := again.effective(component{"kube-apiserver", ""}).Gates.String(); got != "" {
		t.Errorf("gates of the API server %q, want none", got)
	}
	if got := again.effective(component{"kubelet", "node-a"}).Gates.String(); got != "A=true" {
		t.Errorf("gates of the kubelet %q, want the cluster's", got)
	}
}

func TestRestartChangesOneComponent(t *testing.T) {
	c := testCluster(t, "node-a", "node-b")
	set, _ := flagSet("restart")
	set.String("feature-gates", "", "")
	set.String("runtime-config", "", "")
	if err := set.Parse([]string{"--feature-gates=DRADeviceTaintRules=true"}); err != nil {
		t.Fatal(err)
	}
	parts, err := c.choose("kube-apiserver", "")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.change(parts, set, "DRADeviceTaintRules=true", "", []string{"--v=4"}); err != nil {
		t.Fatal(err)
	}
	got := c.effective(component{"kube-apiserver", ""})
	if got.Gates.String() != "A=true,DRADeviceTaintRules=true" || got.RuntimeConfig.String() != "resource.k8s.io/v1beta2=true" || !slices.Equal(got.Flags, []string{"--v=4"}) {
		t.Errorf("API server starts with %+v", got)
	}
	if got := c.effective(component{"kube-scheduler", ""}); got.Gates.String() != "A=true" || got.Flags != nil {
		t.Errorf("scheduler starts with %+v", got)
	}
	parts, err = c.choose("containerd", "node-b")
	if err != nil || !slices.Equal(parts, []component{{"containerd", "node-b"}}) {
		t.Fatalf("chosen %v, error %v", parts, err)
	}
	if err := c.change(parts, set, "A=true", "", nil); !errors.Is(err, errUsage) {
		t.Errorf("gates for containerd: %v, want a usage error", err)
	}
}

func TestChooseComponents(t *testing.T) {
	c := testCluster(t, "node-a", "node-b")
	if parts, err := c.choose("kubelet", ""); err != nil || len(parts) != 2 {
		t.Errorf("kubelet without a node: %v, %v; want both", parts, err)
	}
	for _, pair := range [][2]string{{"kubelet", "node-c"}, {"kube-apiserver", "node-a"}, {"docker", ""}} {
		if parts, err := c.choose(pair[0], pair[1]); !errors.Is(err, errUsage) {
			t.Errorf("%q chooses %v, %v; want a usage error", pair, parts, err)
		}
	}
	if parts, err := testCluster(t).choose("kubelet", ""); !errors.Is(err, errUsage) {
		t.Errorf("kubelet of a cluster without nodes: %v, %v", parts, err)
	}
}

// TestStatusIsReadByPrograms pins the names that programs outside read.
func TestStatusIsReadByPrograms(t *testing.T) {
	r, err := testCluster(t, "node-a").report()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var read struct {
		Kubernetes, Kubeconfig string
		Up                     bool
		Gates                  map[string]string
		Components             []map[string]any
		Nodes                  []map[string]any
	}
	if err := json.Unmarshal(text, &read); err != nil {
		t.Fatal(err)
	}
	if read.Kubernetes != "1.36.3" || read.Up || !strings.HasSuffix(read.Kubeconfig, "/kubeconfig") || read.Gates["A"] != "true" || len(read.Components) != 4 || len(read.Nodes) != 1 {
		t.Errorf("status %s", text)
	}
	for _, field := range []string{"name", "ip", "kubeletRoot", "cdiRoot", "hookRoot", "containerdSocket", "components"} {
		if read.Nodes[0][field] == nil {
			t.Errorf("a node's status has no %q: %s", field, text)
		}
	}
	for _, field := range []string{"name", "pid", "running", "rssBytes", "log"} {
		if read.Components[0][field] == nil {
			t.Errorf("a component's status has no %q: %s", field, text)
		}
	}
}
