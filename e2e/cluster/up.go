package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"time"
)

func cmdUp(args []string) error {
	set, name := flagSet("up")
	kubernetes := set.String("kubernetes", defaultKubernetes, "")
	gates := set.String("feature-gates", "", "")
	runtimeConfig := set.String("runtime-config", "", "")
	nodes := set.String("nodes", "node-a", "")
	controlPlaneOnly := set.Bool("control-plane-only", false, "")
	words, rest, err := parse(set, args)
	if err != nil {
		return err
	}
	if err := noWords(set, words, rest); err != nil {
		return err
	}
	if *controlPlaneOnly {
		if isSet(set, "nodes") {
			return usageError("up: --nodes and --control-plane-only exclude each other")
		}
		*nodes = ""
	}
	wanted, v, err := readSettings(*kubernetes, *gates, *runtimeConfig, *nodes)
	if err != nil {
		return err
	}
	c, err := openCluster(*name)
	if err != nil {
		return err
	}
	if err := checkMachine(); err != nil {
		return err
	}
	built, err := build(v)
	if err != nil {
		return err
	}
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer unlock()
	return c.up(wanted, built)
}

// readSettings checks what the user asks for.
func readSettings(kubernetes, gates, runtimeConfig, nodes string) (settings, version, error) {
	v, err := parseVersion(kubernetes)
	if err != nil {
		return settings{}, v, err
	}
	wanted := settings{Kubernetes: v.String(), Nodes: splitList(nodes), Overrides: map[string]override{}}
	if wanted.Gates, err = changeGates(nil, gates, v); err != nil {
		return settings{}, v, err
	}
	if wanted.RuntimeConfig, err = parseRuntimeConfig(runtimeConfig); err != nil {
		return settings{}, v, err
	}
	wanted.RuntimeConfig = withNeededAPIs(wanted.RuntimeConfig, wanted.Gates, v)
	if len(wanted.Nodes) > maxNodes {
		return settings{}, v, usageError("%d nodes are too many: take at most %d", len(wanted.Nodes), maxNodes)
	}
	for i, node := range wanted.Nodes {
		if !namePattern.MatchString(node) || slices.Contains(ownFolders, node) {
			return settings{}, v, usageError("node name %q: take up to 15 lower-case letters, digits and inner dashes, and none of %q", node, ownFolders)
		}
		if slices.Contains(wanted.Nodes[:i], node) {
			return settings{}, v, usageError("node name %q is there twice", node)
		}
	}
	return wanted, v, nil
}

// ownFolders are names in the state folder that a node can't have.
var ownFolders = []string{"pki", "etcd", "run", "log", "images", "hosts", "kubeconfig"}

// up starts a cluster in an empty state folder or in that of the same cluster after `down`.
func (c *cluster) up(wanted settings, built programs) error {
	exists, err := c.load()
	if err != nil {
		return err
	}
	if exists && (c.Kubernetes != wanted.Kubernetes || !slices.Equal(c.Nodes, wanted.Nodes)) {
		return fmt.Errorf("cluster %q has Kubernetes %s and the nodes %q: to change them run `kerf-cluster down --purge` first", c.name, c.Kubernetes, c.Nodes)
	}
	if isUp(c.dir) {
		return c.alreadyUp(wanted)
	}
	c.settings = wanted
	if err := c.save(); err != nil {
		return err
	}
	say("cluster %s: Kubernetes %s, nodes %q, gates %q", c.name, c.Kubernetes, c.Nodes, c.Gates.String())
	begun := time.Now()
	control, err := c.prepare()
	if err != nil {
		return err
	}
	// The nodes' containerd needs nothing of the control plane, so it takes its images while the API server starts.
	images := make(chan error, 1)
	go func() { images <- c.startContainerd(built) }()
	if err := c.start(built, component{"etcd", ""}, component{"kube-apiserver", ""}); err != nil {
		return errors.Join(err, <-images)
	}
	say("API server ready")
	if err := <-images; err != nil {
		return err
	}
	var rest []component
	for _, p := range c.components() {
		if p.name != "containerd" {
			rest = append(rest, p)
		}
	}
	if err := c.start(built, rest...); err != nil {
		return err
	}
	if err := c.waitUsable(control, begun); err != nil {
		return err
	}
	say("ready; try `kerf-cluster exec kubectl get nodes`")
	return nil
}

// alreadyUp is the answer to `up` on a running cluster: fine when it is what the user wants.
func (c *cluster) alreadyUp(wanted settings) error {
	var dead []string
	for _, node := range append([]string{""}, c.Nodes...) {
		if _, err := c.enter(node); err != nil {
			return fmt.Errorf("a part of cluster %q is gone: run `kerf-cluster down` first", c.name)
		}
	}
	for _, p := range c.components() {
		if running, err := c.recorded(p.key()); err != nil || !running.alive() {
			dead = append(dead, p.String())
		}
	}
	switch {
	case len(dead) > 0:
		return fmt.Errorf("cluster %q is up, but %q do not run: start them, or run `kerf-cluster down` first", c.name, dead)
	case !maps.Equal(c.Gates, wanted.Gates) || !maps.Equal(c.RuntimeConfig, wanted.RuntimeConfig):
		return fmt.Errorf("cluster %q is up with gates %q and runtime configuration %q: run `kerf-cluster down` first", c.name, c.Gates.String(), c.RuntimeConfig.String())
	}
	say("cluster %s is up already", c.name)
	return nil
}

// prepare makes the certificates, the namespaces with their mounts and network, and the nodes' cgroups.
func (c *cluster) prepare() (namespaces, error) {
	if err := c.makePKI(); err != nil {
		return namespaces{}, err
	}
	var folders []string
	if len(c.Nodes) > 0 {
		folders = sortedKeys(c.nodeMounts(c.Nodes[0]))
	}
	if err := joinMachine(c, folders); err != nil {
		return namespaces{}, err
	}
	control, err := c.makeNamespaces("")
	if err != nil {
		return namespaces{}, err
	}
	if err := c.mountNames(control); err != nil {
		return namespaces{}, err
	}
	var nodes []namespaces
	for _, node := range c.Nodes {
		inside, err := c.makeNamespaces(node)
		if err != nil {
			return namespaces{}, err
		}
		if err := c.mountNode(node, inside); err != nil {
			return namespaces{}, err
		}
		if err := c.makeCgroup(node); err != nil {
			return namespaces{}, err
		}
		nodes = append(nodes, inside)
	}
	return control, c.makeNetwork(control, nodes)
}

// startContainerd starts the nodes' containerd and brings the test images in.
func (c *cluster) startContainerd(built programs) error {
	archives, err := c.writeTestImages(built)
	if err != nil {
		return err
	}
	for _, node := range c.Nodes {
		if err := c.start(built, component{"containerd", node}); err != nil {
			return err
		}
		if err := c.importImages(built, node, archives); err != nil {
			return err
		}
	}
	return nil
}

// waitUsable waits until pods can be created (which takes the default ServiceAccount) and placed on every node.
func (c *cluster) waitUsable(control namespaces, begun time.Time) error {
	api, err := c.apiClient(control)
	if err != nil {
		return err
	}
	const account = "/api/v1/namespaces/default/serviceaccounts/default"
	if err := waitUntil("the default ServiceAccount", patience, func(ctx context.Context) error {
		_, err := api.get(ctx, account)
		return err
	}); err != nil {
		return err
	}
	say("control plane ready")
	for _, node := range c.Nodes {
		if err := waitUntil("node "+node+" to be Ready", patience, func(ctx context.Context) error {
			return api.nodeReady(ctx, node, begun)
		}); err != nil {
			return fmt.Errorf("%w; see %s", err, path.Join(c.dir, "log", componentKey("kubelet", node)+".log"))
		}
		say("node %s Ready", node)
	}
	return nil
}
