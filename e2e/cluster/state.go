package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
)

// cluster is one cluster's state folder and what is recorded there.
//
//	<dir>/cluster.json   what was asked for (settings)
//	<dir>/kubeconfig     the admin's
//	<dir>/pki/           certificates, keys and the components' kubeconfigs
//	<dir>/etcd/          etcd's data
//	<dir>/run/           one record for each process, and one for each holder of namespaces
//	<dir>/log/           one log for each component
//	<dir>/images/        the test images
//	<dir>/<node>/        what belongs to a node: kubelet/ (the kubelet's root), cdi/, containerd/, ...
type cluster struct {
	name, dir string
	settings
}

// settings are recorded, so that every later command of the tool knows them.
type settings struct {
	Kubernetes    string              `json:"kubernetes"`
	Gates         switches            `json:"gates"`
	RuntimeConfig switches            `json:"runtimeConfig"`
	Nodes         []string            `json:"nodes"`
	Overrides     map[string]override `json:"overrides"`
}

// override is what `start` and `restart` changed for one component, by its key.
type override struct {
	// Gates and RuntimeConfig replace the cluster's, an empty set too; null leaves the cluster's.
	Gates         switches `json:"gates"`
	RuntimeConfig switches `json:"runtimeConfig"`
	// Flags come after the tool's own.
	Flags []string `json:"flags"`
}

var (
	// namePattern keeps cluster and node names short: they are part of socket paths, which end at 107 bytes.
	namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?$`)
	// dirPattern keeps paths free of what YAML, TOML or a shell would read differently.
	dirPattern = regexp.MustCompile(`^/[A-Za-z0-9._/-]*$`)
)

// longestDir leaves room for <dir>/<node>/kubelet/plugins_registry/gpu.nvidia.com@reg.sock in a socket address.
const longestDir = 107 - len("/") - 15 - len("/kubelet/plugins_registry/gpu.nvidia.com@reg.sock")

// openCluster finds the state folder of a cluster; the cluster need not exist.
func openCluster(name string) (*cluster, error) {
	if !namePattern.MatchString(name) {
		return nil, usageError("cluster name %q: take up to 15 lower-case letters, digits and inner dashes", name)
	}
	base := os.Getenv("KERF_CLUSTER_DIR")
	if base == "" {
		base = "/var/lib/kerf-e2e"
	}
	dir := filepath.Join(base, name)
	if !dirPattern.MatchString(dir) || len(dir) > longestDir {
		return nil, usageError("state folder %q: KERF_CLUSTER_DIR must be an absolute path of letters, digits and ._/- and give a folder of at most %d bytes, for the sockets below it", dir, longestDir)
	}
	return &cluster{name: name, dir: dir}, nil
}

// loadCluster opens a cluster that was brought up before.
func loadCluster(name string) (*cluster, error) {
	c, err := openCluster(name)
	if err != nil {
		return nil, err
	}
	exists, err := c.load()
	if err == nil && !exists {
		err = fmt.Errorf("there is no cluster %q in %s: run `kerf-cluster up`", name, c.dir)
	}
	return c, err
}

// holdCluster opens a cluster that was brought up before and keeps other runs of the tool away from it until unlock.
func holdCluster(name string) (c *cluster, unlock func(), err error) {
	if err := checkMachine(); err != nil {
		return nil, nil, err
	}
	if c, err = loadCluster(name); err != nil {
		return nil, nil, err
	}
	if unlock, err = c.lock(); err != nil {
		return nil, nil, err
	}
	if _, err := c.load(); err != nil { // again, now that nobody changes it
		unlock()
		return nil, nil, err
	}
	return c, unlock, nil
}

// nodesNamed are the node of this name, or all with no name.
func (c *cluster) nodesNamed(name string) ([]string, error) {
	if name == "" {
		return c.Nodes, nil
	}
	if !slices.Contains(c.Nodes, name) {
		return nil, usageError("there is no node %q: the cluster has %q", name, c.Nodes)
	}
	return []string{name}, nil
}

// load reads the settings and reports whether there are any.
func (c *cluster) load() (bool, error) {
	text, err := os.ReadFile(c.path("cluster.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := json.Unmarshal(text, &c.settings); err != nil {
		return false, fmt.Errorf("%s is damaged (%w): run `kerf-cluster down --purge`", c.path("cluster.json"), err)
	}
	return true, nil
}

// save writes the settings.
func (c *cluster) save() error {
	text, err := json.MarshalIndent(c.settings, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(c.path("cluster.json"), append(text, '\n'), 0o644)
}

// path joins the state folder and names below it.
func (c *cluster) path(names ...string) string {
	return filepath.Join(append([]string{c.dir}, names...)...)
}

// lock keeps other runs of the tool away from this cluster.
func (c *cluster) lock() (unlock func(), err error) {
	return lockFile(c.lockPath(), "another kerf-cluster on cluster "+c.name)
}

// lockPath lies beside the state folder: the folder may go while the lock is held.
func (c *cluster) lockPath() string { return c.dir + ".lock" }

// version of the cluster's Kubernetes; settings hold only versions that were checked.
func (c *cluster) version() (version, error) { return parseVersion(c.Kubernetes) }
